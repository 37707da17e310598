"""What a model is to give on a board, before anybody has one: a forecast by arithmetic, in seconds, without a GPU.

    python tools/bench/board_forecast.py [--models llama-1b ...] [--boards orin ...] [--weights float16 int4]
                                         [--context 512] [--chain-tokens 2.57] [--tree-tokens 3.26]
                                         [--output FORECAST.json]

The arithmetic is that of `edgellm/device/forecast.py`. `at most` is at the whole published bandwidth; what is expected
is at the share of it that the best published run reads, with the edges between kernels. The tokens that a round gives
are given to the forecast. Beside it stands what others published, for their own weights.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))
from published_families import PUBLISHED as PUBLISHED_CONFIGS
from random_checkpoint import LLAMA_3_2_1B, SHAPES
from random_checkpoint import PUBLISHED as KNOWN
from random_model import RandomDirectory, random_directory
from simulated_acceptance import simulated_mean

from edgellm.device.forecast import BOARDS, EDGE_MICROSECONDS, REACHED, Board, Cost, engine_costs, plain_shapes, seconds
from edgellm.engines.families import decoder_config
from edgellm.engines.families.programs import model_program
from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.model.memory_plan import weight_bytes as spec_bytes
from edgellm.engines.speculation.draft_plan import DraftPlan, chain, tree

#: Bytes of a board's memory, in GB, that are not the model's.
TAKEN_GB = 2.0
#: A drafted tree's tokens a round are simulated, as in `eagle_speed.py`: those of 10/6/60, and others by them.
TREE_MEAN, LARGEST = 4.24, tree(10, 6, 60)
CHAIN, TREE = chain(3), tree(10, 4, 16)
WEIGHTS = ("float16", "int4", "int4+int8")

_QWEN_2_5 = SHAPES["qwen2.5-0.5b"]
#: By name, what a `config.json` says: beside the shapes of other benchmarks those that others published speeds of.
MODELS: dict[str, dict[str, Any]] = {
    "llama-1b": LLAMA_3_2_1B,
    "llama-3b": LLAMA_3_2_1B
    | {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "head_dim": 128},
    "llama-8b": SHAPES["llama-8b"],
    "qwen2.5-1.5b": _QWEN_2_5
    | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "qwen2.5-3b": _QWEN_2_5
    | {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
    "qwen2.5-7b": _QWEN_2_5
    | {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "qwen3-1.7b": SHAPES["qwen3-1.7b"],
    "qwen3-4b": SHAPES["qwen3-1.7b"]
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
#: Others by their published names.
OTHERS = (
    *("granite-4.0-350m", "ERNIE-4.5-0.3B", "MiniCPM4-0.5B", "EXAONE-4.0-1.2B", "granite-4.0-1b", "Phi-4-mini"),
    *("Olmo-3-7B", "Hunyuan-7B", "Ministral-3-8B", "gemma-2-2b", "gemma-4-E2B", "gemma-4-E4B"),
    *("Nemotron-3-Nano-4B", "granite-4.0-h-350m", "granite-4.0-h-tiny", "Nemotron-3-Nano-30B-A3B"),
    *("gemma-4-12B-it", "gemma-4-31B-it", "gemma-4-26B-A4B", "LFM2-8B-A1B", "gpt-oss-20b", "Qwen3-30B-A3B"),
    "Qwen3.5-35B-A3B",
)
MODELS |= {name: PUBLISHED_CONFIGS[name][0] if name in PUBLISHED_CONFIGS else KNOWN[name] for name in OTHERS}


class Published(NamedTuple):
    """Tokens a second that somebody published of a model on a board: for which weights, by what, and where."""

    board: str
    model: str
    weights: str
    text: str
    source: str


_NVIDIA_SUPER = "NVIDIA, Jetson Orin Nano Super Developer Kit (2024-12)"
_EMBEDL = "embedl, Edge-Inference-Benchmarks (undated)"
_EDGE_LLM = "TensorRT Edge-LLM, issue 60 (2026-03; JetPack 6.2)"
#: `weights` is the row beside which it stands: 16 bits, or 4 with a head of 16 bits or a packed one.
PUBLISHED = (
    Published("orin-nano", "llama-3b", "int4+int8", "43.1 (MLC, INT4)", _NVIDIA_SUPER),
    Published("orin-nano", "llama-8b", "int4+int8", "19.1 (MLC, INT4)", _NVIDIA_SUPER),
    Published("orin-nano", "qwen2.5-7b", "int4+int8", "21.8 (MLC, INT4)", _NVIDIA_SUPER),
    Published("orin-nano", "llama-1b", "int4+int8", "about 62 (Ollama)", "community benchmarks, 25 W"),
    Published("orin-nano", "qwen2.5-1.5b", "int4+int8", "32 (llama.cpp, Q4_K_M)", "community benchmarks"),
    Published(
        "orin-nano",
        "qwen3-1.7b",
        "int4",
        "Cosmos-Reason2-2B: 60 (Edge-LLM), 56 (vLLM), 38 (llama.cpp, Q4_K_M)",
        "jetson-ai-lab model cards (2026)",
    ),
    Published("orin", "qwen3-1.7b", "float16", "Qwen3-VL-2B: 36.8 to 41 (FlashRT, BF16)", "FlashRT docs (2026-08)"),
    Published("orin", "qwen3-4b", "float16", "Qwen3-VL-4B: 20.2 (Edge-LLM)", _EDGE_LLM),
    Published("orin", "qwen3-4b", "int4", "Qwen3-VL-4B: 52.2 (Edge-LLM, W4A16)", _EDGE_LLM),
    Published("orin", "qwen2.5-3b", "float16", "Qwen2.5-VL-3B: 27.2 (Edge-LLM)", _EDGE_LLM),
    Published("orin", "qwen2.5-3b", "int4", "Qwen2.5-VL-3B: 71.8 (Edge-LLM, W4A16)", _EDGE_LLM),
    Published("orin", "llama-3b", "int4", "61.2 (vLLM, W4A16), 75.4 with an approximate head", _EMBEDL),
    Published("thor", "llama-1b", "int4", "162 (vLLM, W4A16), 285 with an approximate head", _EMBEDL),
)


class Model:
    """A model with weights of a kind, and a draft head of matching shape: what its steps and rounds take on boards."""

    def __init__(self, name: str, weights: str, context: int) -> None:
        self.config = decoder_config(MODELS[name])
        self.name, self.weights, self.context = name, weights, context
        self.plain = self.directory(None)
        self._costs: dict[DraftPlan | None, list[Cost]] = {}

    def directory(self, plan: DraftPlan | None) -> RandomDirectory:
        """The engines of a plan alone; nothing is written."""
        sizes = () if plan is None else (plan.top_k, plan.steps, plan.tree_size)
        limits = EngineLimits(1, 16, self.context + 128, *sizes)
        return random_directory(Path(), self.config, limits, self.config.dtype, self.weights)

    @cached_property
    def weight_gb(self) -> float:
        """GB of the weights that a plain step reads: of experts those that are chosen."""
        (shape,) = plain_shapes(self.plain.limits)
        chosen = 1 if self.config.mixture is None else self.config.mixture.chosen
        return _gigabytes(model_program(self.plain.config, shape).weights.values(), self.plain, chosen)

    @cached_property
    def memory_gb(self) -> float:
        """GB of all weights: the embedding too, of which a step reads a row."""
        return _gigabytes(decoder_weights(self.plain.config), self.plain)

    def costs(self, plan: DraftPlan | None) -> list[Cost]:
        """Of each step of a plain step's engine, or of the engines of a round of a plan."""
        if plan not in self._costs:
            made = self.plain if plan is None else self.directory(plan)
            given = made.models, made.limits, made.dtype, made.layouts, self.context
            self._costs[plan] = engine_costs(*given, plan)
        return self._costs[plan]

    def seconds(self, board: Board, plan: DraftPlan | None = None, **assumed: float) -> float:
        """Of a plain step, or of a round of a plan."""
        return seconds(self.costs(plan), board, **assumed)


def _gigabytes(specs: Iterable[WeightSpec], directory: RandomDirectory, chosen: int | None = None) -> float:
    """Of all weights, or where experts are `chosen` of so many experts."""
    packed, total = directory.layouts.get("base", {}), 0.0
    for each in specs:
        size = math.prod(packed[each.name].shape) if each.name in packed else spec_bytes(each, directory.dtype)
        total += size * (chosen / each.experts if chosen and each.experts else 1)
    return total / 1e9


def forecast(model: Model, board_name: str, tokens: Mapping[str, float]) -> dict[str, Any]:
    """One row: tokens a second, plain and drafted, with so many tokens a round by the plan's name."""
    board = BOARDS[board_name]
    row: dict[str, Any] = {"model": model.name, "weights": model.weights, "board": board_name}
    row["weight_gb"] = round(model.weight_gb, 3)
    row["published"] = [
        {"tokens_per_second": each.text, "source": each.source}
        for each in PUBLISHED
        if (each.board, each.model, each.weights) == (board_name, model.name, model.weights)
    ]
    row["fits"] = model.memory_gb + TAKEN_GB <= board.memory_gb
    if row["fits"]:
        plain = model.seconds(board)
        row |= {"at_most": 1 / model.seconds(board, reached=1.0, edge=0.0), "plain": 1 / plain}
        for plan in (CHAIN, TREE):
            span = model.seconds(board, plan)
            row[plan.name] = {"tokens_per_second": tokens[plan.name] / span, "round_in_plain_steps": span / plain}
    return row


def table(rows: Sequence[Mapping[str, Any]], tokens: Mapping[str, float]) -> list[str]:
    """Markdown, one table for each board."""
    lines: list[str] = []
    heads = [f"{plan.name}, {tokens[plan.name]:.2f} tokens a round" for plan in (CHAIN, TREE)]
    for name in dict.fromkeys(row["board"] for row in rows):
        board = BOARDS[name]
        lines += [
            f"## {board.title}",
            "",
            f"{board.multiprocessors} multiprocessors at {board.ghz:g} GHz, {board.gb_per_s:g} GB/s, "
            f"{board.memory_gb} GB. By NVIDIA's {board.source}.",
            "",
            f"| Model | Weights | GB a step | at most | plain | {heads[0]} | {heads[1]} | Published by others |",
            "|---" * 8 + "|",
        ]
        for row in (each for each in rows if each["board"] == name):
            said = "; ".join(each["tokens_per_second"] for each in row["published"]) or ""
            begin = f"| {row['model']} | {row['weights']} | {row['weight_gb']:.2f} | "
            if not row["fits"]:
                lines.append(f"{begin}does not fit | | | | {said} |")
                continue
            drafted = (
                f"{row[plan.name]['tokens_per_second']:.1f} ({row[plan.name]['round_in_plain_steps']:.2f})"
                for plan in (CHAIN, TREE)
            )
            lines.append(f"{begin}{row['at_most']:.1f} | {row['plain']:.1f} | {' | '.join(drafted)} | {said} |")
        lines.append("")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables; write them as JSON where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", choices=list(MODELS), default=[name for name in MODELS if name not in OTHERS]
    )
    parser.add_argument("--boards", nargs="+", choices=list(BOARDS), default=list(BOARDS))
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--context", type=int, default=512, help="tokens behind which a step is")
    usual = {plan.name: simulated_mean(plan, LARGEST, TREE_MEAN) for plan in (CHAIN, TREE)}
    parser.add_argument("--chain-tokens", type=float, default=usual[CHAIN.name], help=f"of a round of {CHAIN.name}")
    parser.add_argument("--tree-tokens", type=float, default=usual[TREE.name], help=f"of a round of {TREE.name}")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    tokens = {CHAIN.name: given.chain_tokens, TREE.name: given.tree_tokens}
    models = [Model(name, weights, given.context) for name in given.models for weights in given.weights]
    rows = [forecast(model, board, tokens) for board in given.boards for model in models]
    print("\n".join(["A FORECAST, not measured: tokens a second", "", *table(rows, tokens)]))
    if given.output is not None:
        assumed = {"reached": REACHED, "edge_microseconds": EDGE_MICROSECONDS, "context": given.context}
        found = {"kind": "forecast, not measured", "assumed": assumed, "tokens_a_round": tokens, "rows": rows}
        given.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
