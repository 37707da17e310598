"""Times variants of the decode step on Llama-3.2-1B shapes with random weights, against torch.compile.

    python tools/bench/tries/decode_step.py [torch] [cuda] [lengths] [batch] [tensorrt]

Every variant is checked against a float32 step in PyTorch. Times are medians over replays of a CUDA graph.
"""

from __future__ import annotations

import collections
import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))
from gpu_timer import gpu_milliseconds

from edgellm.engines.backends.cuda_decode_engine import CudaDecodeEngine
from edgellm.engines.backends.cuda_device import CudaDevice
from edgellm.engines.model.config import DecoderConfig, EngineShape
from edgellm.engines.model.decoder import decoder_weights
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode_kernels import CudaDecodeKernels

CONFIG = DecoderConfig("llama", 128256, 2048, 8192, 16, 32, 8, 64, 131072, 1e-5, 5e5, 64, "float16", True)
BYTES_PER_SECOND = 4.27e12
torch.set_grad_enabled(False)


def weights_of(config, dtype=torch.float16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    tensors = {}
    for spec in decoder_weights(config):
        if len(spec.shape) == 1 and "norm" in spec.name:
            tensor = 1 + 0.1 * torch.randn(spec.shape, device="cuda", generator=generator)
        else:
            tensor = torch.randn(spec.shape, device="cuda", generator=generator) * 0.02
        tensors[spec.name] = tensor.to(dtype)
    return tensors


def wrap(tensor):
    kinds = {
        torch.float16: "float16",
        torch.bfloat16: "bfloat16",
        torch.float32: "float32",
        torch.int32: "int32",
        torch.bool: "bool",
        torch.uint8: "uint8",
    }
    return DeviceArray(tensor.data_ptr(), tuple(tensor.shape), kinds[tensor.dtype], tensor)


class Setting:
    """Inputs, caches and weights of one batch and capacity, shared by all variants."""

    def __init__(self, weights, batch=1, rows=1024, length=500, dtype=torch.float16):
        self.batch, self.rows, self.length, self.dtype = batch, rows, length, dtype

        def make(*sizes):
            return torch.randn(*sizes, device="cuda", dtype=dtype)

        self.x = make(batch, 1, CONFIG.hidden_size)
        cache = (batch, CONFIG.num_kv_heads, rows, CONFIG.head_dim)
        self.k, self.v = ([make(*cache) for _ in range(CONFIG.num_layers)] for _ in range(2))
        angle = torch.rand(1, 1, CONFIG.rotary_dim // 2, device="cuda") * 6.28
        self.cos, self.sin = torch.cos(angle).to(dtype), torch.sin(angle).to(dtype)
        self.cos_sin = torch.cat([self.cos, self.sin], -1).expand(batch, 1, -1).contiguous()
        self.start = torch.full((batch,), length, device="cuda", dtype=torch.int32)
        self.mask = (
            (torch.arange(rows, device="cuda") <= length)[None, None, None].expand(batch, 1, 1, rows).contiguous()
        )
        self.logits = torch.full((batch, 1, CONFIG.vocab_size), float("nan"), device="cuda")
        self.weights = weights

    def bindings(self, key_range=None):
        named = {
            "inputs_embeds": self.x,
            "rope_rotary_cos_sin": self.cos_sin,
            "kvcache_start_index": self.start,
            "attention_mask": self.mask[..., :key_range].contiguous(),
            "logits": self.logits,
            **self.weights,
        }
        for i in range(CONFIG.num_layers):
            named |= {
                f"k_cache_{i}": self.k[i],
                f"v_cache_{i}": self.v[i],
                f"present_k_cache_{i}": self.k[i],
                f"present_v_cache_{i}": self.v[i],
            }
        return {name: wrap(tensor) for name, tensor in named.items()}

    def reference(self):
        from reference_decoder import Decoder

        weights = {name: tensor.float() for name, tensor in self.weights.items()}
        decoder = Decoder(CONFIG, weights, [k.float() for k in self.k], [v.float() for v in self.v])
        with torch.backends.cuda.sdp_kernel(enable_flash=False, enable_mem_efficient=False, enable_math=True):
            position = torch.tensor([self.length], device="cuda")
            return decoder(self.x.float(), position, self.mask, self.cos.float(), self.sin.float())


def microseconds(step, stream):
    step()
    return 1000 * gpu_milliseconds(stream, step, 100, series=7)


def kernel_times(step, device, title, repeats=5, ordered=0):
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(repeats):
            step()
        device.synchronize()
    events = [e for e in record.events() if e.device_type.name == "CUDA"]
    totals = collections.defaultdict(lambda: [0, 0.0])
    for event in events:
        totals[event.name][0] += 1
        totals[event.name][1] += event.device_time
    print(f"   {title}: {sum(t for _, t in totals.values()) / repeats:.0f} us, {len(events) / repeats:.0f} kernels")
    for name, (count, total) in sorted(totals.items(), key=lambda item: -item[1][1])[:12]:
        print(f"   {total / repeats:8.1f} us {count / repeats:5.1f}x {total / count:7.2f} us  {name[:110]}")
    if ordered:
        events.sort(key=lambda e: e.time_range.start)
        one = events[len(events) // repeats * 2 :][: len(events) // repeats]
        middle = len(one) // 2
        for event in one[middle : middle + ordered]:
            after = event.time_range.start - one[middle].time_range.start
            print(f"   {after:9.2f} +{event.device_time:6.2f}  {event.name[:110]}")


def error(setting, expected):
    return float((setting.logits - expected).norm() / expected.norm())


def torch_compile(setting):
    from reference_decoder import Decoder

    decoder = Decoder(CONFIG, setting.weights, setting.k, setting.v)
    position = torch.tensor([setting.length], device="cuda")
    for mode in ("reduce-overhead",):
        step = torch.compile(decoder, mode=mode, fullgraph=True)
        begin = time.time()
        for _ in range(5):
            step(setting.x, position, setting.mask, setting.cos, setting.sin)
        torch.cuda.synchronize()
        seconds = time.time() - begin
        times = []
        for _ in range(7):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(100):
                step(setting.x, position, setting.mask, setting.cos, setting.sin)
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) * 10)
        print(
            f"torch.compile {mode:16s} {sorted(times)[3]:8.1f} us  (min {min(times):.1f}; compiled in {seconds:.0f} s)",
            flush=True,
        )


def cuda_engine(device, kernels, setting, label, expected=None, overlap=True):
    shape = EngineShape("decode", setting.batch, 1, setting.rows, setting.rows)
    kernels.can_overlap = overlap
    engine = CudaDecodeEngine(kernels, CONFIG, shape, "float16" if setting.dtype == torch.float16 else "bfloat16")
    scratch = device.empty((engine.scratch_bytes,), "uint8")
    engine.attach(device, scratch)
    engine.bind(setting.bindings())
    setting.logits.fill_(float("nan"))
    torch.cuda.synchronize()
    engine.enqueue()
    device.synchronize()
    difference = error(setting, expected) if expected is not None else float("nan")
    graph = device.capture(engine.enqueue, label)
    us = microseconds(graph, device.stream)
    difference2 = error(setting, expected) if expected is not None else float("nan")
    print(f"cuda {label:44s} {us:8.1f} us  error {difference:.2e} {difference2:.2e}", flush=True)
    return engine, graph, us


def parts(device, engine, label):
    """Each kind of kernel alone: its launches of all layers, one after the other."""
    config, launches = CONFIG, engine._launches
    sizes = {
        "qkv": config.hidden_size * (config.query_size + 2 * config.kv_size),
        "attention": 0,
        "o": config.hidden_size * config.query_size,
        "gate_up": 2 * config.hidden_size * config.intermediate_size,
        "down": config.hidden_size * config.intermediate_size,
    }
    line = f"   {label}:"
    for index, (name, size) in enumerate(sizes.items()):
        chosen = launches[index : 5 * config.num_layers : 5]

        def step(chosen=chosen):
            for launch in chosen:
                launch()

        us = microseconds(device.capture(step, name), device.stream) / len(chosen)
        line += f" {name} {us:.2f} us ({size * 2 / us / 1e6:.2f} TB/s)"
    us = microseconds(device.capture(launches[-1], "head"), device.stream)
    print(line + f" head {us:.1f} us ({config.vocab_size * config.hidden_size * 2 / us / 1e6:.2f} TB/s)", flush=True)


def main():
    wanted = set(sys.argv[1:]) or {"torch", "cuda", "lengths", "batch", "tensorrt"}
    device = CudaDevice()
    print(device.name, device.compute_capability)
    weights = weights_of(CONFIG)
    total = sum(t.numel() * 2 for t in weights.values())
    print(f"weights {total / 1e9:.3f} GB, floor {total / BYTES_PER_SECOND * 1e6:.0f} us")
    setting = Setting(weights)
    expected = setting.reference()
    begin = time.time()
    if wanted & {"cuda", "lengths", "batch"}:
        kernels = CudaDecodeKernels(device.compute_capability, device.stream.handle)
        print(f"kernels compiled and loaded in {time.time() - begin:.1f} s")
        engine, *_ = cuda_engine(device, kernels, setting, "no overlap", expected, overlap=False)
        parts(device, engine, "no overlap")
        engine, graph, _ = cuda_engine(device, kernels, setting, "overlap", expected)
        parts(device, engine, "overlap")
        kernel_times(graph, device, "overlap", ordered=12)
        begin = time.time()
        for _ in range(20):
            engine.enqueue()
        print(f"   host time of one uncaptured step {(time.time() - begin) / 20 * 1e6:.0f} us")
        device.synchronize()
    if "lengths" in wanted:
        for length in (15, 100, 1000):
            setting.start.fill_(length)
            cuda_engine(device, kernels, setting, f"length {length}")
        setting.start.fill_(500)
    if "batch" in wanted:
        for batch in (2, 4, 8):
            many = Setting(weights, batch)
            cuda_engine(device, kernels, many, f"batch {batch}", many.reference())
            logits = many.logits.clone()
            one = Setting(weights, 1)
            same = True
            for b in range(batch):
                one.x.copy_(many.x[b : b + 1])
                one.cos_sin.copy_(many.cos_sin[b : b + 1])
                for i in range(CONFIG.num_layers):
                    one.k[i].copy_(many.k[i][b : b + 1])
                    one.v[i].copy_(many.v[i][b : b + 1])
                shape = EngineShape("decode", 1, 1, 1024, 1024)
                engine = CudaDecodeEngine(kernels, CONFIG, shape, "float16")
                engine.attach(device, device.empty((engine.scratch_bytes,), "uint8"))
                engine.bind(one.bindings())
                torch.cuda.synchronize()
                engine.enqueue()
                device.synchronize()
                same &= bool(torch.equal(one.logits[0], logits[b]))
            print(f"   each sequence bitwise as alone: {same}", flush=True)
    if "torch" in wanted:
        torch_compile(setting)
    if "tensorrt" in wanted:
        import tensorrt_variants

        tensorrt_variants.run(device, weights)
    torch.cuda.synchronize()
    device.close()


if __name__ == "__main__":
    main()
