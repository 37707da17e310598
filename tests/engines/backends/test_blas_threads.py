"""The number of BLAS threads during a small model's step."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm.engines.backends import numpy_backend as blas_threads
from edgellm.engines.backends.numpy_backend import one_blas_thread


@pytest.fixture
def threads():
    functions = blas_threads._openblas()
    if functions is None:
        pytest.skip("NumPy does not use OpenBLAS here")
    get, set_threads = functions
    before = get()
    yield functions
    set_threads(before)


def test_one_thread_inside_and_the_former_number_afterwards(threads) -> None:
    get, set_threads = threads
    set_threads(2)
    with one_blas_thread():
        assert get() == 1
        np.dot(np.ones((64, 64), np.float32), np.ones(64, np.float32))
    assert get() == 2
    with pytest.raises(KeyError), one_blas_thread():
        raise KeyError
    assert get() == 2


def test_without_openblas_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas_threads, "_openblas", lambda: None)
    with one_blas_thread():
        pass
