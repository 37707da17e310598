"""What the launchers of linear layers and attention refuse before anything is launched, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode.attention import attention_launch
from edgellm.kernels.decode.contract import (
    AddedTo,
    AttentionScratch,
    AttentionStep,
    AttentionWeights,
    Kept,
    LinearWeights,
    NormedInput,
    attention_refusal,
)
from edgellm.kernels.decode.linear import CudaDecodeKernels
from edgellm.kernels.decode.tiled_linear import CudaTiledKernels
from edgellm.kernels.decode.tilings import tilings
from edgellm.kernels.errors import KernelError


def module() -> SimpleNamespace:
    """What launchers know of a GPU. There are no kernels behind it: a launch that was not refused fails."""
    return SimpleNamespace(
        architecture="sm_80", multiprocessors=100, shared_limit=1 << 18, has_clusters=False, load=lambda source: None
    )


def few() -> CudaDecodeKernels:
    return CudaDecodeKernels(module(), "float16", 64)


def array(*shape: int, dtype: str = "float16") -> DeviceArray:
    """An array at an address that nothing reads."""
    return DeviceArray(1 << 20, shape, dtype)


def weights(rows: int, columns: int) -> LinearWeights:
    return LinearWeights(array(rows, columns))


def normed(*shape: int, dtype: str = "float16", **more) -> NormedInput:
    width = more.get("width", shape[-1])
    return NormedInput(array(*shape, dtype=dtype), array(width), 1e-5, **more)


def test_linear_layers_of_few_rows_refuse_what_does_not_fit():
    kernels, wide = few(), array(17, 64)
    with pytest.raises(KernelError, match=r"1 to 16 rows of a width that is a multiple of 8, found 1088 elements"):
        kernels.linear_residual(wide, weights(8, 64), None, array(17, 8), selected=array(17, 1))
    with pytest.raises(KernelError, match=r"1 to 16 rows of a width that is a multiple of 8, found 60 elements"):
        kernels.linear_residual(array(2, 60), weights(8, 60), None, array(1, 8), selected=array(1, 1))
    with pytest.raises(KernelError, match=r"x has shape \[2, 64\]; expected at least 3 rows of 64 elements"):
        kernels.linear_residual(array(2, 64), weights(8, 64), None, array(3, 8))
    with pytest.raises(KernelError, match=r"output has shape \[1, 8\]; expected at least 2 rows of 8 elements"):
        kernels.linear_residual(array(4, 64), weights(8, 64), None, array(1, 8), selected=array(2, 1))
    with pytest.raises(KernelError, match=r"output has shape \[1, 8\]; expected at least 2 rows of 8 elements"):
        kernels.norm_linear([normed(2, 64)], weights(8, 64), array(1, 8))
    with pytest.raises(KernelError, match=r"no activation relu, only silu, gelu_tanh"):
        kernels.norm_gate_up(normed(2, 64), weights(16, 64), "relu", array(2, 8))
    with pytest.raises(KernelError, match=r"features of \(2, 128\) have no place 2 of width 64"):
        kernels.norm_linear([normed(2, 64)], weights(8, 64), array(2, 8), kept=Kept(array(2, 128), 2))


def test_sums_of_a_residual_have_a_place_of_their_own():
    kernels, rows = few(), array(2, 64, dtype="float32")
    added = AddedTo(rows, DeviceArray(1 << 21, (2, 64), "float32"), array(64), 1e-5)
    for wrong in (added._replace(output=rows), added._replace(residual=array(2, 64)), added._replace(weight=array(32))):
        with pytest.raises(KernelError, match=r"float32 \[2, 64\] are not added to .* another place for the sum"):
            kernels.norm_linear([NormedInput(rows, None, added=wrong)], weights(8, 64), array(2, 8, dtype="float32"))
    gates, others = array(2, 8), NormedInput(array(2, 64, dtype="float32"), None, width=16)
    with pytest.raises(KernelError, match=r"8 gates .* for columns float32 of 16"):
        kernels.token_gate_linear(NormedInput(rows, None), weights(8, 64), "silu", others, gates)
    with pytest.raises(KernelError, match=r"and 16 columns of float32 \[2, 64\] give no float16"):
        kernels.token_gate(array(2, 8, dtype="float32"), "silu", others, gates)
    with pytest.raises(KernelError, match=r"do not fit; expected float32 and float16 of as many elements"):
        kernels.token_inputs(rows, array(2, 64), array(24), 1e-5, 0.0, 1.0)


def test_inputs_that_no_kernel_norms_are_refused():
    kernels = few()
    with pytest.raises(KernelError, match=r"a norm of 64 weights for 32 columns; expected as many"):
        kernels.norm_linear([NormedInput(array(2, 32), array(64), 1e-5)], weights(8, 32), array(2, 8))
    with pytest.raises(KernelError, match=r"columns 40 to 72 of an input of 64 columns"):
        kernels.norm(normed(2, 64, first=40, width=32), array(2, 512))
    with pytest.raises(KernelError, match=r"found columns 4 to 36 of float16 \[2, 64\]"):
        kernels.norm(normed(2, 64, first=4, width=32), array(2, 512))
    with pytest.raises(KernelError, match=r"takes two inputs with norms"):
        kernels.norm_linear([NormedInput(array(2, 32), None)] * 2, weights(8, 64), array(2, 8))
    with pytest.raises(KernelError, match=r"the two inputs of a linear layer are float32 \[2, 32\] and float16"):
        kernels.norm_linear([normed(2, 32, dtype="float32"), normed(2, 32)], weights(8, 64), array(2, 8))
    with pytest.raises(KernelError, match=r"norms of one epsilon and offset"):
        kernels.norm_linear([normed(2, 32), normed(2, 32, offset=1.0)], weights(8, 64), array(2, 8))


def test_parts_that_are_not_normed_where_they_are_are_refused():
    kernels, rows = few(), array(2, 64, dtype="float32")
    part = NormedInput(rows, array(32), 1e-5, width=32)
    with pytest.raises(KernelError, match=r"3 parts of rows; expected 1 to 2 of one array, each with a weight"):
        kernels.norm_parts([part] * 3)
    for other in (part._replace(weight=None), part._replace(values=array(2, 32, dtype="float32"))):
        with pytest.raises(KernelError, match=r"2 parts of rows; expected 1 to 2 of one array"):
            kernels.norm_parts([part, other])
    with pytest.raises(KernelError, match=r"parts of rows of float16 are normed where they are; expected float32"):
        kernels.norm_parts([part._replace(values=array(2, 64))])
    with pytest.raises(KernelError, match=r"found columns 0 to 12 of float32 \[2, 64\]"):
        kernels.norm_parts([part._replace(weight=array(12), width=12)])


def test_norms_and_rows_to_scale_refuse_what_does_not_fit():
    kernels = few()
    with pytest.raises(KernelError, match=r"columns 480 to 544 of float16 \[2, 512\] take no normed input"):
        kernels.norm(normed(2, 64), array(2, 512), column=480)
    with pytest.raises(KernelError, match=r"output has shape \[1, 64\]; expected at least 40 rows of 64 elements"):
        kernels.norm(normed(40, 64), array(1, 64))
    with pytest.raises(KernelError, match=r"columns 0 to 64 of float32 \[2, 64\] take no normed input"):
        kernels.norm(normed(2, 64), array(2, 64, dtype="float32"))
    with pytest.raises(KernelError, match=r"rows to scale are float32 \[2, 64\]; expected float16"):
        kernels.scale_rows(array(2, 64, dtype="float32"), 8.0, array(2, 64, dtype="float32"))


def test_linear_layers_of_many_rows_refuse_what_does_not_fit():
    kernels, x = CudaTiledKernels(module(), "float16"), array(40, 512)
    gpu = kernels.gpu
    with pytest.raises(KernelError, match=r"a tiling for 32 rows was given 40: take one of tilings\(40, gpu\)"):
        kernels.linear(x, weights(8, 512), array(40, 8, dtype="float32"), tiling=tilings(20, gpu)[0])
    with pytest.raises(KernelError, match=r"output has shape \[39, 8\]; expected at least 40 rows of 8 elements"):
        kernels.linear(x, weights(8, 512), array(39, 8, dtype="float32"))
    with pytest.raises(KernelError, match=r"1 to 64 rows of a width that is a multiple of 8, found \(40, 512\)"):
        kernels.linear(x, weights(8, 1024), array(40, 8, dtype="float32"))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(8, 1, 264), (8, 1, 60), (17, 1, 64), (7, 2, 64), (8, 1, 0)], ids=str
)
def test_heads_that_attention_does_not_take_are_named(heads: int, kv_heads: int, size: int) -> None:
    assert f"not {heads} query and {kv_heads} key-value heads of {size}" in attention_refusal(heads, kv_heads, size)
    assert attention_refusal(8, 1, 256) is attention_refusal(8, 1, 512) is None


def test_more_tokens_than_attention_takes_are_refused():
    step = AttentionStep(array(1, 65, 64), array(1), array(1, 1, 65, 128), *[array(1, 2, 128, 64)] * 2)
    scratch = AttentionScratch(array(1), array(1))
    plain = AttentionWeights(None, None, 1e-5, 0.0, 0.125)
    reason = r"up to 64 tokens a sequence and rotates at most a head, by fours of elements, found 65 tokens"
    with pytest.raises(KernelError, match=reason):
        attention_launch(module(), array(65, 512), plain, step, scratch, array(65, 256))


@pytest.mark.parametrize("rotary", [68, 6])
def test_rotated_elements_that_attention_does_not_take_are_refused(rotary: int) -> None:
    step = AttentionStep(array(1, 1, rotary), array(1), None, *[array(1, 2, 128, 64)] * 2)
    plain = AttentionWeights(None, None, 1e-5, 0.0, 0.125)
    with pytest.raises(KernelError, match=rf"{rotary} rotated elements of 64"):
        attention_launch(module(), array(1, 512), plain, step, AttentionScratch(array(1), array(1)), array(1, 256))
