"""Makes the weights of linear layers and norms by the names that checkpoints have for them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.steps import Linear

_GRANITE_EXPERTS = {
    "mlp.gate": "block_sparse_moe.router.layer",
    **{f"mlp.experts.*.{each}_proj": f"block_sparse_moe.experts.*.{each}_proj" for each in ("gate", "up", "down")},
}
#: By `DecoderConfig.naming`, what a checkpoint calls a module, or a tensor without an ending, otherwise than Llama's; *
#: stands for an expert's number.
PUBLISHED: dict[str, dict[str, str]] = {
    "llama": {},
    "lfm2": {
        "norm": "embedding_norm",
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_norm": "self_attn.q_layernorm",
        "self_attn.k_norm": "self_attn.k_layernorm",
        "self_attn.o_proj": "self_attn.out_proj",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "mlp": "feed_forward",
        "mlp.gate": "feed_forward.gate",
        "mlp.experts.*.gate_proj": "feed_forward.experts.*.w1",
        "mlp.experts.*.up_proj": "feed_forward.experts.*.w3",
        "mlp.experts.*.down_proj": "feed_forward.experts.*.w2",
    },
    "granitemoe": _GRANITE_EXPERTS,
    "granitemoehybrid": {
        **_GRANITE_EXPERTS,
        **{f"{name}.gate_up_proj": "shared_mlp.input_linear" for name in ("mlp", "mlp.shared_expert")},
        **{f"{name}.down_proj": "shared_mlp.output_linear" for name in ("mlp", "mlp.shared_expert")},
    },
    "hunyuan": {"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"},
    "qwen3_5": {},
    "gpt_oss": {"mlp.gate": "mlp.router"},
    "nemotron_h": {
        "norm": "norm_f",
        "input_layernorm": "norm",
        **{f"self_attn.{each}_proj": f"mixer.{each}_proj" for each in "qkvo"},
        **{f"mamba.{each}": f"mixer.{each}" for each in ("A_log", "dt_bias", "D")},
        **{f"mamba.{each}": f"mixer.{each}" for each in ("in_proj", "conv1d", "norm", "out_proj")},
        **{f"mlp.{each}_proj": f"mixer.{each}_proj" for each in ("up", "down")},
        **{f"mlp.shared_expert.{each}_proj": f"mixer.shared_experts.{each}_proj" for each in ("up", "down")},
        **{f"mlp.experts.*.{each}_proj": f"mixer.experts.*.{each}_proj" for each in ("up", "down")},
        "mlp.gate": "mixer.gate",
        "mlp.expert_bias": "mixer.gate.e_score_correction_bias",
        **{f"mlp.fc{number}_latent_proj": f"mixer.fc{number}_latent_proj" for number in (1, 2)},
    },
    "gemma4": {
        "mlp.gate": "router.proj",
        "mlp.gate_scale.weight": "router.scale",
        "mlp.expert_scales": "router.per_expert_scale",
        **{f"mlp.experts.*.{each}_proj": f"experts.*.{each}_proj" for each in ("gate", "up", "gate_up", "down")},
    },
    "starcoder2": {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
}
#: Nemotron-H's head for multi-token prediction: its attention is the first "layer" there, its mixture the second.
PUBLISHED["nemotron_h_mtp"] = {
    **{name: f"{int(name.startswith('mlp'))}.{own}" for name, own in PUBLISHED["nemotron_h"].items()},
    **{"pre_fc_norm_embedding": "0.enorm", "pre_fc_norm_hidden": "0.hnorm", "fc": "0.eh_proj"},
    **{"post_attention_layernorm": "1.norm", "norm": "1.final_layernorm"},
}
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.")


class NamedWeights:
    """Makes the weights of one part of a model: `prefix` begins their names, `source` those in the checkpoint, which
    calls modules otherwise where `published` says so."""

    def __init__(self, prefix: str, source: str, published: Mapping[str, str] | None = None) -> None:
        self._prefix, self._source, self._published = prefix, source, published or {}

    def weight(self, name: str, *shape: int, dtype: str = "compute", part: tuple[int, ...] | None = None) -> WeightSpec:
        """One tensor, `name` without prefix, in the shape `part` in the checkpoint where that is another."""
        module, dot, kind = name.rpartition(".")
        source = f"{self._source}{self._published.get(name, f'{self._named(module)}{dot}{kind}')}"
        return WeightSpec(f"{self._prefix}{name}", shape, ((source, shape if part is None else part),), dtype)

    def _named(self, module: str) -> str:
        """What the checkpoint calls a module."""
        expert = _EXPERT.match(module)
        if expert is None:
            return self._published.get(module, module)
        any_expert = f"mlp.experts.*.{module[expert.end() :]}"
        return self._published.get(any_expert, any_expert).replace("*", expert[1])

    def linear(
        self, name: str, rows: int | Mapping[str, int] | Sequence[tuple[str, int]], columns: int, bias: bool = True
    ) -> Linear:
        """A linear layer of so many rows, or one that several of the same folder in the checkpoint (names and rows)
        fill one behind the other; one of them may do so twice."""
        folder, parts = name[: name.rfind(".") + 1], [(name, rows)] if isinstance(rows, int) else []
        if not isinstance(rows, int):
            pairs = rows.items() if isinstance(rows, Mapping) else rows
            parts = [(f"{folder}{part}", size) for part, size in pairs]

        def spec(kind: str, *width: int) -> WeightSpec:
            sources = tuple((f"{self._source}{self._named(part)}.{kind}", (size, *width)) for part, size in parts)
            return WeightSpec(f"{self._prefix}{name}.{kind}", (sum(size for _, size in parts), *width), sources)

        return Linear(f"{self._prefix}{name}", spec("weight", columns), spec("bias") if bias else None)

    def linear_of_experts(self, name: str, rows: Mapping[str, int], columns: int, count: int, biases: bool) -> Linear:
        """One layer of each of `count` experts, whose biases [E, N] stand in one tensor."""
        linear = self.linear(name, rows, columns, False)
        stacked = (f"{self._source}{name}_bias", (count, sum(rows.values()) // count))
        bias = WeightSpec(f"{self._prefix}{name}.bias", stacked[1], (stacked,)) if biases else None
        return Linear(linear.name, replace(linear.weight, experts=count), bias)
