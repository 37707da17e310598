"""What a packed head changes: teacher-forced greedy tokens of a model, on NumPy.

Usage: python -m tools.bench.head_quality [--model DIR] [--heads int8 int4 ...] [--items 20] [--output FILE]

The layers run once, in float32; each head then gives its logits of the same hidden states, but for heads in which
tokens are looked up, too ("+embedding"), whose layers run anew. Texts are conversations of the shipped model's
evaluation with the right answers, `--items` of each skill, and the calibration texts that ship. Printed are the squared
error of the head, the KL divergence and the share of tokens whose greedy choice changes: of answers, which the model
writes; of what stands before them, which it only reads; of the texts. Each change has the margin that the published
head gave its best token. The bars: at most 0.5 % of tokens change, none of a margin above 0.5.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.commands.quantize import default_texts, token_pieces
from edgellm.engines.backends.numpy_backend import one_blas_thread
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.checkpoints.weights import load_numpy_weights
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.decoder import decoder_program, embedding_name, head_weight_name
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.steps import NormLinear
from edgellm.engines.quantizer.calibration import CalibrationRows, layer_program
from edgellm.text.tokenizer import Tokenizer
from tools.demo_model.evaluate import evaluation_items

SHIPPED = Path(__file__).parents[2] / "edgellm" / "shipped"
SEED = 7
MARGIN_BAR, SHARE_BAR = 0.5, 0.005
#: What a token that follows belongs to.
KINDS = ("prompts", "answers", "texts")
#: Rows whose logits are computed at a time.
_ROWS = 512


def main() -> None:
    """Print a table for each head, and write all changes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=SHIPPED)
    parser.add_argument("--heads", nargs="+", default=["int8", "int4", "int8+embedding", "int4+embedding"])
    parser.add_argument("--items", type=int, default=20)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    started, tokenizer = time.time(), Tokenizer.from_directory(arguments.model)
    texts, kinds = held_texts(tokenizer, arguments.items)
    results: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python -m tools.bench.head_quality {' '.join(sys.argv[1:])}".strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} processors, NumPy {np.__version__}",
        "tokens": len(kinds),
        "heads": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        reference = hidden_rows(built(arguments.model, Path(folder, "published"), "as-published"), texts)
        for kind in arguments.heads:
            directory = built(arguments.model, Path(folder, kind), kind)
            own = hidden_rows(directory, texts if directory.config.embeds_by_head else [])
            own = own if directory.config.embeds_by_head else (reference[0], own[1])
            found = differences(reference, own, kinds)
            error = np.square(own[1] - reference[1], dtype=np.float64).sum() / np.square(reference[1]).sum(None, float)
            results["heads"][kind] = {"squared_error": float(error)} | found
            report(kind, float(error), found)
    results["seconds"] = round(time.time() - started, 1)
    print(f"{results['tokens']:,} tokens, {results['seconds']} s")
    if arguments.output:
        text = json.dumps(results, indent=1)  # lists of numbers in a line each
        text = re.sub(r"\[[\d\s.,]*\]", lambda match: " ".join(match[0].split()), text)
        arguments.output.write_text(text + "\n")


def built(model: Path, target: Path, kind: str) -> EngineDirectory:
    """An engine directory with a head of a kind, as the arguments name it."""
    head, _, embedding = kind.partition("+")
    where = "head" if embedding else "as-published"
    build_engine_directory(model, target, head=head, embedding=where)
    return EngineDirectory.open(target)


def held_texts(tokenizer: Tokenizer, items: int) -> tuple[list[list[int]], np.ndarray]:
    """Token ids of all texts, and of each token what the next one belongs to, by its place in `KINDS`, -1 the last."""
    texts, kinds = [], []
    for item in evaluation_items(SEED, items):
        prompt = tokenizer.encode_chat(item["messages"], add_generation_prompt=True)
        answer = {"role": "assistant", "content": item["accepted"][0]}
        texts.append(tokenizer.encode_chat([*item["messages"], answer], add_generation_prompt=False))
        own = np.full(len(texts[-1]), KINDS.index("prompts"))
        own[len(prompt) - 1 :] = KINDS.index("answers")
        kinds.append(own)
    for piece in token_pieces(tokenizer, default_texts()):
        texts.append(list(piece))
        kinds.append(np.full(len(piece), KINDS.index("texts")))
    for each in kinds:
        each[-1] = -1
    return texts, np.concatenate(kinds)


def hidden_rows(directory: EngineDirectory, texts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """What the head takes at every token of the texts [N, H] float32, and the head [V, H]."""
    config = directory.config
    last = decoder_program(config, EngineShape("prefill", 1, 1, 1, 1)).steps[-1]
    assert isinstance(last, NormLinear)
    with closing(directory.checkpoint()) as checkpoint:
        loaded = load_numpy_weights(checkpoint, list(last.weights))
        head, norm = loaded[head_weight_name(config)], last.inputs[0].norms[0]
        if not texts:
            return np.empty((0, config.hidden_size), np.float32), head
        layers = [layer_program(config, index, 1) for index in range(config.num_layers)]
        weights = [load_numpy_weights(checkpoint, list(layer.weights.values())) for layer in layers]

        def passed(part: list[list[int]]) -> list[np.ndarray]:
            rows = CalibrationRows(config, checkpoint, part, None)
            if embedding_name(config) == head_weight_name(config):
                rows.texts = [head[np.asarray(text)] * np.float32(config.embedding_scale) for text in part]
            for index, own in enumerate(weights):
                rows.pass_layer(index, own)
            return rows.texts

        with one_blas_thread(), ThreadPoolExecutor(os.cpu_count()) as pool:
            found = [rows for part in pool.map(passed, [[text] for text in texts]) for rows in part]
    values = np.concatenate(found)
    values /= np.sqrt(np.square(values).mean(-1, keepdims=True) + np.float32(norm.epsilon))
    return values * (loaded[norm.weight.name] + np.float32(norm.offset)), head


def differences(
    reference: tuple[np.ndarray, np.ndarray], model: tuple[np.ndarray, np.ndarray], kinds: np.ndarray
) -> dict[str, Any]:
    """Of each kind of tokens: how many there are, how many of them the model (hidden states [N, H], head [V, H])
    chooses otherwise than the reference, the reference's margins there, falling, and the mean KL divergence in nats."""

    def compare(start: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(start, start + _ROWS)
        expected, found = reference[0][rows] @ reference[1].T, model[0][rows] @ model[1].T
        best = np.partition(expected, -2, axis=-1)[:, -2:]
        same = expected.argmax(-1) == found.argmax(-1)
        return np.where(same, -1, best[:, 1] - best[:, 0]), kl_divergence(expected, found)

    with one_blas_thread(), ThreadPoolExecutor(os.cpu_count()) as pool:
        compared = list(pool.map(compare, range(0, len(kinds), _ROWS)))
    margins, divergence = (np.concatenate(each) for each in zip(*compared, strict=True))
    result = {}
    for number, name in enumerate(KINDS):
        own = kinds == number
        changed = sorted((round(float(each), 4) for each in margins[own] if each >= 0), reverse=True)
        count, mean = int(own.sum()), float(divergence[own].mean())
        result[name] = {"tokens": count, "changed": len(changed), "mean_kl": mean, "margins": changed}
    return result


def kl_divergence(expected: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Of the distributions of logits [R, V] each, [R] in nats."""
    logs = [each - each.max(-1, keepdims=True) for each in (expected, found)]
    logs = [each - np.log(np.exp(each).sum(-1, keepdims=True)) for each in logs]
    return (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1)


def report(kind: str, error: float, found: dict[str, Any]) -> None:
    """Print what a head changes, and whether it is within the bars."""
    print(f"{kind}: squared error of the head {error:.2e}")
    for name, own in found.items():
        margins: Sequence[float] = own["margins"]
        good = len(margins) <= SHARE_BAR * own["tokens"] and max(margins, default=0) <= MARGIN_BAR
        print(
            f"  {name:<8}{len(margins):>6,} of {own['tokens']:>8,} changed, {len(margins) / own['tokens']:.3%}, mean "
            f"KL {own['mean_kl']:.2e}, largest margins {', '.join(f'{each:.3f}' for each in margins[:5]) or 'none'}: "
            f"{'within' if good else 'beyond'} the bars"
        )


if __name__ == "__main__":
    main()
