"""Published packed weights brought to the GPU: in the kernels' layout they are those that NumPy reads, bit by bit."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from device_weights import from_device_layout
from golden_files import golden_folder
from gpu_device import device_copy

from edgellm.engines.backends import cuda_device, packed_loading, pinned_ring
from edgellm.engines.backends.device_layouts import packed_layouts, with_delta_products
from edgellm.engines.backends.packed_loading import PackedLoader
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.families import decoder_config
from edgellm.engines.model.decoder import decoder_weights
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.errors import KernelError
from edgellm.kernels.quantization.device_layout import InputPermutation
from edgellm.kernels.quantization.row_runs import PackedRuns
from edgellm.kernels.quantization.turn import AWQ_PLACES, TURNED, arrange, turn

GOLDENS = golden_folder("quantized")
NAMES = sorted(path.name for path in GOLDENS.iterdir())
#: Those whose q, k and v are packed in part, or a gate and not the up.
IN_PART = ("autoround_awq", "awq_exceptions", "ct_mixed", "gptq_v1_bias_dynamic")
#: Those whose gates and ups have inputs in orders or scales of their own, as no package gives them, q, k and v too.
UNLIKE = ("ct16_w4_actorder_group", "ct16_w4_actorder_group_zeros", "gptq_v1_zeros_desc_act", "gptq_v2_desc_act")
UNLIKE += ("modelopt_int4_awq", "modelopt_nvfp4_awq")


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_weights_in_the_kernels_layout_are_those_of_the_file(gpu, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_loading, "_PIECE", 1500)  # bytes: some rows of a layer at a time
    monkeypatch.setattr(pinned_ring, "_PIECE", 1 << 10)  # and a part in more than one buffer
    monkeypatch.setattr(cuda_device, "RING_BYTES", 3 << 10)
    monkeypatch.setattr(cuda_device, "_LARGE", 1)
    with Checkpoint.open(GOLDENS / name) as checkpoint:
        config = decoder_config(checkpoint.config, checkpoint.generation_config)
        specs = decoder_weights(with_delta_products(config, checkpoint))
        dtype = checkpoint.dtype if checkpoint.dtype in ("float16", "bfloat16") else "float16"
        layouts = packed_layouts(checkpoint, specs, dtype)
        specs, sizes = [spec for spec in specs if spec.name in layouts], list[int]()
        memory = gpu.zeros_side_by_side({spec.name: (layouts[spec.name].shape, "uint8") for spec in specs})
        with gpu.large_uploads(3 << 10):
            found = PackedLoader(gpu, gpu.kernel_module, dtype).load(checkpoint, specs, memory, sizes.append)
        assert found.keys() == {spec.name for spec in specs}
        runs = {name: each.runs if isinstance(each, PackedRuns) else (each,) for name, each in found.items()}
        assert sizes == [sum(getattr(run, "data", run).nbytes for run in each) for each in runs.values()]
        assert any(isinstance(run, DeviceArray) for each in runs.values() for run in each) == (name in IN_PART)
        for spec, size in zip(specs, sizes, strict=True):
            parts = [(part, shape[0], checkpoint.packed(part, shape)) for part, shape in spec.parts]
            assert size <= math.prod(layouts[spec.name].shape) <= 1.1 * size
            assert name not in UNLIKE or len(runs[spec.name]) == len(parts)
            for run in runs[spec.name]:
                own_parts = [parts.pop(0)]
                while sum(rows for _, rows, _ in own_parts) < run.shape[0]:
                    own_parts.append(parts.pop(0))
                if isinstance(run, DeviceArray):
                    expected = np.concatenate([checkpoint.raw(part) for part, *_ in own_parts])
                    np.testing.assert_array_equal(gpu.download(run), expected, err_msg=spec.name)
                    continue
                own = [packed for *_, packed in own_parts]
                weight, inputs = from_device_layout(run.layout, gpu.download(run.data)), InputPermutation.of(own[0])
                assert (inputs is None) == (run.inputs is None) and run.dtype == dtype
                for given, arranged in zip(inputs or (), run.inputs or (), strict=True):
                    assert (given is None) == (arranged is None)
                    if given is not None:
                        np.testing.assert_array_equal(gpu.download(arranged), given)
                found_values, expected = replace(weight, order=own[0].order).values(), [each.values() for each in own]
                np.testing.assert_array_equal(found_values, np.concatenate(expected), err_msg=spec.name)
            assert not parts


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width"), [(64, 32), (8, 1), (200, 70)])
@pytest.mark.parametrize("arrangement", TURNED)
def test_words_are_turned(gpu, rows: int, width: int, arrangement: str) -> None:
    codes = np.random.default_rng(0).integers(0, 16, (rows, 8 * width)).astype(np.uint32)
    expected = _words(codes.reshape(rows, width, 8), range(8))
    if arrangement == "columns":
        given = expected.T
    elif arrangement == "awq":
        given = _words(codes.T.reshape(8 * width, rows // 8, 8), AWQ_PLACES)
    else:
        given = ((codes[::2] ^ 8) | (codes[1::2] ^ 8) << 4).astype(np.uint8).view(np.uint32)
    words, target = device_copy(gpu, np.ascontiguousarray(given)), gpu.empty((rows, width), "uint32")
    turn(gpu.kernel_module, words, target, arrangement)()
    np.testing.assert_array_equal(gpu.download(target), expected)
    with pytest.raises(KernelError, match="do not become"):
        turn(gpu.kernel_module, words[1:], target, arrangement)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
def test_columns_are_put_into_another_order(gpu, bits: int) -> None:
    random = np.random.default_rng(0)
    codes, order = random.integers(0, 1 << bits, (300, 136)).astype(np.uint8), random.permutation(136).astype(np.int32)
    packed = [each if bits == 8 else each[:, ::2] | each[:, 1::2] << 4 for each in (codes, codes[:, order])]
    given, own = device_copy(gpu, np.ascontiguousarray(packed[0])), device_copy(gpu, order)
    target = gpu.empty(packed[0].shape, "uint8")
    arrange(gpu.kernel_module, given, target, own)()
    np.testing.assert_array_equal(gpu.download(target), packed[1])
    with pytest.raises(KernelError, match="not arranged"):
        arrange(gpu.kernel_module, given, target[1:], own)


def _words(codes: np.ndarray, places) -> np.ndarray:
    """Of eight codes each, at the places of a word."""
    shifts = np.array([4 * place for place in places], np.uint32)
    return np.bitwise_or.reduce(codes << shifts, -1).astype(np.uint32)
