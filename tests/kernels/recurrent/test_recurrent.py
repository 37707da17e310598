"""The recurrent kernels' twins against computations in float64 that are written otherwise, and their bits: the same in
chains, trees, chunks and commits."""

from __future__ import annotations

import numpy as np
import pytest
from recurrent_cases import CONVOLUTIONS, DELTA_SHAPES, ConvolutionCase, DeltaCase, noise, path_to, trees, twin_run

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.bfloat16 import bfloat16_bits, float32_of
from edgellm.kernels.errors import KernelError
from edgellm.kernels.recurrent.contract import (
    AcceptedPath,
    GatedHeadNorm,
    GatedHeads,
    GroupNorm,
    LayerColumns,
    LayerMatrices,
    PartNorm,
    convolution_refusal,
    delta_refusal,
)
from edgellm.kernels.recurrent.twin import NumpyRecurrent, ordered_sum

TWIN = NumpyRecurrent()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(19)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def delta_reference(case: DeltaCase, slot: int, path: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [path, heads, values] and matrices [heads, values, keys] in float64, by products of whole matrices:
    S <- S (exp(g) (I - beta k k^T)) + beta v k^T."""
    (key_heads, heads), (keys, values) = case.heads, case.sizes
    rows, matrix = case.rows[slot].astype(np.float64), case.matrix[slot].astype(np.float64)
    b, a = (case.projected[slot, :, 7 + n * heads : 7 + (n + 1) * heads].astype(np.float64) for n in (0, 1))
    outputs = np.zeros((len(path), heads, values))
    for head in range(heads):
        group = head // (heads // key_heads)
        for number, token in enumerate(path):
            query = rows[token, group * keys : (group + 1) * keys]
            key = rows[token, (key_heads + group) * keys : (key_heads + group + 1) * keys]
            first = 2 * key_heads * keys + head * values
            query = query / np.sqrt(query @ query + 1e-6) / np.sqrt(keys)
            key = key / np.sqrt(key @ key + 1e-6)
            beta = sigmoid(b[token, head])
            decay = np.exp(
                -np.exp(case.gates.a_log[head]) * np.log1p(np.exp(a[token, head] + case.gates.dt_bias[head]))
            )
            turn = decay * (np.eye(keys) - beta * np.outer(key, key))
            matrix[head] = matrix[head] @ turn + beta * np.outer(rows[token, first : first + values], key)
            outputs[number, head] = matrix[head] @ query
    return outputs, matrix


def scan_reference(case: DeltaCase, slot: int, path: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The same of a selective scan: y_t = sum over s <= t of (C_t B_s) exp(a (d_(s+1) + .. + d_t)) d_s x_s, what the
    state before gives, and skip x_t."""
    (groups, heads), (keys, values), every = case.heads, case.sizes, slice(None)
    rows, matrix = case.rows[slot, path].astype(np.float64), case.matrix[slot].astype(np.float64)
    x = rows[:, : heads * values].reshape(-1, heads, values)
    b, c = np.split(rows[:, heads * values :].reshape(len(path), 2 * groups, keys), 2, axis=1)
    size = np.log1p(np.exp(case.projected[slot, path, 7 : 7 + heads].astype(np.float64) + case.gates.dt_bias))
    far = np.cumsum(-np.exp(case.gates.a_log.astype(np.float64)) * size, axis=0)
    outputs = np.zeros((len(path), heads, values))
    for head in range(heads):
        own_b, own_c = (each[:, head // (heads // groups)] for each in (b, c))
        weights = np.tril((own_c @ own_b.T) * np.exp(np.minimum(far[:, None, head] - far[None, :, head], 0)))
        added = size[:, head, None] * x[:, head]
        before = np.exp(far[:, head, None]) * (own_c @ matrix[head].T)
        outputs[:, head] = weights @ added + before + case.gates.skip[head] * x[:, head]
        left = np.exp(far[-1, head] - far[every, head])
        matrix[head] = np.exp(far[-1, head]) * matrix[head] + (added * left[:, None]).T @ own_b
    return outputs, matrix


@pytest.mark.parametrize("scans", [False, True])
@pytest.mark.parametrize("tokens", [1, 19])
@pytest.mark.parametrize(("heads", "sizes"), DELTA_SHAPES)
def test_the_delta_rule_and_the_scan_are_those_of_their_formulas(heads, sizes, tokens, scans) -> None:
    case = DeltaCase(heads, sizes, tokens, scans=scans)
    chunk = twin_run(case.kernel, *case.arguments(counts=[tokens, 0]))
    outputs, matrix = (scan_reference if scans else delta_reference)(case, 0, list(range(tokens)))
    np.testing.assert_allclose(chunk[4][0], outputs.reshape(tokens, -1), rtol=2e-5, atol=2e-5 * (5 if scans else 1))
    np.testing.assert_allclose(chunk[3][0], matrix, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(chunk[3][1], case.matrix[1])
    assert not chunk[4][1].any()


def test_the_nodes_of_a_tree_follow_the_formula_along_their_paths(rng) -> None:
    case = DeltaCase((2, 4), (24, 16), 12)
    parents = trees(rng, 2, 12, "random")
    tree = twin_run("gated_delta", *case.arguments(parents))
    for slot in (0, 1):
        for node in range(12):
            path = path_to(parents[slot], node)
            expected = delta_reference(case, slot, path)[0][-1].reshape(-1)
            found = tree[4][slot, node]
            np.testing.assert_allclose(
                found, expected if path[0] == 0 else np.zeros_like(expected), rtol=2e-5, atol=2e-5
            )


def test_what_a_delta_rule_keeps_is_what_its_gates_are() -> None:
    case = DeltaCase((1, 3), (8, 8), 5)
    kept = twin_run("gated_delta", *case.arguments())[6]
    b, a = case.projected[..., 7:10].astype(np.float64), case.projected[..., 10:13].astype(np.float64)
    decay = -np.exp(case.gates.a_log) * np.log1p(np.exp(a + case.gates.dt_bias))
    np.testing.assert_allclose(kept, np.concatenate((decay, sigmoid(b)), axis=-1), rtol=2e-6)


@pytest.mark.parametrize("scans", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 23])
@pytest.mark.parametrize(("heads", "sizes"), DELTA_SHAPES)
def test_matrices_have_the_same_bits_in_chains_trees_chunks_and_commits(rng, heads, sizes, tokens, scans) -> None:
    DeltaCase(heads, sizes, tokens, scans=scans).check(twin_run, rng)


@pytest.mark.parametrize(("columns", "groups"), [(96, 1), (96, 3), (4096, 1)])
def test_a_norm_behind_gates_is_that_of_its_formula(rng, columns, groups) -> None:
    value, gate, weight = noise(rng, 2, 3, columns), noise(rng, 2, 3, columns + 9), noise(rng, columns)
    *_, found = twin_run("gated_group_norm", value, gate, GroupNorm(weight, 1e-5, 5, groups), np.zeros_like(value))
    own = gate[..., 5 : 5 + columns].astype(np.float64)
    gated = (value * own * sigmoid(own)).reshape(2, 3, groups, -1)
    expected = gated / np.sqrt((gated**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(found, expected.reshape(value.shape) * weight, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolutions_have_the_same_bits_in_chains_trees_chunks_and_commits(rng, kind, tokens) -> None:
    channels, width, gated, silu, bias = kind
    ConvolutionCase(channels, width, tokens, gated, silu, bias).check(twin_run, rng)


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_a_sequence_has_the_same_bits_in_every_batch(slot) -> None:
    delta, convolution = DeltaCase((1, 2), (40, 24), 6, slots=3), ConvolutionCase(24, 4, 6, silu=True, slots=3)
    for kernel, case in (("gated_delta", delta), ("short_convolution", convolution)):
        whole = twin_run(kernel, *case.arguments())
        own = [
            array[slot : slot + 1].copy()
            if number not in (1 if kernel == "short_convolution" else 2,) and array is not None
            else array
            for number, array in enumerate(case.arguments())
        ]
        alone = twin_run(kernel, *own)
        for place in (4, 6):
            np.testing.assert_array_equal(alone[place][0], whole[place][slot])


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize("tree", [False, True])
def test_a_convolution_is_a_sum_over_the_last_tokens(rng, kind, tree) -> None:
    channels, width, gated, silu, bias = kind
    case = ConvolutionCase(channels, width, 11, gated, silu, bias)
    parents = trees(rng, 2, 11, "random" if tree else "chain")
    *_, output, _, kept, _ = twin_run("short_convolution", *case.arguments(parents))
    value = case.value.astype(np.float64)
    inputs = value[..., :channels] * (value[..., 2 * channels : 3 * channels] if gated else 1)
    np.testing.assert_allclose(kept, inputs, rtol=1e-6)
    for slot in (0, 1):
        for node in range(11):
            past = [*case.columns[slot].T, *(inputs[slot, place] for place in path_to(parents[slot], node))]
            expected = sum(past[-1 - j] * case.convolution.weight[:, width - 1 - j] for j in range(width))
            expected = expected + (case.offset if bias else 0)
            expected = expected * sigmoid(expected) if silu else expected
            expected = value[slot, node, channels : 2 * channels] * expected if gated else expected
            np.testing.assert_allclose(output[slot, node], expected, rtol=1e-5, atol=1e-5)


def test_columns_are_the_last_inputs_of_the_accepted_nodes(rng) -> None:
    columns, inputs = noise(rng, 3, 4, 3), noise(rng, 3, 9, 4)
    indices = np.array([[0, 2, 5, 8, -1], [0, 3, -1, -1, -1], [-1] * 5], np.int32)
    ((layer,), _) = twin_run(
        "commit_columns", [LayerColumns(columns, inputs)], AcceptedPath(indices, np.array([4, 2, 0], np.int32))
    )
    np.testing.assert_array_equal(layer.columns[0], inputs[0, [2, 5, 8]].T)
    np.testing.assert_array_equal(layer.columns[1], np.column_stack((columns[1, :, 2], inputs[1, 0], inputs[1, 3])))
    np.testing.assert_array_equal(layer.columns[2], columns[2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_norm_their_columns_of_a_part_by_the_squares_of_all(rng, dtype) -> None:
    """Of two parts of four ranks, each of which has half of one."""
    value, gate, weight = noise(rng, 2, 3, 96), noise(rng, 2, 3, 105, dtype=dtype), noise(rng, 96, dtype=dtype)
    whole = GroupNorm(weight, 1e-5, 5, 2)
    *_, expected = twin_run("gated_group_norm", value, gate, whole, noise(rng, 2, 3, 96, dtype=dtype))
    squares, found = np.zeros((2, 3, 8), np.float32), []
    shares = [(value[..., 24 * rank : 24 * rank + 24].copy(), 5 + 24 * rank, rank // 2) for rank in range(4)]
    for own, *part in shares:
        squares += twin_run("gated_part", own, gate, *part, None, np.full_like(squares, np.nan), None)[5]
    for rank, (own, *part) in enumerate(shares):
        norm = PartNorm(weight[24 * rank : 24 * rank + 24].copy(), 1e-5, 48)
        found.append(twin_run("gated_part", own, gate, *part, norm, squares, np.zeros(own.shape, weight.dtype))[6])
    found = float32_of(np.concatenate(found, axis=-1))
    np.testing.assert_allclose(found, float32_of(expected), rtol=1e-2 if dtype == "bfloat16" else 1e-5, atol=1e-6)
    assert not squares[..., 2:].any()


@pytest.mark.parametrize("size", [1, 8, 24, 63, 64, 65, 128, 200, 256])
def test_sums_are_those_of_the_products(rng, size) -> None:
    x, y = noise(rng, 3, size), noise(rng, 3, size)
    np.testing.assert_allclose(
        ordered_sum(x, y), (x.astype(np.float64) * y).sum(-1), rtol=1e-6, atol=1e-6 * np.sqrt(size)
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("size", "heads"), [(8, 1), (24, 5), (256, 2)])
def test_a_gated_norm_norms_each_head_first(rng, size, heads, dtype) -> None:
    value, gate = noise(rng, 2, 3, heads * size), noise(rng, 2, 3, heads * size + 9, dtype=dtype)
    weight, output = noise(rng, size, dtype=dtype), noise(rng, 2, 3, heads * size, dtype=dtype)
    found = twin_run("gated_norm", value, gate, GatedHeadNorm(weight, 1e-5, 4), output)[3]
    own = value.reshape(2, 3, heads, size).astype(np.float64)
    own = own / np.sqrt((own * own).mean(-1, keepdims=True) + 1e-5) * float32_of(weight)
    gates = float32_of(gate)[..., 4 : 4 + heads * size].astype(np.float64)
    expected = own.reshape(2, 3, -1) * gates * sigmoid(gates)
    tolerance = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    np.testing.assert_allclose(float32_of(found), expected, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_gates_of_attention_are_taken_out_and_applied(rng, dtype) -> None:
    heads, kv_heads, size = 3, 2, 8
    value = noise(rng, 2, 4, (2 * heads + 2 * kv_heads) * size, dtype=dtype)
    parts = value.reshape(2, 4, -1, size)
    qkv = np.zeros((2, 4, (heads + 2 * kv_heads) * size), value.dtype)
    found = twin_run("separate_gates", value, GatedHeads(heads, kv_heads, size), qkv)[2].reshape(2, 4, -1, size)
    np.testing.assert_array_equal(found, parts[:, :, [0, 2, 4, 6, 7, 8, 9]])
    context = noise(rng, 2, 4, heads * size, dtype=dtype)
    gated = twin_run("sigmoid_gate", value, GatedHeads(heads, kv_heads, size), context)[2]
    gates = float32_of(parts[:, :, [1, 3, 5]]).reshape(2, 4, -1)
    expected = (float32_of(context).astype(np.float64) * sigmoid(gates.astype(np.float64))).astype(np.float32)
    if dtype == "float32":
        np.testing.assert_allclose(gated, expected, rtol=1e-6)
    else:
        rounded = bfloat16_bits(expected) if dtype == "bfloat16" else expected.astype(dtype)
        assert (gated != rounded).mean() < 0.02  # where float64 rounds to the other neighbour


def refused(kernel: str, arguments: list, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        getattr(TWIN, kernel)(*arguments)


def test_arguments_that_do_not_fit_are_refused(rng) -> None:
    case = ConvolutionCase(8, 4, 3)
    given = case.arguments()
    refused("short_convolution", [*given[:3], case.columns[..., 1:].copy(), *given[4:]], "keeps 2 tokens; expected 3")
    gated = case.convolution._replace(gated=True)
    refused("short_convolution", [given[0], gated, *given[2:]], "value has 13 columns; expected at least 24")
    both = gated._replace(silu=True)
    refused("short_convolution", [given[0], both, *given[2:]], "a gated convolution has no activation")
    refused("short_convolution", [*given[:6], None, None], "either keeps its inputs")
    refused("short_convolution", [*given[:7], np.zeros(2, np.int32)], "either keeps its inputs")
    chunk = [*given[:5], np.zeros((2, 3), np.int32), None, np.zeros(2, np.int32)]
    refused("short_convolution", chunk, "not committed by the step")
    for width in (1, 9):
        assert f"not {width}" in str(convolution_refusal(width))
        wide = ConvolutionCase(8, 4, 3)
        wide.convolution = case.convolution._replace(weight=noise(rng, 8, width))
        refused("short_convolution", wide.arguments(), f"2 to 8 tokens wide, not {width}")
    delta = DeltaCase((2, 4), (8, 16), 3)
    given = delta.arguments()
    refused("gated_delta", [given[0][..., 1:].copy(), *given[1:]], "rows of 95 columns; expected queries and keys of 8")
    refused(
        "gated_delta", [*given[:2], given[2]._replace(first=14), *given[3:]], "gates of 4 heads from column 14 on of 21"
    )
    refused("gated_delta", [*given[:4], given[4][..., 1:].copy(), *given[5:]], "output has 63 columns; expected 64")
    refused("gated_delta", [*given[:6], noise(rng, 2, 3, 7), None], "gates of 7 columns; expected 8")
    layer = LayerMatrices(delta.matrix, delta.rows, noise(rng, 2, 3, 7))
    path = AcceptedPath(np.zeros((2, 1), np.int32), np.ones(2, np.int32))
    refused("commit_matrices", [[layer], path], "commit_matrices: gates of 7 columns; expected 8")
    wrong = path._replace(counts=np.ones(3, np.int32))
    refused("commit_columns", [[LayerColumns(noise(rng, 2, 4, 3), noise(rng, 2, 5, 4))], wrong], "counts has shape")
    heads, value = GatedHeads(2, 1, 8), noise(rng, 1, 1, 48)
    refused("separate_gates", [value, heads, np.zeros((1, 1, 32), np.float16)], "qkv is float16; expected float32")
    refused("separate_gates", [value, heads, noise(rng, 1, 1, 40)], "qkv has 40 columns; expected 32")
    refused("sigmoid_gate", [value, heads._replace(heads=3), noise(rng, 1, 1, 16)], "value has 48 columns; expected 3")
    refused("gated_norm", [value, value, GatedHeadNorm(noise(rng, 8), 1e-6, 1), value], "gates of 48 columns from 1 on")
    squares, norm = noise(rng, 1, 1, 8), PartNorm(noise(rng, 48), 1e-6, 47)
    refused("gated_part", [value, value, 0, 8, None, squares, None], "a sum of squares at 8 of 8")
    refused("gated_part", [value, value, 0, 1, norm, squares, value], "a norm of 47 columns; expected at least the 48")
    refused("gated_part", [value, value, 0, 1, norm._replace(whole=96), squares, None], "and an output")
    refused("gated_norm", [value, value, GatedHeadNorm(noise(rng, 7), 1e-6, 0), value], "expected those of heads of 7")


@pytest.mark.parametrize(
    ("heads", "sizes", "nodes"),
    [((1, 1), (12, 8), 1), ((1, 1), (8, 264), 1), ((2, 3), (8, 8), 1), ((1, 1), (8, 8), 65)],
)
def test_sizes_that_the_gpu_does_not_take_are_refused_there(heads, sizes, nodes) -> None:
    from edgellm.kernels.recurrent.launcher import CudaRecurrent

    assert delta_refusal((2, 4), (128, 128), 64) is None
    reason = delta_refusal(heads, sizes, nodes)
    assert reason is not None and reason.startswith("recurrent matrices take")
    if heads[1] % heads[0]:
        return  # which the contract refuses before
    key_heads, values = heads
    width = 2 * key_heads * sizes[0] + values * sizes[1]

    def array(*shape: int, dtype: str = "float32") -> DeviceArray:
        return DeviceArray(4096, shape, dtype)

    from edgellm.kernels.recurrent.contract import DeltaGates

    arguments = (
        array(1, nodes, width), array(1, nodes, 2 * values), DeltaGates(array(values), array(values), 0),
        array(1, values, sizes[1], sizes[0]), array(1, nodes, values * sizes[1]),
        array(1, nodes, dtype="int32"), array(1, nodes, 2 * values), None,
    )  # fmt: skip
    with pytest.raises(KernelError, match="gated_delta: recurrent matrices take"):
        CudaRecurrent(None).gated_delta(*arguments)  # type: ignore[arg-type]
