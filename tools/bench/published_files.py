"""Which of many published sets of small files are read, and why others are not.

    python tools/bench/published_files.py SETS [--output RESULTS.json]

SETS is a folder of folders, each named by where it is from, with what it has of config.json, generation_config.json,
tokenizer.json, tokenizer_config.json, special_tokens_map.json and a chat template. Each is read by the functions that a
start and `edgellm build` read them by: the tokenizer encodes and decodes a text, the template renders conversations.
Where a set has no tokenizer.json, one of bytes stands in that has the tokens which tokenizer_config.json names; where
it has neither, usual ones.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers

sys.path.insert(0, str(Path(__file__).parent))
from provenance import provenance, report

from edgellm.defaults import ModelDefaults
from edgellm.engines.errors import CheckpointError
from edgellm.engines.families import decoder_config
from edgellm.engines.quantization.config import read_quantization
from edgellm.errors import EdgeLLMError
from edgellm.text.template import TRIAL_TOKENS
from edgellm.text.template_trials import TOOL
from edgellm.text.tokenizer import Tokenizer, read_json_object
from edgellm.tool_calls.calling import ToolCalling

TEXT = "The red cup is on the table.\n\tÀ bientôt, 4 + 4 = 8!"
USER, ANSWER = {"role": "user", "content": TEXT}, {"role": "assistant", "content": "Yes."}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "a message": ([USER], None),
    "a system message": ([{"role": "system", "content": "Be brief."}, USER], None),
    "turns": ([USER, ANSWER, USER], None),
    "tools": ([USER], [TOOL]),
}


def main() -> None:
    """Read every set, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", type=Path)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    found = {folder.name: read_set(folder) for folder in sorted(arguments.sets.iterdir()) if folder.is_dir()}
    counts = Counter(f"{part}: {came.split(':')[0]}" for parts in found.values() for part, came in parts.items())
    refused = {name: {part: came for part, came in parts.items() if is_refusal(came)} for name, parts in found.items()}
    refused = {name: parts for name, parts in refused.items() if parts}
    counts["sets without a refusal"] = len(found) - len(refused)
    results = {"sets": len(found), "counts": dict(sorted(counts.items())), "refused": refused}
    report(provenance() | results, arguments.output)


def is_refusal(came: str) -> bool:
    """Whether `said` said so."""
    return came.startswith(("refused", "FAILED"))


def read_set(folder: Path) -> dict[str, str]:
    """By part what came of it: "read", or "refused: ..." and why."""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "set"
        shutil.copytree(folder, copy)
        found = {}
        if not (copy / "tokenizer.json").exists():
            stand_in(copy)
            found["stand-in for tokenizer.json"] = "used"
        parts: dict[str, Callable[[], Any]] = {
            "config.json": lambda: read_config(copy),
            "generation_config.json": lambda: ModelDefaults(copy).params,
            "tokenizer_config.json": lambda: read_tokenizer(copy),
        }
        found |= {name: said(copy, read) for name, read in parts.items() if (copy / name).exists()}
        try:
            tokenizer = Tokenizer.from_directory(copy)
        except EdgeLLMError:
            tokenizer = None
        if tokenizer is not None and tokenizer.chat_template is not None:
            known = tokenizer.chat_template
            found["tool format"] = said(copy, lambda: ToolCalling(tokenizer).format(), lambda form: form and form.name)
            for name, (messages, tools) in CONVERSATIONS.items():
                if tools is None or "tools" in known.template_variables():
                    found[f"template, {name}"] = said(copy, partial(tokenizer.encode_chat, messages, tools=tools))
    return found


def said(folder: Path, read: Callable[[], Any], show: Callable[[Any], str | None] = lambda value: "read") -> str:
    """What `read` came to; an exception that is none of ours is said by its type."""
    try:
        return show(read()) or "none known"
    except EdgeLLMError as error:
        reason = str(error).replace(f"{folder}/", "").partition("; supported are")[0]
        return f"refused: {reason:.160}"
    except Exception as error:
        return f"FAILED: {type(error).__name__}: {error}"


def read_config(folder: Path) -> None:
    """The model's dimensions and how it is packed."""
    values = read_json_object(folder / "config.json")
    generation = folder / "generation_config.json"
    read_quantization(folder, values)
    decoder_config(values, read_json_object(generation) if generation.exists() else None, "bfloat16")


def read_tokenizer(folder: Path) -> None:
    """The tokenizer, with a text there and back."""
    tokenizer = Tokenizer.from_directory(folder)
    if not tokenizer.decode(tokenizer.encode(TEXT)).strip():
        raise CheckpointError("a text becomes nothing")


def stand_in(folder: Path) -> None:
    """Write a tokenizer of bytes with the tokens that the other files name."""
    if not (folder / "tokenizer_config.json").exists():  # a template alone, which was not published so
        (folder / "tokenizer_config.json").write_text(json.dumps(TRIAL_TOKENS), encoding="utf-8")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({each: index for index, each in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    named: list[str] = []
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            values = read_json_object(folder / name)
        except EdgeLLMError:
            continue
        every = [*values.values(), *values.get("added_tokens_decoder", {}).values()]
        every = [each.get("content") if isinstance(each, dict) else each for each in every]
        named += [each for each in every if isinstance(each, str) and 0 < len(each) < 40 and each[0] in "<["]
    made.add_special_tokens(list(dict.fromkeys(named)))
    made.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    main()
