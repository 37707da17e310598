"""Ways to emit the decode step as a TensorRT network, timed one by one."""

from __future__ import annotations

import torch
from decode_step import CONFIG, Setting, error, kernel_times, microseconds, wrap

from edgellm.engines.backends.tensorrt_engine import RuntimeCache, TensorRTEngine
from edgellm.engines.backends.tensorrt_library import load_tensorrt
from edgellm.engines.backends.tensorrt_operations import TensorRTOperations, _Log
from edgellm.engines.model.config import EngineShape
from edgellm.engines.model.decoder import DecoderDescription


class Variant(TensorRTOperations):
    """Emission settings: attention form and chunk, which weights multiply by products and sums, fusion barriers."""

    attention_form, chunk, reduce_rows, barrier = "matmul", 0, (), ()

    def _sum(self, x, axis):
        return self._layer(self.network.add_reduce(x, self.trt.ReduceOperation.SUM, 1 << axis, False), "sum")

    def _times(self, a, b):
        return self._elementwise(a, b, "PROD")

    def linear(self, x, weight, bias=None):
        if weight.shape[0] not in self.reduce_rows:
            return super().linear(x, weight, bias)
        if "linear" in self.barrier:
            x.name = f"barrier_{self.network.num_layers}"
            self.network.mark_output(x)
        lead, columns = tuple(x.shape)[:-1], x.shape[-1]
        product = self._times(self.to_float32(weight), self.to_float32(self._reshape(x, (1, columns))))
        return self._reshape(self._cast(self._sum(product, 1), self.compute), (*lead, weight.shape[0]))

    def _composed_attention(self, query, keys, values, mask):
        if self.attention_form == "matmul":
            return super()._composed_attention(query, keys, values, mask)
        batch, heads, _, size = query.shape
        kv_heads, seen = keys.shape[1], mask.shape[3]
        group = heads // kv_heads
        wide = self.to_float32
        q = wide(self._reshape(query, (batch, kv_heads, group, 1, size)))
        k = wide(self._reshape(keys, (batch, kv_heads, 1, seen, size)))
        scores = self._sum(self._times(q, k), 4)
        scores = self._layer(self.network.add_select(mask, scores, self._constant(-1e30, 4)), "masked")
        softmax = self.network.add_softmax(scores)
        softmax.axes = 8
        weights = self._layer(softmax, "softmax")
        if self.attention_form == "mixed":
            op = self.trt.MatrixOperation.NONE
            context = self._layer(
                self.network.add_matrix_multiply(self._cast(weights, self.compute), op, values, op), "context"
            )
        elif self.chunk:
            chunks = seen // self.chunk
            w = self._reshape(weights, (batch, kv_heads, group, chunks, self.chunk, 1))
            v = wide(self._reshape(values, (batch, kv_heads, 1, chunks, self.chunk, size)))
            partial = self._sum(self._times(w, v), 4)
            if "attention" in self.barrier:
                partial.name = f"barrier_{self.network.num_layers}"
                self.network.mark_output(partial)
            context = self._sum(partial, 3)
        else:
            w = self._reshape(weights, (batch, kv_heads, group, seen, 1))
            context = self._sum(self._times(w, wide(self._reshape(values, (batch, kv_heads, 1, seen, size)))), 3)
        return self._reshape(self._cast(context, self.compute), (batch, heads, 1, size))


GATE_UP, DOWN, HEAD, QKV = 16384, 2048, 128256, 3072
VARIANTS = {
    "base": {},
    "sums": {"attention_form": "sums"},
    "scores by sums, context by matmul": {"attention_form": "mixed"},
    **{f"sums chunk {c}": {"attention_form": "sums", "chunk": c} for c in (16, 32, 64, 128)},
    "sums chunk 32 barrier": {"attention_form": "sums", "chunk": 32, "barrier": ("attention",)},
    "sums chunk 32, head": {"attention_form": "sums", "chunk": 32, "reduce_rows": (HEAD,)},
    "sums chunk 32, head barrier": {
        "attention_form": "sums",
        "chunk": 32,
        "reduce_rows": (HEAD,),
        "barrier": ("linear",),
    },
    "sums chunk 32, gate_up head barrier": {
        "attention_form": "sums",
        "chunk": 32,
        "reduce_rows": (HEAD, GATE_UP),
        "barrier": ("linear",),
    },
    "sums chunk 32, gate_up down o head barrier": {
        "attention_form": "sums",
        "chunk": 32,
        "reduce_rows": (HEAD, GATE_UP, DOWN),
        "barrier": ("linear",),
    },
    "sums chunk 32, all barrier": {
        "attention_form": "sums",
        "chunk": 32,
        "reduce_rows": (HEAD, GATE_UP, DOWN, QKV),
        "barrier": ("linear",),
    },
}


def build(library, settings, shape, attention="composed", tune=None):
    trt, log = library.module, _Log(library)
    builder = trt.Builder(log.logger)
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if flag is None else 1 << int(flag))
    operations = type("V", (Variant,), settings)(trt, network, "float16", attention)
    DecoderDescription(operations, CONFIG, shape).describe()
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.LAYER_NAMES_ONLY
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.CURRENT, 0)
    if tune:
        tune(config)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise RuntimeError(log.last_error())
    return bytes(plan)


def run(device, weights):
    library = load_tensorrt()
    runtime, cache = library.module.Runtime(_Log(library).logger), RuntimeCache("decode step variants")
    results = {}
    settings = {rows: Setting(weights, rows=rows) for rows in (1024, 1536)}
    expected = {rows: setting.reference() for rows, setting in settings.items()}

    def aux(config):
        config.max_aux_streams = 0

    def level(config):
        config.builder_optimization_level = 5

    tries = [(name, 1024, "composed", None) for name in VARIANTS]
    tries += [
        ("base", 1536, "composed", None),
        ("sums chunk 32", 1536, "composed", None),
        ("base", 1024, "native", None),
        ("sums chunk 32", 1024, "composed", aux),
        ("sums chunk 32", 1024, "composed", level),
    ]
    for name, rows, attention, tune in tries:
        label = f"{name} rows {rows} {attention if attention == 'native' else ''} {tune.__name__ if tune else ''}"
        shape = EngineShape("decode", 1, 1, 1024, rows)
        setting = settings[rows]
        try:
            plan = build(library, VARIANTS[name], shape, attention, tune)
            engine = TensorRTEngine(library, runtime, plan, shape, cache)
            scratch = torch.empty(max(1, engine.scratch_bytes), dtype=torch.uint8, device="cuda")
            engine.attach(device, wrap(scratch))
            bindings = setting.bindings(1024)
            kinds = {"float16": torch.float16, "float32": torch.float32}
            for extra in set(engine.tensor_names) - set(bindings):
                dims, dtype = engine._tensors[extra]
                bindings[extra] = wrap(torch.empty(dims, dtype=kinds[dtype], device="cuda"))
            engine.bind({n: a for n, a in bindings.items() if n in engine.tensor_names})
            setting.logits.fill_(float("nan"))
            torch.cuda.synchronize()
            engine.enqueue()
            device.synchronize()
            difference = error(setting, expected[rows])
            graph = device.capture(engine.enqueue, label)
            us = microseconds(graph, device.stream)
            results[label] = us
            print(f"tensorrt {label:56s} {us:8.1f} us  error {difference:.2e}", flush=True)
            if us == min(results.values()):
                best = (label, engine, scratch, bindings)
        except Exception as failure:
            print(f"tensorrt {label:56s} failed: {type(failure).__name__} {str(failure)[:200]}", flush=True)
    kernel_times(best[1].enqueue, device, best[0], ordered=16)
