"""What a model is to give on a board, before anybody has one: a forecast by arithmetic, in seconds, without a GPU.

    python tools/bench/board_forecast.py [--models llama-1b ...] [--boards orin ...] [--weights float16 int4]
                                         [--context 512] [--chain-tokens 2.57] [--tree-tokens 3.26]
                                         [--output FORECAST.json]

Each step of a model's program takes the larger of two times. One is that of its bytes (weights, KV rows in reach,
states) at the board's bandwidth. The other is that of its arithmetic at the board's clock: the clocks that a weight
took in a part of a GPU with bandwidth to spare, by rows and format (results below), and never less than `mma.sync`
takes for whole tiles of 8 rows. `at most` is that at the whole published bandwidth; what is expected is at the share of
it that the best published run reads, with the edges between kernels. A round of a draft is an accept, steps that
propose, and a step that verifies; the tokens that it gives are given to the forecast.

Nothing of this was measured on a board. Beside it stands what others published, for their own weights.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from random_checkpoint import LLAMA_3_2_1B, SHAPES
from random_model import RandomDirectory, random_directory
from simulated_acceptance import simulated_mean

from edgellm.device.boards import BOARDS, Board
from edgellm.engines.families import decoder_config
from edgellm.engines.families.programs import model_program
from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.memory_plan import weight_bytes as spec_bytes
from edgellm.engines.model.states import WindowRows, state_bytes
from edgellm.engines.model.steps import Attention, Stateful, Step
from edgellm.engines.speculation.draft_plan import DraftPlan, chain, tree
from edgellm.kernels.decode.tilings import Capacity
from edgellm.kernels.quantization.row_runs import PackedLayout

#: The largest share of a board's bandwidth that a published run reads: Qwen2.5-7B by MLC on an Orin Nano Super, 21.75
#: tokens a second of 3.98 GB of weights, is 85 % of 102 GB/s.
REACHED = 0.85
#: Microseconds between two kernels of a graph, an estimate: on a small GPU there is little to drain and to fill.
EDGE_MICROSECONDS = 2.0
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


@dataclass(frozen=True)
class Clocks:
    """Clocks of one multiprocessor that a weight takes, by rows of activations: at most, for the part in which that was
    measured may have waited for memory."""

    by_rows: dict[int, float]

    def of(self, rows: int) -> float:
        """Of so many rows, as kernels of the next larger number that was measured take them."""
        known = [measured for measured in self.by_rows if measured >= rows]
        return self.by_rows[min(known)] if known else self.by_rows[max(self.by_rows)] * rows / max(self.by_rows)


#: Results of Llama-8B in a part of 16 multiprocessors without a neighbour, at the clock of an H200 in GHz.
_RESULTS, _PART, _PART_GHZ = Path(__file__).parent / "results", 16, 1.98
_DENSE_RESULT = "2026-11-23-h200-as-orin-8b.json"
_PACKED_RESULT = "2026-11-23-h200-packed-as-orin.json"


@cache
def measured_clocks() -> dict[str, Clocks]:
    """Clocks of dense weights and of packed ones, from the results; of these without the head, which was dense."""

    def clocks(milliseconds: float, weights: float) -> float:
        return milliseconds * 1e6 * _PART_GHZ * _PART / weights

    dense = {rows: clocks(*each) for rows, each in _measured_steps(_DENSE_RESULT).items()}
    packed = {}
    head = math.prod((SHAPES["llama-8b"]["vocab_size"], SHAPES["llama-8b"]["hidden_size"]))
    layers = next(iter(_measured_steps(_DENSE_RESULT).values()))[1] - head
    for rows, (milliseconds, _) in _measured_steps(_PACKED_RESULT).items():
        packed[rows] = clocks(milliseconds, layers) - dense[rows] * head / layers
    return {"dense": Clocks(dense), "packed": Clocks(packed)}


def _measured_steps(name: str) -> dict[int, tuple[float, float]]:
    """By rows, milliseconds of the steps of the base, and their weights if they are of 16 bits."""
    found = json.loads((_RESULTS / name).read_text(encoding="utf-8"))
    found = found.get("llama-8b", found)
    engines = found.get("table", found)["engines"]
    steps = {key: each for key, each in engines.items() if key.startswith("base.")}
    return {int(key.split("-t")[1].split("-")[0]): (each["ms"], each["bytes"] / 2) for key, each in steps.items()}


class Cost(NamedTuple):
    """What a step takes: bytes of memory, clocks of one multiprocessor, and multiply-adds of `mma.sync`."""

    nbytes: float
    clocks: float
    multiply_adds: float

    def seconds(self, board: Board, reached: float, edge: float) -> float:
        """The largest time, at a share of the bandwidth, and what stands between this kernel and the next."""
        clocks = max(self.clocks, self.multiply_adds / multiply_adds(board))
        return max(self.nbytes / (reached * board.gb_per_s), clocks / board.multiprocessor_ghz) / 1e9 + edge


def step_cost(step: Step, shape: EngineShape, dtype: str, packed: Mapping[str, PackedLayout], context: int) -> Cost:
    """The cost of one step of a program behind so many tokens of context."""
    rows = shape.selected if getattr(step, "selects", False) else shape.tokens
    nbytes = clocks = products = 0.0
    for spec in step.weights:
        layout, size = packed.get(spec.name), math.prod(spec.shape)
        nbytes += spec_bytes(spec, dtype) if layout is None else math.prod(layout.shape)
        if len(spec.shape) == 2:
            clocks += size * measured_clocks()["dense" if layout is None else "packed"].of(rows)
            products += size * _padded(rows)
    if isinstance(step, Attention):
        state = step.state(shape)
        reach = min(context, state.window) if isinstance(state, WindowRows) else context
        nbytes += state_bytes(state.of_sequence(reach), dtype)
        heads, _, size = step.heads
        products += 2 * heads * size * reach * _padded(shape.tokens)  # scores, then values
    elif isinstance(step, Stateful):
        nbytes += 2 * state_bytes(step.state(shape).tensors(1, 1), dtype)  # read and written
    return Cost(nbytes, clocks, products)


def multiply_adds(board: Board) -> int:
    """Of `mma.sync` with 16 bits, in a clock of one multiprocessor: 1,024 of Orin (NVIDIA's 170 TOPS of sparse int8 are
    42.5 TFLOP/s of dense 16-bit products, by 16 multiprocessors at 1.3 GHz), and no fewer assumed of Thor."""
    return Capacity(architecture=board.architecture).speeds[1]


def _padded(rows: int) -> int:
    return -(-rows // 8) * 8


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
        """GB of the weights that a plain step reads."""
        (shape,) = plain_shapes(self.plain)
        return _gigabytes(model_program(self.plain.config, shape).weights.values(), self.plain)

    @cached_property
    def memory_gb(self) -> float:
        """GB of all weights: the embedding too, of which a step reads a row."""
        return _gigabytes(decoder_weights(self.plain.config), self.plain)

    def costs(self, plan: DraftPlan | None) -> list[Cost]:
        """Of each step of a plain step's engine, or of the engines of a round of a plan."""
        if plan not in self._costs:
            directory = self.plain if plan is None else self.directory(plan)
            shapes = plain_shapes(directory) if plan is None else round_shapes(directory, plan)
            self._costs[plan] = [cost for shape in shapes for cost in self._engine_costs(directory, shape)]
        return self._costs[plan]

    def _engine_costs(self, directory: RandomDirectory, shape: EngineShape) -> list[Cost]:
        program, packed = model_program(directory.model_config(shape.model), shape), directory.layouts
        given = directory.dtype, packed.get(shape.model, {}), self.context
        return [step_cost(step, shape, *given) for step in program.steps]

    def seconds(
        self,
        board: Board,
        plan: DraftPlan | None = None,
        reached: float = REACHED,
        edge: float = EDGE_MICROSECONDS * 1e-6,
    ) -> float:
        """Of a plain step, or of a round of a plan."""
        return sum(cost.seconds(board, reached, edge) for cost in self.costs(plan))


def plain_shapes(directory: RandomDirectory) -> list[EngineShape]:
    """The engine of a plain step."""
    return [directory.limits.base_shape("decode", 1, 1, directory.limits.key_ranges[-1])]


def round_shapes(directory: RandomDirectory, plan: DraftPlan) -> list[EngineShape]:
    """The engines of a round of a plan, in their order: what the draft takes of the last one, its levels behind the
    first, and what the base verifies."""
    shapes = [
        each for each in directory.limits.engine_shapes() if each.key_range == directory.limits.tree_key_ranges[-1]
    ]
    by_phase = {each.phase: [other for other in shapes if other.phase == each.phase] for each in shapes}
    propose = next(each for each in by_phase["propose"] if each.tokens >= plan.top_k)
    verify = next(each for each in by_phase["verify"] if each.tokens >= plan.tree_size)
    return [by_phase["accept"][0], *[propose] * (plan.steps - 1), verify]


def _gigabytes(specs: Iterable[WeightSpec], directory: RandomDirectory) -> float:
    packed, dtype = directory.layouts.get("base", {}), directory.dtype
    return (
        sum(math.prod(packed[each.name].shape) if each.name in packed else spec_bytes(each, dtype) for each in specs)
        / 1e9
    )


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
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
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
