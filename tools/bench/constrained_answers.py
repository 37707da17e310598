"""Constrained answers: whether each is valid by an independent judge, and the same drafted as decoded plainly.

    python -m tools.bench.constrained_answers [--backend numpy] [--answers 2000] [--prompts 200]
                                              [--ways chain tree ...] [--samplings greedy ...] [--output RESULTS.json]

Two models answer: the one that ships, and a tiny one with random weights at temperature 1.5, which thinks first in
every third answer and is made to end that soon. What is asked for takes turns: enums, bounded numbers, arrays of fixed
length, nesting, `oneOf` with disjoint alternatives, patterns, Unicode. Half of `--answers` come from each, in batches,
decoded plainly, drafted as a chain and as a tree in turns. Answers that are complete are parsed and given to
`jsonschema`; no others are parsed.

Then the same `--prompts` are answered plainly one by one, and in each of the `--ways` alone and in batches, greedily
and sampled, by the model that ships. On NumPy no answer may differ; on a GPU a tenth of them, where rounding decides,
as for unconstrained answers (`drafting_equality`). Exits with 1 where any of this is not so.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from edgellm import Request, Response, SamplingParams, SpecDecodeRuntime, Structure
from edgellm.drafting.config import DraftingConfig
from edgellm.drafting.drafter import Policy
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.comparison import open_runner, teacher_forced_logits
from edgellm.engines.speculation.constraints import allows, mask_words
from edgellm.opened_model import SHIPPED_MODEL
from edgellm.structure.answers import RuleMaker
from edgellm.text.tokenizer import Tokenizer
from tools.bench.as_device import parse
from tools.bench.differences import SAMPLINGS, Difference, difference
from tools.bench.drafting_equality import held_out_prompts
from tools.bench.provenance import provenance
from tools.bench.random_checkpoint import write_checkpoint
from tools.bench.random_draft import write_draft

#: How answers are drafted; "forced" takes the tokens that rules leave no choice of, as a model without a draft does;
#: "both" takes these, what was said before, and the draft model's trees in turns, as they pay.
WAYS: dict[str, DraftingConfig | None] = {
    "chain": DraftingConfig(kind="chain", draft_steps=5),
    "tree": DraftingConfig(10, 3, 16),
    "suffix": DraftingConfig(kind="suffix"),
    "forced": None,
    "both": DraftingConfig(10, 3, 16, suffix_decoding=True),
}
#: Prompts in chunks that kernels take: no plans are built for them.
LIMITS = EngineLimits(4, 16, 1024, draft_top_k=10, draft_steps=5, verify_tree_size=16)
_TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "torch_dtype": "float16",
    "bos_token_id": 256,
    "eos_token_id": 257,
}
_TEXTS = ("caf\u00e9", "\u96ea\u3060\u308b\u307e", 'a"b\\c', "\U0001f916 robot", "\u0645\u0631\u062d\u0628\u0627", "x")


def schema(number: int) -> dict[str, Any]:
    """What is asked for, of this number: the kinds take turns, their sizes are random."""
    chosen = random.Random(number)
    low, high = sorted(chosen.sample(range(-60, 200), 2))

    def of(properties: dict[str, Any]) -> dict[str, Any]:
        return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}

    enum = {"enum": chosen.sample([*_TEXTS, 3, -2.5, None, True, [1, "a"], {"k": 0}], chosen.randint(1, 6))}
    integer = {"type": "integer", "minimum": low, "maximum": high}
    bounded = {"type": "number", "minimum": low / 8, "exclusiveMaximum": high / 8}
    size = chosen.randint(1, 4)
    fixed = {"type": "array", "items": chosen.choice([integer, enum]), "minItems": size, "maxItems": size}
    text = {"type": "string", "minLength": chosen.randrange(3), "maxLength": chosen.randint(3, 12)}
    pattern = {
        "type": "string",
        "pattern": chosen.choice(["^[A-Z]{2}-[0-9]{1,3}$", "^(left|right) (arm|leg)$", "^\u00e9+x?$"]),
    }
    either = {"oneOf": [{"const": "none"}, integer, of({"at": integer}), {"type": "boolean"}]}
    kinds = [
        of({"action": {"enum": ["go", "stop", "wave"]}, "to": integer}),
        enum,
        {"type": "array", "items": integer, "minItems": size, "maxItems": size},
        of({"a": of({"b": of({"c": enum}), "d": fixed}), "e": integer}),
        either,
        of({"id": pattern, "name": text}),
        of({_TEXTS[number % 5]: {"enum": [*_TEXTS[:3]]}, "note": text}),
        of({"speed": bounded, "pose": fixed}),
    ]
    return kinds[number % len(kinds)]


def pair(number: int) -> dict[str, Any]:
    """Two of them in one, so that answers are longer."""
    properties = {"first": schema(number), "second": schema(number + 3)}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


@dataclass
class Validity:
    """What became of constrained answers; `wrong` says what was not as it should be."""

    answers: int = 0
    complete: int = 0
    reasoned: int = 0
    exceptions: int = 0
    wrong: list[str] = field(default_factory=list)

    def judge(self, number: int, response: Response | Exception) -> None:
        """Take note of an answer to the schema of that number."""
        self.answers += 1
        if not isinstance(response, Response):
            self.exceptions += 1
            self.wrong.append(f"{number}: {type(response).__name__}: {response}")
            return
        self.reasoned += bool(response.structured_from)
        if not response.structure_complete:
            ended = response.finish_reason in ("length", "context") or response.structured_from is None
            if not ended or response.parsed is not None:  # reasoning may end the answer, rules come behind it
                self.wrong.append(f"{number}: {response.finish_reason} with {response.text!r}")
            return
        self.complete += 1
        text = response.text[response.structured_from :]
        try:
            value = json.loads(text)
            jsonschema.validate(value, schema(number))
            if value != response.parsed:
                self.wrong.append(f"{number}: {response.parsed!r} for {text!r}")
        except (ValueError, jsonschema.ValidationError) as error:
            self.wrong.append(f"{number}: {text!r}: {str(error).splitlines()[0]}")

    @property
    def holds(self) -> bool:
        """Whether all complete ones are valid, none failed, and most were complete."""
        return not self.wrong and not self.exceptions and self.complete > 0.7 * self.answers


@dataclass(frozen=True)
class Equality:
    """Answers of one way against those decoded plainly."""

    way: str
    sampling: str
    batch: int
    prompts: int
    tokens: int
    differences: list[Difference]

    @property
    def explained(self) -> bool:
        """Whether rounding explains every difference."""
        return all(difference.gap < difference.allowed for difference in self.differences)


def use(runtime: SpecDecodeRuntime, way: str) -> None:
    """Draft in one of `WAYS`; "plain" proposes nothing at all."""
    runtime.use_drafting(WAYS.get(way))
    if way in ("plain", "chain", "tree"):
        runtime._drafters.drafter = Policy()


def validity_of(
    runtime: SpecDecodeRuntime, prompts: Sequence[Sequence[int]], answers: int, temperature: float, thinks: bool
) -> Validity:
    """Ask for so many answers in batches, decoded in all ways in turns."""
    found, ways = Validity(), ["plain", *WAYS]
    biases = {runtime.tokenizer.token_to_id("</think>"): 6.0} if thinks else {}
    begin = [runtime.tokenizer.token_to_id("<think>")] if thinks else []
    for first in range(0, answers, 40):
        use(runtime, ways[first // 40 % len(ways)])
        numbers, requests = range(first, min(first + 40, answers)), []
        for number in numbers:
            reasons = thinks and number % 3 == 0
            params = SamplingParams(
                temperature=temperature if number % 4 else 0.0,
                seed=number,
                max_tokens=200,
                structure=Structure(json=schema(number)),
                logit_bias=biases,
            )
            requests.append(Request([*prompts[number % len(prompts)], *(begin if reasons else [])], None, params))
        for number, response in zip(numbers, runtime.handle_request(requests), strict=True):
            found.judge(number, response)
    return found


def tiny_model(folder: Path, backend: str) -> Path:
    """An engine directory of a tiny model with random weights, which may think, and a draft for it."""
    base = folder / "base"
    write_checkpoint(base, _TINY)
    definition = json.loads((base / "tokenizer.json").read_text())
    texts = ["<s>", "</s>", "<think>", "</think>"]
    definition["added_tokens"] = [
        {"id": 256 + place, "content": text, "special": place < 2}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for place, text in enumerate(texts)
    ]
    (base / "tokenizer.json").write_text(json.dumps(definition))
    write_draft(folder / "head", _TINY, 200)
    targets = [] if backend == "numpy" else None
    build_engine_directory(base, folder / "engines", LIMITS, targets, draft=folder / "head")
    return folder / "engines"


def shipped_model(folder: Path, backend: str) -> Path:
    """An engine directory of the model that ships, and its draft."""
    targets = [] if backend == "numpy" else None
    build_engine_directory(SHIPPED_MODEL, folder, LIMITS, targets, draft=SHIPPED_MODEL / "draft")
    return folder


def validity(directory: Path, tiny: Path, backend: str, answers: int) -> dict[str, Validity]:
    """Half of the answers of the model that ships, half of the tiny one."""
    half = answers // 2
    prompts = held_out_prompts(EngineDirectory.open(directory), min(half, 200))
    with SpecDecodeRuntime(directory, drafting=WAYS["tree"], backend=backend) as runtime:
        found = {"shipped": validity_of(runtime, prompts, half, 0.8, False)}
    generator = np.random.default_rng(0)
    random_prompts = [generator.integers(0, 250, generator.integers(1, 40)).tolist() for _ in range(50)]
    with SpecDecodeRuntime(tiny, drafting=WAYS["tree"], backend=backend) as runtime:
        found["tiny, random"] = validity_of(runtime, random_prompts, answers - half, 1.5, True)
    return found


def equality(
    directory: Path, backend: str, count: int, ways: Sequence[str], samplings: Sequence[str]
) -> list[Equality]:
    """Each way and sampling, one prompt at a time and in batches, against plain decoding of one."""
    opened = EngineDirectory.open(directory)
    prompts, found = held_out_prompts(opened, count), []
    with SpecDecodeRuntime(directory, drafting=WAYS["tree"], backend=backend) as runtime:
        for sampling in samplings:
            requests = [
                Request(
                    prompt,
                    None,
                    SamplingParams(max_tokens=96, structure=Structure(json=pair(n)), **SAMPLINGS[sampling]),
                )
                for n, prompt in enumerate(prompts)
            ]
            use(runtime, "plain")
            expected = [runtime.handle_request(request).token_ids for request in requests]
            for way in ways:
                use(runtime, way)
                for batch in (1, opened.limits.max_batch):
                    if batch == 1:
                        answers = [runtime.handle_request(request).token_ids for request in requests]
                    else:
                        answers = [response.token_ids for response in runtime.handle_request(requests)]
                    judged = differences(opened, backend, requests, expected, answers)
                    total = sum(map(len, answers))
                    found.append(Equality(way, sampling, batch, count, total, judged))
                    print(line(found[-1]), flush=True)
    return found


def differences(
    directory: EngineDirectory,
    backend: str,
    requests: Sequence[Request],
    expected: Sequence[Sequence[int]],
    found: Sequence[Sequence[int]],
) -> list[Difference]:
    """The first difference of each answer that has one; logits are masked as those were that tokens were drawn from."""
    if list(map(tuple, expected)) == list(map(tuple, found)):
        return []
    judged = []
    width = directory.config.vocab_size
    maker = RuleMaker(Tokenizer.from_directory(directory.path, width), width, directory.config.eos_token_ids)
    with open_runner(backend, directory) as runner:

        def masked(request: Request, answer: Sequence[int]) -> np.ndarray:
            logits = teacher_forced_logits(runner, request.prompt, answer)[-1]
            rules, row = maker.rules(request.params, request.prompt), np.empty(mask_words(width), np.uint32)
            assert rules is not None and all(map(rules.constraint.try_advance, answer[:-1]))
            rules.constraint.fill_mask(row)
            logits[[token for token in range(width) if not allows(row, token)]] = -np.inf
            return logits

        for number, request in enumerate(requests):
            logits_of = lambda answer, request=request: masked(request, answer)  # noqa: E731
            pair = expected[number], found[number]
            each = difference(number, request.prompt, *pair, request.params, backend, directory.dtype, logits_of)
            judged += [] if each is None else [each]
    return judged


def line(comparison: Equality) -> str:
    """A line of the printed table."""
    gaps = ", ".join(f"{each.gap:.2g} of {each.allowed:.2g} allowed" for each in comparison.differences[:8])
    return (
        f"{comparison.way:8} {comparison.sampling:8} batch {comparison.batch}: {comparison.prompts} prompts, "
        f"{comparison.tokens} tokens, {len(comparison.differences)} differ{f' ({gaps})' if gaps else ''}"
    )


def main() -> None:
    """Ask, judge, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("numpy", "tensorrt"), default="numpy")
    parser.add_argument("--answers", type=int, default=2000)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--samplings", nargs="*", choices=list(SAMPLINGS), default=list(SAMPLINGS))
    parser.add_argument("--output", type=Path)
    arguments = parse(parser, times=False)
    with tempfile.TemporaryDirectory() as folder:
        directory = shipped_model(Path(folder) / "engines", arguments.backend)
        valid = {}
        if arguments.answers:
            tiny = tiny_model(Path(folder) / "tiny", arguments.backend)
            valid = validity(directory, tiny, arguments.backend, arguments.answers)
        for name, each in valid.items():
            print(
                f"{name}: {each.answers} answers, {each.complete} complete, {each.reasoned} behind reasoning, "
                f"{each.exceptions} exceptions, {len(each.wrong)} wrong {each.wrong[:5] or ''}",
                flush=True,
            )
        asked = arguments.prompts, arguments.ways, arguments.samplings
        equal = equality(directory, arguments.backend, *asked) if arguments.prompts else []
    most = max((len(each.differences) / each.prompts for each in equal), default=0.0)
    holds = all(each.holds for each in valid.values()) and all(each.explained for each in equal) and most <= 0
    print(f"at most {most:.1%} of the answers differ; {'all as it should be' if holds else 'NOT as it should be'}")
    if arguments.output:
        result = provenance() | {
            "backend": arguments.backend,
            "validity": {name: asdict(each) for name, each in valid.items()},
            "equality": [asdict(each) for each in equal],
            "holds": holds,
        }
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(not holds)


if __name__ == "__main__":
    main()
