"""Shows that transformers and PEFT read what an engine directory keeps, and answer as EdgeLLM does.

    python -m tools.goldens.published_files [--output RESULTS.json]

Needs torch, transformers and peft. Every model of `tests/goldens/decoder`, those of `tests/goldens/image_prompts` and
the shipped one are built as `edgellm build` does, with the adapters that there are for them, the shipped one with its
draft head and vision encoder. Of each engine directory: the published files have the bytes that they had;
`transformers` loads it, from these files alone and with no weight missing or left over, and PEFT the adapters in it;
and both give the same greedy tokens in float32 as EdgeLLM on NumPy. The shipped model is asked through its own chat
template, with its tokenizer, in words and about an image. Draft heads are no models of transformers: their bytes are
compared alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import warnings
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoImageProcessor, AutoModelForCausalLM, AutoTokenizer, LlavaForConditionalGeneration

from edgellm import LLM, SamplingParams
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.inputs import read_decoder_config
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.opened_model import SHIPPED_MODEL

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))
from golden_files import golden_folder
from provenance import provenance, report

#: Rows of every tiny model, as many as the one with the least positions was made for: beyond these, frequencies that
#: follow the length (dynamic, LongRoPE) follow the capacity in EdgeLLM, and the sequence in transformers.
ROWS = 16
PROMPT, TINY_TOKENS, TOKENS = [5, 17, 42, 8, 63, 29, 11], 8, 16
QUESTIONS = ("Where is the red cup?", "How full is your battery?", "Please pick up the red cup.")
#: Files of a checkpoint which say nothing to EdgeLLM.
_LEFT_OUT = {"expected.safetensors"}


def main() -> None:
    """Print what was compared; the exit code is 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the results here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for source in sorted([path for kind in ("decoder", "image_prompts") for path in golden_folder(kind).iterdir()]):
            if source.is_dir():
                found[source.name] = tiny_model(source, Path(folder))
        found["shipped"] = shipped_model(Path(folder))
    packages = {name: version(name) for name in ("torch", "transformers", "peft", "tokenizers", "numpy")}
    report(provenance() | {"packages": packages, "models": found}, options.output)
    if not all(value for each in found.values() for value in each.values()):
        sys.exit(1)


def tiny_model(source: Path, folder: Path) -> dict[str, Any]:
    """What holds of a golden model and its adapters."""
    checkpoint, built = folder / source.name, folder / f"{source.name}-engines"
    shutil.copytree(source, checkpoint, ignore=lambda *_: _LEFT_OUT)
    config = read_decoder_config(checkpoint)
    words = {f"word{index}": index for index in range(config.vocab_size)}
    Tokenizer(models.WordLevel(words, unk_token="word0")).save(str(checkpoint / "tokenizer.json"))
    adapters = {path.name.partition(".")[2]: path for path in golden_folder("lora").glob(f"{source.name}.*")}
    limits = EngineLimits(1, 16, ROWS, **({"max_lora_rank": 16, "lora_slots": 1} if adapters else {}))
    build_engine_directory(checkpoint, built, limits, targets=[], dtype="float32", adapters=adapters)
    (name,) = json.loads((built / "config.json").read_text())["architectures"]
    load = getattr(transformers, name)
    model = loaded(load, built)
    holds: dict[str, Any] = {"unchanged": same_bytes(checkpoint, built)}
    with LLM(built, backend="numpy") as llm:
        holds["answers"] = greedy(model, PROMPT, TINY_TOKENS) == asked(llm, None)
        for name, path in adapters.items():
            holds[f"adapter {name}: unchanged"] = same_bytes(path, built / "lora" / name)
            adapted = loaded_adapter(loaded(load, built), built / "lora" / name)
            if isinstance(adapted, str):
                holds[f"adapter {name}: answers"] = f"not compared: {adapted}"
            else:
                holds[f"adapter {name}: answers"] = greedy(adapted, PROMPT, TINY_TOKENS) == asked(llm, name)
    return holds


def shipped_model(folder: Path) -> dict[str, Any]:
    """The same of the shipped model, with its parts, its chat template and an image."""
    built, parts = folder / "engines", {name: SHIPPED_MODEL / "lora" / name for name in ("json", "pirate")}
    limits = EngineDirectory.read(SHIPPED_MODEL).limits
    sources = {"draft": SHIPPED_MODEL / "draft", "vision": SHIPPED_MODEL / "vision"}
    build_engine_directory(SHIPPED_MODEL, built, limits, targets=[], adapters=parts, **sources)
    tokenizer, model = AutoTokenizer.from_pretrained(built), loaded(AutoModelForCausalLM, built)
    parts |= sources
    holds: dict[str, Any] = {"unchanged": same_bytes(SHIPPED_MODEL, built)}
    for name, path in parts.items():
        kept = built / name if name in sources else built / "lora" / name
        holds[f"{name}: unchanged"] = same_bytes(path, kept)
    with LLM(built, backend="numpy") as llm:
        system = {"role": "system", "content": (built / "system_prompt.txt").read_text().strip()}
        for adapter in (None, "json", "pirate"):
            if adapter is not None:
                model = PeftModel.from_pretrained(loaded(AutoModelForCausalLM, built), built / "lora" / adapter).eval()
            for question in QUESTIONS:
                messages = [system, {"role": "user", "content": question}]
                ids = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])
                answer = llm.chat(messages, SamplingParams(max_tokens=TOKENS, ignore_eos=True), adapter)
                expected = greedy(model, ids, TOKENS)
                holds[f"{adapter or 'base'}: {question}"] = expected == list(answer.token_ids) and answer.text == str(
                    tokenizer.decode(expected, skip_special_tokens=True)
                )
        holds["image"] = image_answer(llm, built)
    return holds


def image_answer(llm: LLM, built: Path) -> bool:
    """Whether transformers answers alike about an image, with the vision encoder that was published apart."""
    model, unread = LlavaForConditionalGeneration.from_pretrained(
        built / "vision", dtype=torch.float32, output_loading_info=True
    )
    base = load_file(built / "model.safetensors")
    assert {name.partition(".")[2].partition(".")[0] for name in unread["missing_keys"]} <= {"language_model", "weight"}
    assert not unread["unexpected_keys"], unread
    model.model.language_model.load_state_dict({name.removeprefix("model."): each for name, each in base.items()})
    model.tie_weights()
    image = Image.open(SHIPPED_MODEL / "scenes" / "toys.png").convert("RGB")
    system = {"role": "system", "content": (built / "system_prompt_image.txt").read_text().strip()}
    text = {"type": "text", "text": "What do you see?"}
    asked_here = [system, {"role": "user", "content": [{"type": "image", "image": image}, text]}]
    answer = llm.chat(asked_here, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    pixels = AutoImageProcessor.from_pretrained(built / "vision")(image, return_tensors="pt")["pixel_values"]
    asked_there = [system, {"role": "user", "content": [{"type": "image"}, text]}]
    tokenizer, marked = AutoTokenizer.from_pretrained(built), model.config.image_token_id
    ids = list(tokenizer.apply_chat_template(asked_there, add_generation_prompt=True)["input_ids"])
    place = ids.index(marked)  # one token, which stands for as many as the encoder has rows
    ids[place : place + 1] = [marked] * json.loads((built / "vision" / "config.json").read_text())["image_seq_length"]
    return greedy(model.eval(), ids, TOKENS, pixel_values=pixels) == list(answer.token_ids)


def loaded(kind: Any, built: Path) -> Any:
    """The model of an engine directory as transformers loads it; an assertion fails where weights do not fit."""
    model, unread = kind.from_pretrained(
        built, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(unread[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), (built, unread)
    return model.eval()


def loaded_adapter(model: Any, folder: Path) -> Any:
    """The model with an adapter as PEFT loads it; or why PEFT does not: some name modules as older releases of
    transformers did. (Modules of vision encoders, of which PEFT may miss weights, do nothing then.)"""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            adapted = PeftModel.from_pretrained(model, folder).eval()
        except ValueError as error:
            return f"PEFT refuses it: {error}"
    messages = [str(each.message) for each in told]
    missing = [key for each in messages if "missing adapter keys" in each for key in each.split("'")]
    if any("lora_" in key and ".visual." not in key for key in missing):
        return "PEFT finds no weights under the names that this release of transformers gives to modules"
    return adapted


def greedy(model: Any, ids: list[int], count: int, **inputs: Any) -> list[int]:
    """The likeliest tokens after a prompt, one after another, past ends of sequences; without a cache."""
    tokens = list(ids)
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([tokens]), use_cache=False, **inputs).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(ids) :]


def asked(llm: LLM, adapter: str | None) -> list[int]:
    """EdgeLLM's greedy tokens after the prompt."""
    return list(llm.generate(PROMPT, SamplingParams(max_tokens=TINY_TOKENS, ignore_eos=True), adapter).token_ids)


def same_bytes(source: Path, built: Path) -> bool:
    """Whether every file that an engine directory has of a checkpoint's is that file still, its weights among them."""
    kept = {path.name for path in built.iterdir() if path.is_file()} - {"edgellm.json"}
    assert any(name.endswith(".safetensors") for name in kept) and "config.json" in kept | {
        name.replace("adapter_", "") for name in kept
    }, kept
    return all(digest(source / name) == digest(built / name) for name in kept)


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    return sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
