"""The interpreter of operations that emits a TensorRT network, and the builder of one plan from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from edgellm.engines.backends.platform import load_tensorrt
from edgellm.engines.errors import BuildError, EngineError
from edgellm.engines.families.programs import ModelConfig, model_program
from edgellm.engines.model.graph import ProgramGraph
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.operations import Operations, Scoring

#: Compute capabilities with fused kernels for IAttention in TensorRT-RTX; elsewhere it must be decomposed, and was
#: slower than the composition below (sm_90: 1.60 against 1.37 ms for a decode step).
_FUSED_ATTENTION = ("sm_80", "sm_86", "sm_89", "sm_120", "sm_121")


def attention_kind(setting: str, target: str) -> str:
    """ "native" (IAttention) or "composed" for a target; `setting` "auto" follows what the target has kernels for."""
    if setting != "auto":
        return setting
    return "native" if target in _FUSED_ATTENTION else "composed"


def _lacking(what: str = "") -> Any:
    """An operation that TensorRT has not: `what`, or that of the step which it gets."""

    def refuse(operations: object, given: Any, *others: Any) -> Any:
        raise EngineError(
            f"TensorRT has nothing for {what or given.title}: kernels compute it, in float16 or bfloat16, on GPUs that "
            "they are made for. Elsewhere take --backend numpy"
        )

    return refuse


class TensorRTOperations(Operations[Any]):
    """Emits layers into `network`, strongly typed in `dtype` ("float16", "bfloat16"; "float32" for tests).

    Shapes are static. Weights become inputs under their own names. Every tensor's shape is known to TensorRT while the
    network grows, so the methods read it from there.

    An RMS norm is multiplied by its weight, a gated MLP's activation is computed and linear layers are summed in
    float32; attention's products are not. The shipped model's logits were 1.9 spacings of float16 from float32's
    (median) with float16 everywhere, 1.5 with the linear layers' sums in float32, 1.2 so, with a residual stream in
    float32, which takes an H200 1.1 % longer for a chunk of a prompt; attention's sums would take 5 % more.
    """

    pairs_apart = _lacking("rotary embeddings of neighbours")
    window_attention = _lacking("attention within a window of a ring")
    attention_ahead = _lacking("attention of tokens to those behind them")
    short_convolution = update_matrices = experts = _lacking()
    unfold = depthwise_convolution = local_attention = _lacking("convolutions of encoders of speech")

    def __init__(self, trt: Any, network: Any, dtype: str, attention: str) -> None:
        self.trt = trt
        self.network = network
        self.attention_kind = attention
        self.compute = {"float16": trt.float16, "bfloat16": trt.bfloat16, "float32": trt.float32}[dtype]
        self.dtypes = {"compute": self.compute, "float32": trt.float32, "int32": trt.int32, "bool": trt.bool}
        self.inputs: dict[str, Any] = {}

    def input(self, name: str, shape: Sequence[int], dtype: str) -> Any:
        if name not in self.inputs:
            self.inputs[name] = self.network.add_input(name, self.dtypes[dtype], tuple(shape))
        return self.inputs[name]

    def weight(self, name: str, shape: Sequence[int]) -> Any:
        return self.input(name, shape, "compute")

    def output(self, name: str, tensor: Any) -> None:
        tensor.name = name
        self.network.mark_output(tensor)

    def linear(self, x: Any, weight: Any, bias: Any | None = None) -> Any:
        operation, leading = self.trt.MatrixOperation, tuple(x.shape)[:-1]
        rows = self._reshape(x, (int(np.prod(leading)), x.shape[-1]))
        product = self._product(rows, weight, operation.TRANSPOSE, wide=True)
        if bias is not None:
            product = self.add(product, self._reshape(bias, (1, bias.shape[0])))
        return self._reshape(product, (*leading, weight.shape[0]))

    def product(self, x: Any, weight: Any) -> Any:
        leading, columns = tuple(x.shape)[:-1], weight.shape[1]
        rows = self._reshape(self.to_float32(x), (int(np.prod(leading)), x.shape[-1]))
        product = self._product(rows, self.to_float32(weight), self.trt.MatrixOperation.NONE, False)
        return self._reshape(product, (*leading, columns))

    def adapt(self, y: Any, x: Any, a: Any, b: Any, scales: Any) -> Any:
        """All adapters as one of rank S * P, of which the scales leave each sequence its own: no matrix is gathered."""
        operation = self.trt.MatrixOperation
        batch, tokens, width = x.shape
        adapters, rank = scales.shape[1], a.shape[0]
        rows = self._reshape(x, (batch * tokens, width))
        low = self._product(rows, a, operation.TRANSPOSE, wide=True)
        low = self._reshape(low, (batch, tokens, adapters, rank // adapters))
        low = self._elementwise(low, self._reshape(scales, (batch, 1, adapters, 1)), "PROD")
        low = self._reshape(low, (batch * tokens, rank))
        added = self._product(low, b, operation.NONE, wide=True)
        return self.add(y, self._reshape(added, tuple(y.shape)))

    def rms_norm(self, x: Any, weight: Any | None, epsilon: float, offset: float = 0.0) -> Any:
        wide = self.to_float32(x)
        mean = self._mean(self._elementwise(wide, wide, "PROD"))
        normed = self._elementwise(wide, self._shifted_root(mean, epsilon), "DIV")
        if weight is None:
            return self._cast(normed, self.compute)
        weight = self._reshape(weight, self._last_axis(weight.shape[0], x))
        weight = self.to_float32(weight)
        if offset != 0.0:
            weight = self._elementwise(weight, self._constant(offset, len(x.shape)), "SUM")
        return self._cast(self._elementwise(normed, weight, "PROD"), self.compute)

    def layer_norm(self, x: Any, weight: Any, bias: Any, epsilon: float) -> Any:
        wide = self.to_float32(x)
        centred = self._elementwise(wide, self._mean(wide), "SUB")
        variance = self._mean(self._elementwise(centred, centred, "PROD"))
        normed = self._cast(self._elementwise(centred, self._shifted_root(variance, epsilon), "DIV"), self.compute)
        weight, bias = (self._reshape(one, self._last_axis(one.shape[0], x)) for one in (weight, bias))
        return self.add(self._elementwise(normed, weight, "PROD"), bias)

    def activation(self, x: Any, kind: str) -> Any:
        functions = self.trt.ActivationType
        if kind == "silu":
            return self._elementwise(x, self._activation(x, functions.SIGMOID), "PROD")
        if kind in ("sigmoid", "tanh"):
            return self._activation(x, functions.SIGMOID if kind == "sigmoid" else functions.TANH)
        if kind == "relu":
            return self._activation(x, functions.RELU)
        if kind == "relu_squared":
            positive = self._activation(x, functions.RELU)
            return self._elementwise(positive, positive, "PROD")
        if kind == "quick_gelu":
            slope = self._constant(1.702, len(x.shape), self.compute)
            return self._elementwise(
                x, self._activation(self._elementwise(x, slope, "PROD"), functions.SIGMOID), "PROD"
            )
        return self._activation(x, {"gelu": functions.GELU_ERF, "gelu_tanh": functions.GELU_TANH}[kind])

    def add(self, a: Any, b: Any) -> Any:
        return self._elementwise(a, b, "SUM")

    def multiply(self, a: Any, b: Any) -> Any:
        return self._elementwise(a, b, "PROD")

    def clip(self, x: Any, low: Any, high: Any) -> Any:
        return self._elementwise(self._elementwise(x, low, "MAX"), high, "MIN")

    def split(self, x: Any, sizes: Sequence[int], axis: int) -> list[Any]:
        parts, offset = [], 0
        for size in sizes:
            start, shape = [0] * len(x.shape), list(x.shape)
            start[axis], shape[axis] = offset, size
            parts.append(self._slice(x, start, shape))
            offset += size
        return parts

    def reshape(self, x: Any, shape: Sequence[int]) -> Any:
        return self._reshape(x, shape)

    def split_heads(self, x: Any, heads: int) -> Any:
        batch, tokens, width = x.shape
        if tokens == 1:  # the transposition would move nothing
            return self._reshape(x, (batch, heads, 1, width // heads))
        return self._shuffle(x, (batch, tokens, heads, width // heads), (0, 2, 1, 3))

    def merge_heads(self, x: Any) -> Any:
        batch, heads, tokens, size = x.shape
        if tokens == 1:
            return self._reshape(x, (batch, 1, heads * size))
        layer = self.network.add_shuffle(x)
        layer.first_transpose = self.trt.Permutation([0, 2, 1, 3])
        layer.reshape_dims = (batch, tokens, heads * size)
        return self._layer(layer, "merge_heads")

    def rotary_embedding(self, x: Any, cos_sin: Any) -> Any:
        rotary = cos_sin.shape[2]
        cos, sin = self.split(cos_sin, (rotary // 2, rotary // 2), axis=2)
        return self._layer(self._later("add_rotary_embedding")(x, cos, sin, False, rotary), "rotary_embedding")

    def kv_cache_update(
        self, cache: Any, update: Any, start_index: Any, scales: Any | None = None, wraps: bool = False
    ) -> Any:
        if wraps:
            raise EngineError("TensorRT's KV caches are no rings: kernels compute the attention within a window")
        if scales is not None:
            raise EngineError("TensorRT's KV caches are not of 8 bits: leave out --kv-cache int8")
        mode = self.trt.KVCacheMode.LINEAR
        return self._layer(self._later("add_kv_cache_update")(cache, update, start_index, mode), "kv_cache_update")

    def _later(self, name: str) -> Any:
        """A method of the network that older releases lack."""
        if (method := getattr(self.network, name, None)) is None:
            raise EngineError(
                f"TensorRT {self.trt.__version__} has no {name}, which 10.15 has: kernels run such layers. Leave out "
                "--executor tensorrt"
            )
        return method

    def attention(self, query: Any, caches: Sequence[Any], mask: Any | None, scoring: Scoring[Any]) -> Any:
        if scoring.sinks is not None or scoring.cap:
            lacks = "sinks" if scoring.cap == 0 else "a cap of scores"
            raise EngineError(f"TensorRT has no attention with {lacks}: kernels compute it")
        keys, values, *_ = caches
        batch, kv_heads, rows, size = keys.shape
        if mask is not None and mask.shape[3] < rows:
            seen = (batch, kv_heads, mask.shape[3], size)
            keys, values = (self._slice(cache, (0, 0, 0, 0), seen) for cache in (keys, values))
        query = self._elementwise(query, self._constant(scoring.scale, 4, self.compute), "PROD")
        if self.attention_kind == "native":
            return self._native_attention(query, keys, values, mask)
        return self._composed_attention(query, keys, values, mask)

    def _native_attention(self, query: Any, keys: Any, values: Any, mask: Any | None) -> Any:
        operation = self.trt.AttentionNormalizationOp.SOFTMAX
        layer = self._later("add_attention")(query, keys, values, operation, False)
        if mask is not None:
            layer.mask = mask
        layer.decomposable = True
        return self._layer(layer, "attention")

    def _composed_attention(self, query: Any, keys: Any, values: Any, mask: Any | None) -> Any:
        """Query heads of one key-value head are rows of one matrix, so that no key or value is repeated."""
        operation = self.trt.MatrixOperation
        batch, heads, tokens, size = query.shape
        kv_heads, seen = keys.shape[1], keys.shape[2]
        group = heads // kv_heads
        rows = self._reshape(query, (batch, kv_heads, group * tokens, size))
        scores = self.to_float32(self._product(rows, keys, operation.TRANSPOSE))
        if tokens > 1:
            scores = self._reshape(scores, (batch, kv_heads, group, tokens, seen))
        if mask is not None:
            if tokens > 1:
                mask = self._reshape(mask, (batch, 1, 1, mask.shape[2], seen))
            hidden = self._constant(-1e30, len(scores.shape))
            scores = self._layer(self.network.add_select(mask, scores, hidden), "masked")
        softmax = self.network.add_softmax(scores)
        softmax.axes = 1 << (len(scores.shape) - 1)
        weights = self._cast(self._layer(softmax, "softmax"), self.compute)
        if tokens > 1:
            weights = self._reshape(weights, (batch, kv_heads, group * tokens, seen))
        context = self._product(weights, values, operation.NONE)
        return self._reshape(context, (batch, heads, tokens, size))

    def gated(self, gate_up: Any, kind: str) -> Any:
        half = gate_up.shape[-1] // 2
        gate, up = self.split(gate_up, (half, half), axis=len(gate_up.shape) - 1)
        gate, up = self.to_float32(gate), self.to_float32(up)
        return self.to_compute(self._elementwise(self.activation(gate, kind), up, "PROD"))

    def scale(self, x: Any, factor: float) -> Any:
        return self._elementwise(x, self._cast(self._constant(factor, len(x.shape)), x.dtype), "PROD")

    def gather_rows(self, x: Any, rows: Any) -> Any:
        layer = self.network.add_gather_v2(x, rows, self.trt.GatherMode.DEFAULT)
        layer.axis = 1
        layer.num_elementwise_dims = 1
        return self._layer(layer, "gather_rows")

    def concatenate(self, tensors: Sequence[Any], axis: int) -> Any:
        layer = self.network.add_concatenation(list(tensors))
        layer.axis = axis
        return self._layer(layer, "concatenate")

    def to_float32(self, x: Any) -> Any:
        return self._cast(x, self.trt.float32)

    def to_compute(self, x: Any) -> Any:
        return self._cast(x, self.compute)

    def _product(self, a: Any, b: Any, b_operation: Any, wide: bool = False) -> Any:
        """a times b. TensorRT-RTX seems to sum float16 products in float16, unless casts around them, which it fuses,
        ask for float32."""
        kind = a.dtype
        if wide:
            a, b = self.to_float32(a), self.to_float32(b)
        layer = self.network.add_matrix_multiply(a, self.trt.MatrixOperation.NONE, b, b_operation)
        return self._cast(self._layer(layer, "matrix_multiply"), kind)

    def _mean(self, x: Any) -> Any:
        """Over the last axis, which stays, of size 1."""
        average = self.trt.ReduceOperation.AVG
        return self._layer(self.network.add_reduce(x, average, 1 << (len(x.shape) - 1), True), "mean")

    def _shifted_root(self, x: Any, epsilon: float) -> Any:
        """sqrt(x + epsilon)."""
        shifted = self._elementwise(x, self._constant(epsilon, len(x.shape)), "SUM")
        return self._layer(self.network.add_unary(shifted, self.trt.UnaryOperation.SQRT), "root")

    def _activation(self, x: Any, function: Any) -> Any:
        return self._layer(self.network.add_activation(x, function), "activation")

    def _layer(self, layer: Any, what: str) -> Any:
        if layer is None:
            raise BuildError(f"TensorRT {self.trt.__version__} refused the layer {what!r}; its log line says why")
        return layer.get_output(0)

    def _elementwise(self, a: Any, b: Any, operation: str) -> Any:
        kind = getattr(self.trt.ElementWiseOperation, operation)
        return self._layer(self.network.add_elementwise(a, b, kind), operation.lower())

    def _cast(self, x: Any, dtype: Any) -> Any:
        return x if x.dtype == dtype else self._layer(self.network.add_cast(x, dtype), "cast")

    def _reshape(self, x: Any, shape: Sequence[int]) -> Any:
        return x if tuple(x.shape) == tuple(shape) else self._shuffle(x, shape, None)

    def _shuffle(self, x: Any, shape: Sequence[int], order: Sequence[int] | None) -> Any:
        layer = self.network.add_shuffle(x)
        layer.reshape_dims = tuple(shape)
        if order is not None:
            layer.second_transpose = self.trt.Permutation(list(order))
        return self._layer(layer, "shuffle")

    def _slice(self, x: Any, start: Sequence[int], shape: Sequence[int]) -> Any:
        return self._layer(self.network.add_slice(x, tuple(start), tuple(shape), (1,) * len(shape)), "slice")

    def _constant(self, value: float, rank: int, dtype: Any = None) -> Any:
        array = np.full((1,) * rank, value, np.float32)
        constant = self._layer(self.network.add_constant(array.shape, array), "constant")
        return constant if dtype is None else self._cast(constant, dtype)

    def _last_axis(self, size: int, like: Any) -> tuple[int, ...]:
        return (1,) * (len(like.shape) - 1) + (size,)


def build_plan(
    config: ModelConfig, shape: EngineShape, dtype: str, attention: str = "auto", target: str | None = None
) -> bytes:
    """Build the plan of one engine.

    `dtype` is the compute dtype, `attention` "auto", "native" or "composed", `target` a compute capability such as
    "sm_86" (None: the present GPU's). Raises BuildError with TensorRT's own words where it refuses.
    """
    library = load_tensorrt()
    if target is not None and target not in library.buildable_targets:
        raise BuildError(
            f"TensorRT {library.version} ({library.flavour}) cannot build for {target} here; it can for "
            f"{', '.join(library.buildable_targets) or 'no target without its GPU'}. "
            "Build on the device itself: on a Jetson with JetPack's TensorRT."
        )
    trt, errors = library.module, list[str]()

    def keep(severity: Any, line: str) -> None:
        """Errors are for the exception: nothing is printed."""
        if severity <= trt.ILogger.Severity.ERROR:
            errors.append(line)

    builder = trt.Builder(library.logger(keep))
    flags = 0
    if hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED"):
        flags |= 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    kind = attention_kind(attention, target or "")
    ProgramGraph(TensorRTOperations(trt, network, dtype, kind), model_program(config, shape)).run()
    settings = builder.create_builder_config()
    settings.profiling_verbosity = trt.ProfilingVerbosity.LAYER_NAMES_ONLY
    if library.flavour == "rtx":
        settings.num_compute_capabilities = 1
        capability = trt.ComputeCapability.CURRENT if target is None else library.compute_capability(target)
        settings.set_compute_capability(capability, 0)
    plan = builder.build_serialized_network(network, settings)
    if plan is None:
        reason = " / ".join(errors[-3:]) or "no reason was logged"
        raise BuildError(f"TensorRT {library.version} could not build {shape.name}: {reason}")
    return bytes(plan)
