"""The yardstick: a decode step, and prompts, of a Llama decoder in plain PyTorch, compiled, in CUDA graphs.

    python tools/bench/torch_reference.py decode CONFIG CAPACITY
    python tools/bench/torch_reference.py prefill CONFIG TOKENS ...
    python tools/bench/torch_reference.py transformers CONFIG TOKENS ...
    torchrun --nproc-per-node 2 tools/bench/torch_reference.py ranks CONFIG CAPACITY TOKENS ...

`CONFIG` is what a config.json says, as JSON. Written as one would write it for speed: fused q/k/v and gate/up
projections, a static KV cache in buffers (whose addresses are declared static, without which PyTorch skips its CUDA
graphs), scaled_dot_product_attention with grouped heads, argmax on the device. `transformers`: prompts of that
package's own model, each kind of layer compiled, all of it one CUDA graph; what is not installed for its recurrent
layers it replaces by operations of PyTorch, and the result says so. `ranks`: steps and prompts of a model that GPUs
share as Megatron-LM does, with NCCL's sums.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


class Layer(nn.Module):
    """One decoder layer with its KV cache."""

    def __init__(self, config: dict, capacity: int) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.heads, self.kv_heads, self.size = (
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
        )
        self.input_norm = nn.RMSNorm(hidden, config["rms_norm_eps"])
        self.qkv = nn.Linear(hidden, (self.heads + 2 * self.kv_heads) * self.size, bias=False)
        self.output = nn.Linear(self.heads * self.size, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden, config["rms_norm_eps"])
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, self.kv_heads, capacity, self.size))

    def _attention_inputs(self, x: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Query, key and value heads [1, heads, T, size] of x [1, T, hidden], rotated by rope [2, T, size / 2]."""
        qkv = self.qkv(self.input_norm(x)).view(1, x.shape[1], -1, self.size).transpose(1, 2)
        rotated, value = qkv.split([self.heads + self.kv_heads, self.kv_heads], dim=1)
        first, second = rotated.chunk(2, dim=-1)
        cos, sin = rope[0], rope[1]
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return *rotated.split([self.heads, self.kv_heads], dim=1), value

    def _behind_attention(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """The layer's output [1, T, hidden], of its input x and attention's results [1, heads, T, size]."""
        x = x + self._summed(self.output(context.transpose(1, 2).reshape(1, x.shape[1], -1)))
        gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        return x + self._summed(self.down(F.silu(gate) * up))

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, where there are several."""
        return collectives.all_reduce(x, "sum", dist.group.WORLD) if dist.is_initialized() else x

    def forward(self, x: torch.Tensor, position: torch.Tensor, mask: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """One token: x [1, 1, hidden]."""
        query, key, value = self._attention_inputs(x, rope)
        self.keys.index_copy_(2, position, key)
        self.values.index_copy_(2, position, value)
        context = F.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=mask, enable_gqa=True)
        return self._behind_attention(x, context)


class Decoder(nn.Module):
    """Embedding, layers, tied head."""

    def __init__(self, config: dict, capacity: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config, capacity) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.register_buffer("rope", torch.rand(2, capacity, config["head_dim"] // 2))
        self.register_buffer("rows", torch.arange(capacity))

    def forward(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Token [1, 1] and position [1] to the next token [1, 1]."""
        x = self.embedding(token)
        mask, rope = (self.rows <= position)[None, None, None], self.rope[:, position]
        for layer in self.layers:
            x = layer(x, position, mask, rope)
        return F.linear(self.norm(x), self.embedding.weight).float().argmax(-1)


@torch.inference_mode()
def decode_step_milliseconds(config: dict, capacity: int, position: int = 500, repeats: int = 100) -> dict[str, float]:
    """Median milliseconds of a compiled decode step, on the GPU's clock, and of its kernels alone."""
    torch.set_default_dtype(torch.float16)
    with torch.device("cuda"):
        model = Decoder(config, capacity)
        token, row = torch.zeros(1, 1, dtype=torch.long), torch.tensor([position])
    for tensor in (*model.buffers(), *model.parameters()):
        torch._dynamo.mark_static_address(tensor)
    step = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    started = time.perf_counter()
    for _ in range(5):
        step(token, row)
    torch.cuda.synchronize()
    compiled = time.perf_counter() - started
    spans = [_milliseconds(lambda: step(token, row), repeats) for _ in range(5)]
    return {"milliseconds": statistics.median(spans), "compile_seconds": compiled}


class PromptLayer(Layer):
    """One decoder layer on all tokens of a prompt, whose attention is flash attention."""

    def forward(self, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """All tokens: x [1, T, hidden]."""
        query, key, value = self._attention_inputs(x, rope)
        self.keys[:, :, : x.shape[1]] = key
        self.values[:, :, : x.shape[1]] = value
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self._behind_attention(x, context)


@torch.inference_mode()
def prefill_milliseconds(config: dict, counts: list[int], repeats: int = 5) -> dict[str, float]:
    """Median milliseconds, on the GPU's clock, of prompts of so many tokens, without embedding and head.

    One layer is compiled for each length; all layers are one CUDA graph.
    """
    torch.set_default_dtype(torch.float16)
    config = {"head_dim": config["hidden_size"] // config["num_attention_heads"]} | config
    found = {}
    with torch.device("cuda"):
        layers = [PromptLayer(config, max(counts)) for _ in range(config["num_hidden_layers"])]
        rope = torch.rand(2, max(counts), config["head_dim"] // 2)
    run = torch.compile(lambda layer, x, rope: layer(x, rope), fullgraph=True, dynamic=False)
    for count in counts:
        x, own_rope = torch.randn(1, count, config["hidden_size"], device="cuda"), rope[:, :count].contiguous()

        def prompt(x: torch.Tensor = x, own_rope: torch.Tensor = own_rope) -> torch.Tensor:
            for layer in layers:
                x = run(layer, x, own_rope)
            return x

        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            prompt()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                prompt()
        found[str(count)] = statistics.median(_milliseconds(graph.replay, repeats) for _ in range(5))
    return found


@torch.inference_mode()
def rank_milliseconds(config: dict, capacity: int, counts: list[int], position: int = 128) -> dict[str, float]:
    """Median milliseconds of a decode step, and of prompts of so many tokens, of ranks that torchrun started.

    A rank has its part of the heads, of the inner rows and of the vocabulary. A layer is compiled; all are one CUDA
    graph.
    """
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_default_dtype(torch.float16)
    of = dist.get_world_size()
    split = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    with torch.device("cuda"):
        model = Decoder(config | {name: config[name] // of for name in split}, capacity)
        x, row = torch.randn(1, 1, config["hidden_size"]), torch.tensor([position])
    run = torch.compile(lambda layer, *given: layer(*given), fullgraph=True, dynamic=False)

    def step() -> torch.Tensor:
        mask, rope, value = (model.rows <= row)[None, None, None], model.rope[:, row], x
        for layer in model.layers:
            value = run(layer, value, row, mask, rope)
        logits = F.linear(model.norm(value), model.embedding.weight).view(1, -1)
        return collectives.all_gather_tensor(logits, 1, dist.group.WORLD).float().argmax(-1)

    step()
    torch.cuda.synchronize()
    replay, _ = _graph_of(step)
    found = {"milliseconds": statistics.median(_milliseconds(replay, 50) for _ in range(5))}
    return found | (
        prefill_milliseconds(config | {name: config[name] // of for name in split}, counts) if counts else {}
    )


#: Packages with kernels for recurrent layers that transformers takes where they are.
_KERNELS = {"flash-linear-attention": "fla", "causal-conv1d": "causal_conv1d"}


@torch.inference_mode()
def transformers_milliseconds(config: dict, counts: list[int], repeats: int = 5) -> dict[str, Any]:
    """Median milliseconds, on the GPU's clock, of prompts of so many tokens with the logits behind the last, without a
    cache; for each how long it took to compile. `refusal` where this release has no such model.

    A layer is compiled for each length and kind: a whole model would be hours of unrolled loops, and is no faster, as a
    CUDA graph holds all launches.
    """
    import transformers

    found: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    missing = [name for name, module in _KERNELS.items() if find_spec(module) is None]
    found["recurrent_kernels"] = f"transformers' fallback: no {', no '.join(missing)}" if missing else "installed ones"
    known = {name: value for name, value in config.items() if name not in ("architectures", "torch_dtype")}
    try:
        read = transformers.AutoConfig.for_model(**known)
        with torch.device("cuda"):
            model = transformers.AutoModelForCausalLM.from_config(read, dtype=torch.float16).eval()
    except (ValueError, KeyError):
        return found | {"refusal": f"transformers {transformers.__version__} has no {config['model_type']}"}
    found["parameters"] = sum(each.numel() for each in model.parameters())
    for layer in model.model.layers:
        layer.compile(dynamic=False)
    for count in counts:
        ids, started = torch.randint(0, 1000, (1, count), device="cuda"), time.perf_counter()

        def prompt(ids: torch.Tensor = ids) -> torch.Tensor:
            return model(input_ids=ids, use_cache=False, logits_to_keep=1).logits

        prompt()
        torch.cuda.synchronize()
        found[f"{count}_compile_seconds"] = time.perf_counter() - started
        step, found[f"{count}_launch"] = _graph_of(prompt)
        found[str(count)] = statistics.median(_milliseconds(step, repeats) for _ in range(3))
        print(json.dumps(found), flush=True)  # for who does not wait for the rest
    return found


def _graph_of(prompt: Callable[[], object]) -> tuple[Callable[[], object], str]:
    """The same as a CUDA graph, where it can be one."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            prompt()
    except RuntimeError as error:
        return prompt, f"launched by the host: no CUDA graph holds it ({str(error).splitlines()[0]})"
    return graph.replay, "one CUDA graph"


def _milliseconds(step: Callable[[], object], repeats: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


if __name__ == "__main__":
    kind, given, *numbers = sys.argv[1:]
    sizes = [int(number) for number in numbers]
    if kind == "decode":
        print(json.dumps(decode_step_milliseconds(json.loads(given), sizes[0])))
    elif kind == "ranks":
        times = rank_milliseconds(json.loads(given), sizes[0], sizes[1:])
        if dist.get_rank() == 0:
            print(json.dumps(times), flush=True)
        dist.destroy_process_group()
    elif kind == "transformers":
        print(json.dumps(transformers_milliseconds(json.loads(given), sizes)))
    else:
        print(json.dumps(prefill_milliseconds(json.loads(given), sizes)))
