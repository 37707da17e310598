"""Drafting against plain decoding, token for token: every deterministic kind, greedy and sampled, alone and in batches.

    python -m tools.bench.drafting_equality [--model ENGINE_DIR] [--backend numpy] [--prompts 200] [--tokens 128]
                                            [--samplings greedy sampled] [--kinds tree ...] [--until-end]
                                            [--kv-cache int8] [--weights int4] [--processes 1] [--output RESULTS.json]

The prompts are held-out conversations of the shipped model. Answers go on behind the end of the turn, where the model
means nothing by its tokens and the likeliest are close, unless `--until-end` is given. Several processes take a share
of the prompts each. Where an answer differs, the first difference is judged: `gap` is how far plain decoding was from
drawing the other token. Exits with 1 where a gap is larger than rounding explains: 1e-4 on NumPy; on a GPU no answer
may differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from edgellm import LLM, Request
from edgellm.drafting.config import DraftingConfig
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import KV_CACHES, EngineLimits
from edgellm.engines.runners.comparison import open_runner, teacher_forced_logits
from edgellm.opened_model import SHIPPED_MODEL
from edgellm.text.tokenizer import Tokenizer
from tools.bench.as_device import enter, measured_as, parse
from tools.bench.differences import SAMPLINGS, Difference, difference, parameters
from tools.bench.draw_comparison import first_difference
from tools.bench.held_out_prompts import held_out_conversations
from tools.bench.provenance import provenance
from tools.bench.quantized_model import WEIGHTS, base_of

LIMITS = EngineLimits(
    max_batch=4, prefill_chunk=128, kv_capacity=1024, draft_top_k=10, draft_steps=6, verify_tree_size=64
)
KINDS = {
    "chain 5": DraftingConfig(kind="chain", draft_steps=5),
    "chain 2": DraftingConfig(kind="chain", draft_steps=2),
    "tree 10/6/60": DraftingConfig(10, 6, 60),
    "tree 10/3/16": DraftingConfig(10, 3, 16),
    "eagle_25": DraftingConfig(kind="choices", choices="eagle_25"),
    "mc_sim_7b_63": DraftingConfig(kind="choices", choices="mc_sim_7b_63"),
}


@dataclass(frozen=True)
class Comparison:
    """All answers of one configuration against plain decoding's."""

    kind: str
    sampling: str
    batch: int
    prompts: int
    tokens: int
    differences: list[Difference]
    rounds: int
    accepted: int
    seconds: float

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens of a round, the bonus token included."""
        return 1 + self.accepted / max(self.rounds, 1)

    @property
    def explained(self) -> bool:
        """Whether rounding explains every difference."""
        return all(difference.gap < difference.allowed for difference in self.differences)


def held_out_prompts(directory: EngineDirectory, count: int) -> list[list[int]]:
    """Token ids of `count` conversations that training never saw, all skills in turn."""
    tokenizer = Tokenizer.from_directory(directory.path)
    return [tokenizer.encode_chat(messages) for messages in held_out_conversations(count)]


def compare(
    directory: EngineDirectory,
    backend: str,
    prompts: Sequence[list[int]],
    tokens: int,
    kinds: Sequence[str],
    samplings: Sequence[str],
    batches: Sequence[int] = (1, LIMITS.max_batch),
    until_end: bool = False,
) -> list[Comparison]:
    """Compare each kind and sampling, one prompt at a time and in batches of changing members."""
    with LLM(directory.path, backend=backend, drafting=None) as plain:
        expected = {
            name: [plain.generate(prompt, parameters(name, tokens, until_end)).token_ids for prompt in prompts]
            for name in samplings
        }
    found = []
    with LLM(directory.path, backend=backend, drafting=KINDS[kinds[0]]) as drafted:
        for kind in kinds:
            drafted.use_drafting(KINDS[kind])
            for name in samplings:
                for batch in batches:
                    params, started = parameters(name, tokens, until_end), time.perf_counter()
                    if batch == 1:
                        responses = [drafted.generate(prompt, params) for prompt in prompts]
                    else:
                        responses = drafted.handle([Request(prompt, None, params) for prompt in prompts])
                    seconds = time.perf_counter() - started
                    rounds = sum(response.drafting.rounds for response in responses)
                    accepted = sum(response.drafting.accepted_tokens for response in responses)
                    answers = [response.token_ids for response in responses]
                    differences = judged(directory, backend, prompts, expected[name], answers, name)
                    total = sum(map(len, answers))
                    found.append(
                        Comparison(
                            kind, name, batch, len(prompts), total, differences, rounds, accepted, round(seconds, 1)
                        )
                    )
    return found


def compare_shares(
    directory: EngineDirectory, backend: str, prompts: Sequence[list[int]], processes: int, **options: Any
) -> list[Comparison]:
    """`compare`, the prompts divided among processes; `seconds` are those of all processes together."""
    shares = [range(first, len(prompts), processes) for first in range(processes)]
    with ProcessPoolExecutor(processes, get_context("spawn"), enter, (measured_as(),)) as pool:
        parts = [
            pool.submit(compare, directory, backend, [prompts[index] for index in share], **options) for share in shares
        ]
        results = [part.result() for part in parts]
    return [joined(list(same), shares) for same in zip(*results, strict=True)]


def joined(parts: Sequence[Comparison], shares: Sequence[range]) -> Comparison:
    """One comparison of several whose prompts have the places `shares` among all."""
    differences = [
        replace(difference, prompt=share[difference.prompt])
        for part, share in zip(parts, shares, strict=True)
        for difference in part.differences
    ]
    counted = ("prompts", "tokens", "rounds", "accepted", "seconds")
    return replace(
        parts[0], differences=differences, **{name: sum(getattr(part, name) for part in parts) for name in counted}
    )


def judged(
    directory: EngineDirectory,
    backend: str,
    prompts: Sequence[list[int]],
    expected: Sequence[Sequence[int]],
    found: Sequence[Sequence[int]],
    sampling: str,
) -> list[Difference]:
    """The first difference of each answer that has one."""
    differing = [
        index for index, pair in enumerate(zip(expected, found, strict=True)) if first_difference(*pair) is not None
    ]
    if not differing:
        return []
    with open_runner(backend, directory) as runner:
        judgements = [
            difference(
                index,
                prompts[index],
                expected[index],
                found[index],
                parameters(sampling, 1),
                backend,
                directory.dtype,
                lambda answer, prompt=prompts[index]: teacher_forced_logits(runner, prompt, answer)[-1],
            )
            for index in differing
        ]
    return [each for each in judgements if each is not None]


def line(comparison: Comparison) -> str:
    """A line of the printed table."""
    gaps = ", ".join(f"{d.gap:.2g} of {d.allowed:.2g} allowed" for d in comparison.differences)
    return (
        f"{comparison.kind:14} {comparison.sampling:8} batch {comparison.batch}: {comparison.prompts} prompts, "
        f"{comparison.tokens} tokens, {len(comparison.differences)} differ{f' ({gaps})' if gaps else ''}; "
        f"mean acceptance length {comparison.mean_acceptance_length:.2f}, {comparison.seconds:.0f} s"
    )


def build(
    model: Path, target: Path, backend: str, kv_cache: str = KV_CACHES[0], weights: str = WEIGHTS[0]
) -> EngineDirectory:
    """An engine directory of the model with layers of `weights` and its draft, with slots for batches."""
    targets, base = [] if backend == "numpy" else None, base_of(model, weights, target.parent)
    build_engine_directory(base, target, replace(LIMITS, kv_cache=kv_cache), targets, draft=model / "draft")
    return EngineDirectory.open(target)


def main() -> None:
    """Compare, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SHIPPED_MODEL, help="a directory with a model and its draft/")
    parser.add_argument("--backend", choices=("numpy", "tensorrt"), default="numpy")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--samplings", nargs="+", choices=list(SAMPLINGS), default=list(SAMPLINGS))
    parser.add_argument("--kv-cache", choices=KV_CACHES, default="compute")
    parser.add_argument("--weights", choices=WEIGHTS, default=WEIGHTS[0], help="of the base's layers")
    parser.add_argument("--until-end", action="store_true", help="stop answers at the end of the turn")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--output", type=Path)
    arguments = parse(parser, times=False)
    with tempfile.TemporaryDirectory() as folder:
        kinds = arguments.backend, arguments.kv_cache, arguments.weights
        directory = build(arguments.model, Path(folder) / "engines", *kinds)
        prompts = held_out_prompts(directory, arguments.prompts)
        found = compare_shares(
            directory,
            arguments.backend,
            prompts,
            arguments.processes,
            tokens=arguments.tokens,
            kinds=arguments.kinds,
            samplings=arguments.samplings,
            until_end=arguments.until_end,
        )
    for comparison in found:
        print(line(comparison))
    explained = all(comparison.explained for comparison in found)
    print("every difference is explained by rounding" if explained else "some differences are not explained")
    most = max(len(comparison.differences) / comparison.prompts for comparison in found)
    print(f"at most {most:.1%} of the answers differ")
    if arguments.output:
        result = provenance() | {
            "backend": arguments.backend,
            "kv_cache": arguments.kv_cache,
            "weights": arguments.weights,
            "prompts": arguments.prompts,
            "tokens": arguments.tokens,
            "until_end": arguments.until_end,
            "explained": explained,
            "most_that_differ": most,
            "comparisons": [
                asdict(comparison) | {"mean_acceptance_length": round(comparison.mean_acceptance_length, 3)}
                for comparison in found
            ],
        }
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(not explained)


if __name__ == "__main__":
    main()
