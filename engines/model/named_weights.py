"""Makes the weights of linear layers and norms by the names that checkpoints have for them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.steps import Linear

#: By `DecoderConfig.naming`, what a checkpoint calls a module, or a tensor without an ending, otherwise than Llama's; *
#: stands for an expert's number.
PUBLISHED: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("published_names.json").read_text("utf-8"))
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
