"""Quantizing on a GPU: what its kernels choose and compute is what NumPy does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import load_numpy_weights
from edgellm.engines.families import decoder_config
from edgellm.engines.quantizer.arithmetic import NUMPY, Arithmetic, CudaArithmetic
from edgellm.engines.quantizer.calibration import layer_program
from edgellm.engines.quantizer.quantizer import QuantizationOptions, quantize_checkpoint
from edgellm.engines.quantizer.rounding import CLIPPING
from edgellm.kernels.quantization.packed_weight import WeightFormat
from edgellm.opened_model import SHIPPED_MODEL

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cuda() -> Iterator[Arithmetic]:
    arithmetic = CudaArithmetic()
    yield arithmetic
    arithmetic.close()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("codes", "group"), [("int4", 32), ("int4", 64), ("int4", 128), ("int8", None)])
def test_scales_and_codes(cuda: Arithmetic, codes: str, group: int | None, zeros: bool, dtype: str) -> None:
    """Sums of other order may decide otherwise between two scales that are as good: seldom."""
    random, format = np.random.default_rng(3), WeightFormat(codes, group, zeros, dtype)
    weights = random.standard_normal((150, 256)).astype(np.float32) * np.float32(0.03)
    weights[7] = 0
    given: list[np.ndarray | None] = [None, random.random(256).astype(np.float32)]
    if group is not None:
        given.append(random.standard_normal((256 // group, group, group)).astype(np.float32))
    for factors in given:
        expected = NUMPY.quantize_rows(weights, format, factors, CLIPPING)
        found = cuda.quantize_rows(weights, format, factors, CLIPPING)
        assert (found.scales == expected.scales).mean() > 0.995
        assert (found.codes == expected.codes).mean() > 0.995
        assert (found.zeros is None) == (expected.zeros is None)
        if found.zeros is not None:
            assert (found.zeros == expected.zeros).mean() > 0.99


def test_products_of_rows_and_of_columns(cuda: Arithmetic) -> None:
    random = np.random.default_rng(4)
    inputs, weight = (random.standard_normal((rows, 320)).astype(np.float32) for rows in (77, 200))
    np.testing.assert_allclose(cuda.linear(inputs, weight), NUMPY.linear(inputs, weight), atol=1e-4)
    for group in (32, 64):
        observations = [arithmetic.observation(320, group) for arithmetic in (cuda, NUMPY)]
        for observation in observations:
            for rows in (inputs, inputs[:13]):
                observation.add(rows, np.arange(5))
        found, expected = (observation.statistics() for observation in observations)
        np.testing.assert_allclose(found.magnitude, expected.magnitude, rtol=1e-5)
        for left, right in zip(found.factors, expected.factors, strict=True):
            np.testing.assert_allclose(left @ left.T, right @ right.T, atol=1e-4)


def test_the_shipped_model(cuda: Arithmetic, tmp_path: Path) -> None:
    """The first bytes of layers differ where two scales are as good, and the rest follows; errors are as small."""
    texts, options = [list(range(10, 200))], QuantizationOptions(group_size=64)
    reports = [
        quantize_checkpoint(SHIPPED_MODEL, tmp_path / name, options, texts, arithmetic=arithmetic)
        for name, arithmetic in (("cuda", cuda), ("numpy", NUMPY))
    ]

    def weights(path: Path) -> dict[str, np.ndarray]:
        with Checkpoint.open(path) as checkpoint:
            config = decoder_config(checkpoint.config, checkpoint.generation_config, dtype=checkpoint.dtype)
            return load_numpy_weights(checkpoint, list(layer_program(config, 0, 1).weights.values()))

    cuda_weights, numpy_weights = (weights(report.path) for report in reports)
    for name, expected in numpy_weights.items():
        assert np.abs(cuda_weights[name] - expected).mean() <= 0.05 * np.abs(expected).mean(), name
