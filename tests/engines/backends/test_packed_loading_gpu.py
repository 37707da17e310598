"""Published packed weights brought to the GPU: in the kernels' layout they are those that NumPy reads, bit by bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gpu_device import device_copy

from edgellm.engines.backends.packed_loading import PackedLoader
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import EngineError
from edgellm.engines.families import decoder_config
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.quantization.device_layouts import packed_layouts
from edgellm.engines.quantization.stored import AWQ_PLACES
from edgellm.kernels.errors import KernelError
from edgellm.kernels.quantization.device_layout import from_device_layout
from edgellm.kernels.quantization.turn import turn

GOLDENS = Path(__file__).parents[2] / "goldens" / "quantized"
NAMES = sorted(path.name for path in GOLDENS.iterdir())
#: Of each published arrangement of codes one that the kernels take.
LOADED = ("awq_group32", "autoround_gptq_zeros", "gptq_v1_group32", "ct_w4_group32", "ct_w4_group32_zeros")


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_weights_in_the_kernels_layout_are_those_of_the_file(gpu, name: str) -> None:
    with Checkpoint.open(GOLDENS / name) as checkpoint:
        specs = decoder_weights(decoder_config(checkpoint.config, checkpoint.generation_config))
        dtype = checkpoint.dtype if checkpoint.dtype in ("float16", "bfloat16") else "float16"
        try:
            layouts = packed_layouts(checkpoint, specs, dtype)
        except EngineError:
            assert name not in LOADED
            pytest.skip("no kernels for it")
        specs, sizes = [spec for spec in specs if spec.name in layouts], list[int]()
        found = PackedLoader(gpu, gpu.kernel_module).load(checkpoint, specs, sizes.append)
        assert found.keys() == layouts.keys() and len(sizes) == len(specs)
        for spec in specs:
            parts = [checkpoint.packed(*part) for part in spec.parts]
            matrix = found[spec.name]
            assert matrix.data.shape == layouts[spec.name].shape
            weight = from_device_layout(matrix.layout, gpu.download(matrix.data))
            expected = np.concatenate([part.values() for part in parts])
            np.testing.assert_array_equal(weight.values(), expected, err_msg=spec.name)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width"), [(64, 32), (8, 1), (200, 70)])
@pytest.mark.parametrize("awq", [False, True])
def test_words_are_turned(gpu, rows: int, width: int, awq: bool) -> None:
    codes = np.random.default_rng(0).integers(0, 16, (rows, 8 * width)).astype(np.uint32)
    expected = _words(codes.reshape(rows, width, 8), range(8))
    given = expected.T if not awq else _words(codes.T.reshape(8 * width, rows // 8, 8), AWQ_PLACES)
    words = device_copy(gpu, np.ascontiguousarray(given))
    target = gpu.empty((rows, width), "uint32")
    turn(gpu.kernel_module, words, target, awq)()
    np.testing.assert_array_equal(gpu.download(target), expected)
    with pytest.raises(KernelError, match="do not become"):
        turn(gpu.kernel_module, words[1:], target, awq)


def _words(codes: np.ndarray, places) -> np.ndarray:
    """Of eight codes each, at the places of a word."""
    shifts = np.array([4 * place for place in places], np.uint32)
    return np.bitwise_or.reduce(codes << shifts, -1).astype(np.uint32)
