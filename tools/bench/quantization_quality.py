"""What quantizing costs the shipped model: exact match, equal greedy tokens and KL, teacher-forced over its own tasks.

Usage: python -m tools.bench.quantization_quality [--answers 5000] [--fewer 300] [--ways NAME ...]
       [--calibration FILE] [--seed 2026] [--output RESULTS.json]

Conversations of the model's evaluation, with the right answers in the assistant's place. Every one of these answers is
an item, and each of its tokens, the end of the turn included, counts: the reference (the checkpoint as it is) and each
way of quantizing see the same tokens before it. An item is an exact match where the most probable token is the right
one at every place, which is when greedy decoding gives that answer. All compute the program of a prefill in NumPy's
float32; with KV rows of 8 bits in float64, as the runtime does. Ways named "plain" round to nearest as
compressed-tensors does; all others are checkpoints that `edgellm quantize` makes, read back: calibrated on the texts
that ship, or on the model's "own texts", conversations of another seed.

Results so far are printed and written after every 25 conversations: an interrupted run leaves valid ones.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from edgellm.commands.quantize import default_texts, load_texts, token_pieces
from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.building.gguf_folder import checkpoint_folder
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import load_numpy_weights
from edgellm.engines.families import decoder_config
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.decoder import EMBEDDING, decoder_program, decoder_weights
from edgellm.engines.model.graph import ProgramGraph
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.rotary import rotary_table
from edgellm.engines.quantizer.quantizer import QuantizationOptions, quantize_checkpoint
from edgellm.kernels.quantization.packed_weight import WeightFormat
from edgellm.text.tokenizer import Tokenizer
from tools.bench.provenance import provenance, report
from tools.bench.quantization_error import SHIPPED, plainly_rounded
from tools.demo_model.evaluate import SOURCES, evaluation_items

#: What `edgellm quantize` is asked for, by the way's name.
QUANTIZED = {
    "int4, groups of 64": QuantizationOptions(4, 64, True),
    "int4, groups of 64, zero points": QuantizationOptions(4, 64, False),
    "int4, groups of 32": QuantizationOptions(4, 32, True),
    "int4, groups of 32, zero points": QuantizationOptions(4, 32, False),
    "int4, groups of 64, gptq": QuantizationOptions(4, 64, True, "gptq"),
    "int4, groups of 64, zero points, gptq": QuantizationOptions(4, 64, False, "gptq"),
    "int8": QuantizationOptions(8, None, True),
}
#: Behind the name of one of these: calibrated on conversations like those that are measured.
OWN_TEXTS = ", own texts"
#: What is measured over all answers; everything else over fewer.
MAIN = ("int4, groups of 64", "int4, groups of 64, zero points", "int4, groups of 64, gptq, own texts")
#: Rounded to nearest in the scales that hold all weights.
PLAIN = {
    "plain int4, groups of 64": WeightFormat("int4", 64, False, "float16"),
    "plain int4, groups of 64, zero points": WeightFormat("int4", 64, True, "float16"),
}
KV_CACHE = "int8 KV rows"
_BETWEEN_REPORTS = 25
#: How the names of the layers' linear layers end.
LAYERS = "_proj.weight"
#: Answers in the model's own texts, and the seed that they are drawn with.
_OWN_ANSWERS, _OWN_SEED = 220, 31


@dataclass(frozen=True)
class Forced:
    """A conversation's token ids; `answers` are the places of each answer's tokens, the end of the turn included."""

    token_ids: Sequence[int]
    answers: Sequence[range]

    @property
    def places(self) -> np.ndarray:
        """Of all tokens that are answers'."""
        return np.concatenate([np.asarray(answer) for answer in self.answers])


def forced_conversations(tokenizer: Tokenizer, seed: int, answers: int) -> list[Forced]:
    """Conversations of the evaluation, all skills alike, with so many answers or a few more: of each skill's items the
    longest, which have the most answers for the same system prompt."""
    by_skill: dict[str, list[dict[str, Any]]] = {skill: [] for skill in SOURCES}
    for item in evaluation_items(seed, max(5, answers // len(SOURCES))):
        by_skill[item["skill"]].append(item)
    for own in by_skill.values():
        own.sort(key=lambda item: -len(item["messages"]))
    found: list[Forced] = []
    count = 0
    for item in chain.from_iterable(zip(*by_skill.values(), strict=True)):
        if count < answers:
            answer = {"role": "assistant", "content": item["accepted"][0]}
            found.append(forced(tokenizer, [*item["messages"], answer]))
            count += len(found[-1].answers)
    return found


def forced(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> Forced:
    """A conversation and the places of what the assistant says in it."""
    answers = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            start = len(tokenizer.encode_chat(messages[:number], add_generation_prompt=True))
            tokens = len(tokenizer.encode(message["content"]))
            answers.append(range(start, start + tokens + 1))
    return Forced(tokenizer.encode_chat(messages, add_generation_prompt=False), answers)


def own_texts(tokenizer: Tokenizer) -> list[Sequence[int]]:
    """Conversations of the evaluation for calibration: other scenes and questions than those that are measured."""
    return [text.token_ids for text in forced_conversations(tokenizer, _OWN_SEED, _OWN_ANSWERS)]


class Model:
    """Weights float32 by name, and the logits that they give."""

    def __init__(self, config: DecoderConfig, weights: Mapping[str, np.ndarray], kv_cache: str = "compute") -> None:
        self.config, self.weights, self.kv_cache = config, weights, kv_cache
        self._rotary = rotary_table(config, config.max_position_embeddings, config.max_position_embeddings)

    def logits(self, text: Forced) -> np.ndarray:
        """Float32 [n, V] that the answers' tokens are drawn from."""
        count, places = len(text.token_ids), text.places
        shape = EngineShape("prefill", 1, count, count, count, len(places), kv_cache=self.kv_cache)
        program = decoder_program(self.config, shape)
        values: dict[str, np.ndarray] = {
            "inputs_embeds": self.weights[EMBEDDING][np.asarray(text.token_ids)][None],
            "rope_rotary_cos_sin": self._rotary[None, :count],
            "attention_mask": np.tri(count, dtype=np.bool_)[None, None],
            "kvcache_start_index": np.zeros(1, np.int32),
            "last_token_ids": np.asarray(places - 1, np.int32)[None],
        }
        for name, (size, dtype) in program.states.items():
            values[name] = np.zeros(size, np.int8 if dtype == "int8" else np.float32)
        ProgramGraph(NumpyOperations(values, self.weights, wide=self.kv_cache == "int8"), program).run()
        return values["logits"][0]


@dataclass
class Measured:
    """One way beside the reference, over the answers that both have had so far."""

    right: list[bool] = field(default_factory=list)
    reference_right: list[bool] = field(default_factory=list)
    divergences: list[np.ndarray] = field(default_factory=list)
    differences: list[dict[str, Any]] = field(default_factory=list)
    close: int = 0

    def add(self, text: Forced, reference: np.ndarray, found: np.ndarray, tokenizer: Tokenizer) -> None:
        """Take the logits [n, V] of both for a conversation."""
        expected = np.asarray(text.token_ids)[text.places]
        one, other = log_probabilities(reference), log_probabilities(found)
        self.divergences.append((np.exp(one) * (one - other)).sum(1))
        best, own = reference.argmax(1), found.argmax(1)
        second, first = np.partition(reference, -2)[:, -2:].T
        margins = first - second
        self.close += int((margins < 0.5).sum())
        for row in np.flatnonzero(best != own):
            names = (tokenizer.id_to_token(int(ids[row])) for ids in (best, own))
            pair = dict(zip(("reference", "found"), names, strict=True))
            self.differences.append({"margin": round(float(margins[row]), 3), **pair})
        start = 0
        for answer in text.answers:
            part = slice(start, start + len(answer))
            self.right.append(bool((own[part] == expected[part]).all()))
            self.reference_right.append(bool((best[part] == expected[part]).all()))
            start = part.stop

    def results(self) -> dict[str, Any]:
        """The measures, percentages of answers and of tokens."""
        divergences = np.concatenate(self.divergences)
        tokens = len(divergences)
        return {
            "answers": len(self.right),
            "tokens": tokens,
            "exact_match_percent": round(100 * float(np.mean(self.right)), 3),
            "exact_match_percent_of_reference": round(100 * float(np.mean(self.reference_right)), 3),
            "equal_tokens_percent": round(100 - 100 * len(self.differences) / tokens, 4),
            "mean_kl": float(f"{divergences.mean():.4g}"),
            "percentile_99_kl": float(f"{np.percentile(divergences, 99):.4g}"),
            "largest_kl": float(f"{divergences.max():.4g}"),
            "tokens_with_margin_below_half": self.close,
            "differences": sorted(self.differences, key=lambda each: -each["margin"]),
        }


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """Of every token, float64 [n, V]."""
    values = logits.astype(np.float64)
    values -= values.max(1, keepdims=True)
    return values - np.log(np.exp(values).sum(1, keepdims=True))


def open_model(directory: Path) -> Model:
    """A checkpoint, dense or packed."""
    with Checkpoint.open(directory) as checkpoint:
        config = decoder_config(checkpoint.config, checkpoint.generation_config, dtype=checkpoint.dtype)
        return Model(config, load_numpy_weights(checkpoint, decoder_weights(config)))


def with_layers_of(file: Path, model: Model) -> Model:
    """The model with the layers' linear layers of a GGUF file that another program made of it."""
    with checkpoint_folder(file) as folder:
        layers = {name: weight for name, weight in open_model(folder).weights.items() if name.endswith(LAYERS)}
    return Model(model.config, {**model.weights, **layers})


def rounded_model(model: Model, format: WeightFormat) -> Model:
    """The model with the weights of its layers' linear layers rounded to nearest."""
    weights = {
        name: plainly_rounded(weight, format) if name.endswith(LAYERS) else weight
        for name, weight in model.weights.items()
    }
    return Model(model.config, weights)


def quantized(directory: Path, options: QuantizationOptions, texts: Sequence[Sequence[int]]) -> Model:
    """The model of a checkpoint after `edgellm quantize`."""
    with TemporaryDirectory() as folder:
        quantize_checkpoint(directory, Path(folder) / "quantized", options, texts)
        return open_model(Path(folder) / "quantized")


def measure(
    reference: Model,
    models: Mapping[str, tuple[Model, int]],
    conversations: Sequence[Forced],
    tokenizer: Tokenizer,
    progress: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """The results of each model by its name, over at most as many answers as stand beside it; `progress` gets those so
    far."""
    measured = {name: Measured() for name in models}
    for number, text in enumerate(conversations, 1):
        expected = reference.logits(text)
        for name, (model, most) in models.items():
            if len(measured[name].right) < most:
                measured[name].add(text, expected, model.logits(text), tokenizer)
        if number % _BETWEEN_REPORTS == 0:
            progress({name: each.results() for name, each in measured.items()})
    return {name: each.results() for name, each in measured.items()}


def lines(found: Mapping[str, Any]) -> list[str]:
    """The results as a Markdown table."""
    titles = "answers|exact match|the reference's|tokens|equal tokens|mean KL|KL, 99 % below|margins where not equal"
    table = [f"| way | {' | '.join(titles.split('|'))} |", "|---" + "|---:" * 7 + "|---|"]
    for name, each in found.items():
        margins = ", ".join(f"{difference['margin']:.2f}" for difference in each["differences"]) or "none"
        shares = [f"{each[key]:.2f} %" for key in ("exact_match_percent", "exact_match_percent_of_reference")]
        equal = [f"{each['equal_tokens_percent']:.3f} %", f"{each['mean_kl']:.2g}", f"{each['percentile_99_kl']:.2g}"]
        table.append(f"| {' | '.join((name, str(each['answers']), *shares, str(each['tokens']), *equal, margins))} |")
    return table


def way_of(names: Sequence[str]) -> Callable[[str], str]:
    """A type of arguments: one of the names, or a GGUF file."""

    def way(text: str) -> str:
        if text in names or text.endswith(".gguf"):
            return text
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}, and no GGUF file")

    return way


def main() -> None:
    """Print a table and the results as JSON."""
    names = [*PLAIN, *QUANTIZED, *(name + OWN_TEXTS for name in QUANTIZED), KV_CACHE]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=SHIPPED, help="checkpoint (default: the shipped one)")
    parser.add_argument("--answers", type=int, default=5000)
    parser.add_argument("--fewer", type=int, default=300, help=f"answers for all but {'; '.join(MAIN)}")
    help = f"of {names}, or a GGUF file that another program made of the checkpoint"
    parser.add_argument("--ways", nargs="*", type=way_of(names), default=names, metavar="NAME", help=help)
    parser.add_argument("--calibration", type=Path, help="as edgellm quantize takes it")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_directory(arguments.model)
    entries = load_texts(arguments.calibration) if arguments.calibration else default_texts()
    texts = token_pieces(tokenizer, entries)
    reference = open_model(arguments.model)
    models: dict[str, tuple[Model, int]] = {}
    for name in arguments.ways:
        most = arguments.answers if name in MAIN else arguments.fewer
        if name.endswith(".gguf"):
            models[Path(name).name] = with_layers_of(Path(name), reference), most
        elif name in PLAIN:
            models[name] = rounded_model(reference, PLAIN[name]), most
        elif name != KV_CACHE:
            options = QUANTIZED[name.removesuffix(OWN_TEXTS)]
            read = own_texts(tokenizer) if name.endswith(OWN_TEXTS) else texts
            models[name] = quantized(arguments.model, options, read), most
        else:
            models[name] = Model(reference.config, reference.weights, "int8"), most
    conversations = forced_conversations(tokenizer, arguments.seed, arguments.answers)
    started = time.perf_counter()

    def show(found: dict[str, Any]) -> None:
        made = {"calibration_tokens": sum(map(len, texts)), "seconds": round(time.perf_counter() - started)}
        print("\n".join(lines(found)), flush=True)
        report(provenance() | made | {"ways": found}, arguments.output)

    show(measure(reference, models, conversations, tokenizer, show))


if __name__ == "__main__":
    main()
