"""Checkpoints and engine directories whose files are made to harm: refused in words, and nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch_pickles
from golden_files import golden_folder
from hostile_runs import Ended, HostileRuns

from edgellm.engines.building.inputs import read_decoder_config
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.errors import EdgeLLMError, EngineDirectoryError
from edgellm.opened_model import SHIPPED_MODEL

#: Files of a checkpoint that `build` reads or copies, and what its message names.
COPIED = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "system_prompt.txt",
    "preprocessor_config.json",
    "model.safetensors",
)


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


@pytest.fixture
def engines(tiny_draft_engines: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(tiny_draft_engines, tmp_path / "engines"))


@pytest.fixture
def build(hostile: HostileRuns, checkpoint: Path, tmp_path: Path) -> Callable[..., Ended]:
    """Builds from `checkpoint`, and sees that a refusal leaves nothing."""

    def run(*options: object) -> Ended:
        ended = hostile("build", checkpoint, tmp_path / "target", "--prefill-chunk", 16, *options)
        assert ended.code == 0 or sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]
        return ended

    return run


@pytest.mark.parametrize("name", COPIED)
def test_build_takes_ordinary_files_alone(build: Callable[..., Ended], checkpoint: Path, name: str) -> None:
    path = checkpoint / name
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")
    for kind in ("device", "pipe"):
        if kind == "pipe":
            path.unlink()
            os.mkfifo(path)
        message = build().refusal()
        assert name in message and (kind in message or "not a regular file" in message), message


def test_files_of_adapters_drafts_and_vision_encoders_are_ordinary(
    build: Callable[..., Ended], hostile: HostileRuns, tiny_draft: Path, tmp_path: Path, tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    draft = Path(shutil.copytree(tiny_draft, folder / "draft"))
    adapter, vision = folder / "adapter", folder / "vision"
    for part, name in ((draft, "config.json"), (adapter, "adapter_config.json"), (vision, "config.json")):
        part.mkdir(exist_ok=True)
        (part / name).unlink(missing_ok=True)
        os.mkfifo(part / name)
    for options, path in (
        (("--draft", draft), draft / "config.json"),
        (("--lora", f"one={adapter}"), adapter / "adapter_config.json"),
        (("--vision", vision), vision / "config.json"),
    ):
        assert f"{path} cannot be read: it is a pipe" in build(*options).refusal()


@pytest.mark.parametrize(
    ("name", "size"), [("tokenizer_config.json", 17 << 20), ("chat_template.jinja", 2 << 20), ("config.json", 17 << 20)]
)
def test_build_takes_no_endless_configuration(
    build: Callable[..., Ended], checkpoint: Path, name: str, size: int
) -> None:
    with (checkpoint / name).open("ab") as file:
        file.truncate(size)
    assert f"{name} cannot be read: it has {size:,} bytes, more than" in build().refusal()


def test_convert_copies_ordinary_files_alone(hostile: HostileRuns, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(golden_folder("torch_files") / "plain.bin", source / "pytorch_model.bin")
    for name in ("config.json", "merges.txt"):
        (source / name).symlink_to("/dev/zero")
        message = hostile("convert", source, tmp_path / "target").refusal()
        assert f"{source / name} cannot be read: it is a device" in message
        (source / name).unlink()
    assert hostile("convert", source, tmp_path / "target").code == 0


def test_a_small_archive_does_not_become_a_large_checkpoint(hostile: HostileRuns, tmp_path: Path) -> None:
    """A thousand times its size: many tensors are one and the same storage, or repeat its values."""
    count = 2 << 20  # elements of 4 bytes
    place = torch_pickles.storage()
    tensors = (torch_pickles.text(f"w{key}") + torch_pickles.tensor(place, 0, (count,), (0,)) for key in range(6))
    state = b"\x80\x02}" + b"".join(each + b"s" for each in tensors) + b"."
    path = torch_pickles.archive(tmp_path / "model.bin", state)
    assert path.stat().st_size < 60_000
    ended = hostile("convert", path, tmp_path / "target")
    assert "its tensors would take 50,331,648 bytes" in ended.refusal()
    assert not (tmp_path / "target").exists() and ended.seconds < 2


@pytest.mark.parametrize(
    "name", ["edgellm.json", "config.json", "tokenizer.json", "model.safetensors", "draft/config.json"]
)
def test_an_engine_directory_has_ordinary_files(hostile: HostileRuns, engines: Path, name: str) -> None:
    path = engines / name
    path.unlink()
    os.mkfifo(path)
    for command in (("info", engines, "--verify"), ("generate", "Hello", "-m", engines, "--backend", "numpy")):
        ended = hostile(*command)
        assert ended.code == 1 and name in ended.out + ended.err and "Traceback" not in ended.err, ended
    path.unlink()
    path.symlink_to("/dev/zero")
    ended = hostile("generate", "Hello", "-m", engines, "--backend", "numpy")
    assert ended.code == 1 and name in ended.err and "Traceback" not in ended.err, ended


# --- numbers of edgellm.json and config.json ------------------------------------------------------------------------


def whole_numbers(values: Any, place: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The places of whole numbers in nested objects."""
    if isinstance(values, dict):
        return [found for key, value in values.items() for found in whole_numbers(value, (*place, key))]
    return [place] if type(values) is int else []


def changed(values: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A copy of nested objects with another value in one place."""
    key, *rest = place
    return values | {key: changed(values[key], tuple(rest), value) if rest else value}


@pytest.mark.parametrize("value", [2**31, 10**400, -1], ids=["2^31", "400 digits", "-1"])
def test_every_whole_number_of_a_description_has_a_range(engines: Path, value: int) -> None:
    path = engines / "edgellm.json"
    description = json.loads(path.read_text())
    places = [place for place in whole_numbers(description) if place[-1] != "size"]
    assert ("config", "num_layers") in places and len(places) > 20
    for place in places:
        path.write_text(json.dumps(changed(description, place, value)))
        expected = rf"'{place[-1]}' is {value}, expected a whole number from \d to \d+"
        with pytest.raises(
            EngineDirectoryError, match=expected if value != 10**400 else r"the whole number of 401 digits \(10000"
        ):
            EngineDirectory.read(engines)


CONTRADICTIONS = {
    ("config", "num_layers"): (1, "'feature_layers' is [1, 2], expected different layers from 0 to 1"),
    ("config", "num_kv_heads"): (3, "'num_heads' is 4, expected a multiple of 'num_kv_heads', 3"),
    ("config", "rotary_dim"): (1000, "'rotary_dim' is 1000, expected an even number up to 'head_dim', 16"),
    ("config", "rms_norm_eps"): (-1.0, "'rms_norm_eps' is -1.0, expected a number above 0 and up to 1"),
    ("config", "mrope_section"): ([1, 2], "'mrope_section' is [1, 2], expected three numbers with a sum of 8"),
    ("config", "eos_token_ids"): ([2**31 - 1], "'eos_token_ids' has 2147483647, the model has"),
    ("config", "feature_layers"): ([0] * 5000, "expected a list of at most 4096 whole numbers from 0 to 2147483647"),
    ("draft", "config", "decoder", "vocab_size"): (8, "'vocab_size' of its decoder is 8, that of the model"),
    ("draft", "config", "decoder", "rotary_dim"): (3, "'rotary_dim' is 3, expected an even number"),
    ("draft", "config", "base_embedding"): ("x", "'base_embedding' is 'x', expected 'model.embed_tokens.weight'"),
    ("draft", "config", "base_head"): ("x", "'base_head' is 'x', expected"),
    ("limits", "kv_capacity"): (2**31 - 1, "'kv_capacity' is 2147483647, expected a whole number from 1 to 16777216"),
    ("limits", "draft_steps"): (33, "'draft_steps' is 33, expected a whole number from 1 to 32"),
}


@pytest.mark.parametrize("place", CONTRADICTIONS, ids=".".join)
def test_sizes_that_contradict_each_other(hostile: HostileRuns, engines: Path, place: tuple[str, ...]) -> None:
    path = engines / "edgellm.json"
    value, expected = CONTRADICTIONS[place]
    path.write_text(json.dumps(changed(json.loads(path.read_text()), place, value)))
    assert expected in hostile("info", engines).refusal()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"feature_layers": []}, "'feature_layers' is ()"),
        ({"feature_layers": [1000]}, "'feature_layers' is [1000], expected different layers"),
        ({"patch_size": 2**31 - 1}, "'patch_size' is 2147483647, expected a whole number from 1 to 256"),
        ({"image_size": 2**31 - 1}, "'image_size' is 2147483647, expected 1 to 256 patches"),
        ({"window_size": 3}, "'window_size' is 3, expected a multiple"),
        ({"out_hidden_size": 8}, "'out_hidden_size' is 8, the model's hidden size"),
        ({"num_heads": 7}, "expected a multiple of 'num_heads', 7"),
        ({"image_token_id": 2**31 - 1}, "'image_token_id' is 2147483647, the model has"),
        ({"num_position_embeddings": 3}, "'num_position_embeddings' is 3, expected a square"),
        ({"family": "qwen3_vl"}, "'num_position_embeddings' is None"),
    ],
)
def test_vision_encoders_that_there_are_none_of(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    description = json.loads((SHIPPED_MODEL / "edgellm.json").read_text())
    description["vision"]["config"] |= changes
    (tmp_path / "edgellm.json").write_text(json.dumps(description))
    with pytest.raises(EngineDirectoryError, match=re.escape(expected)):
        EngineDirectory.read(tmp_path)


@pytest.mark.parametrize("name", ["num_layers", "hidden_size", "vocab_size", "head_dim", "intermediate_size"])
def test_sizes_that_are_not_those_of_the_weights(hostile: HostileRuns, engines: Path, name: str) -> None:
    path = engines / "edgellm.json"
    description = json.loads(path.read_text())
    value = 200 if name == "num_layers" else 2**31 - 2
    for part in (("draft", "config", "decoder", name), ("config", name)):
        description = changed(description, part, value)
    path.write_text(json.dumps(description))
    ended = hostile("info", engines)
    assert ended.code == 0 and ended.seconds < 15, ended
    ended = hostile("generate", "Hello", "-m", engines, "--backend", "numpy")
    assert ended.code == 1 and "Traceback" not in ended.err and ended.seconds < 15, ended


def test_2_to_the_31_layers(hostile: HostileRuns, engines: Path) -> None:
    path = engines / "edgellm.json"
    description = json.loads(path.read_text())
    path.write_text(json.dumps(changed(description, ("config", "num_layers"), 2**31)))
    for command in (("info", engines), ("generate", "Hello", "-m", engines), ("cache", "build", "-m", engines)):
        arguments = (*command, "--prompt", "Hello") if command[0] == "cache" else command
        ended = hostile(*arguments)
        assert "'num_layers' is 2147483648, expected a whole number from 1 to 1024" in ended.refusal()
        assert ended.seconds < 2


@pytest.mark.parametrize(
    ("value", "shown"),
    [("9" * 400, "999999"), ("9" * 5000, None), ("1e999", "Infinity"), ("[" * 100_000, None), ('"\\ud800"', None)],
)
def test_values_that_no_file_of_a_model_may_have(
    build: Callable[..., Ended], checkpoint: Path, hostile: HostileRuns, tmp_path: Path, value: str, shown: str | None
) -> None:
    """What can be read is refused by the name that has it."""
    for name in ("config.json", "generation_config.json"):
        original = (checkpoint / name).read_bytes() if (checkpoint / name).exists() else None
        (checkpoint / name).write_text(f'{{"eos_token_id": {value}, "architectures": ["LlamaForCausalLM"]}}')
        expected = f"{name} is not valid JSON" if shown is None else f"eos_token_id is {shown}"
        ended = build()
        assert ended.refusal() and expected in ended.err
        (checkpoint / name).unlink()
        if original is not None:
            (checkpoint / name).write_bytes(original)
    (tmp_path / "edgellm.json").write_text(f'{{"format_version": {value}}}')
    expected = "edgellm.json is not valid JSON" if shown is None else f"'format_version' is {shown}"
    assert expected in hostile("info", tmp_path).refusal()


def test_whole_numbers_of_a_configuration(checkpoint: Path) -> None:
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    good = (("rope_theta", 2**31), ("eos_token_id", 0), ("eos_token_id", [1]))
    for key in [key for key, value in config.items() if type(value) in (int, float)]:
        for value in (2**31, 2**63, 0, -1, [1], {}, "8", 1e300):
            if (key, value) in good:
                continue
            path.write_text(json.dumps(config | {key: value}))
            with pytest.raises(EdgeLLMError, match=f"{key} is .*, (expected|but)"):
                read_decoder_config(checkpoint)


# --- tokenizers -----------------------------------------------------------------------------------------------------

TOKENIZERS: dict[str, dict[str, Any]] = {
    "a pattern that panics": {
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "(([a-z<|> _\\n])+)+$"},
            "behavior": "Isolated",
            "invert": False,
        }
    },
    "a normalizer that panics": {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "xx"}},
    "a table that panics": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "no pattern": {
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
    },
}


def describe(engines: Path) -> None:
    """Give `edgellm.json` the digests of the files as they now are."""
    from edgellm.engines.formats.digests import hash_file

    path = engines / "edgellm.json"
    description = json.loads(path.read_text())
    names = [name for name in ("tokenizer.json", "tokenizer_config.json") if (engines / name).exists()]
    for name in names:
        digest = hash_file(engines / name)
        description["files"][name] = {"sha256": digest.sha256, "size": digest.size}
    path.write_text(json.dumps(description))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers_on_which_the_library_fails(hostile: HostileRuns, engines: Path, name: str) -> None:
    path = engines / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | TOKENIZERS[name]))
    describe(engines)
    ended = hostile("generate", "a" * 60 + "!", "-m", engines, "--max-tokens", 2, "--backend", "numpy")
    message = ended.err.strip().splitlines()[-1]
    assert ended.code == 1 and message.startswith("error: ") and "tokenizer" in message, ended


def test_a_decoder_that_panics(hostile: HostileRuns, engines: Path) -> None:
    path = engines / "tokenizer.json"
    decoder = {"type": "Replace", "pattern": {"Regex": "((.|\\n)+)+\\x00"}, "content": ""}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"decoder": decoder}))
    describe(engines)
    prompt = ("generate", "Hello", "-m", engines, "--max-tokens", 60, "--backend", "numpy")
    ended = hostile(*prompt)
    assert ended.code in (0, 1) and "Traceback" not in ended.err and "PanicException" not in ended.err, ended


@pytest.mark.parametrize("value", ["5", "true", '"text"', "1.5"])
def test_special_tokens_that_are_no_list(hostile: HostileRuns, engines: Path, value: str) -> None:
    path = engines / "tokenizer_config.json"
    for key in ("additional_special_tokens", "extra_special_tokens"):
        path.write_text(f'{{"{key}": {value}}}')
        describe(engines)
        ended = hostile("generate", "Hello", "-m", engines, "--backend", "numpy", "--raw")
        assert f"{key} is" in ended.refusal() and "expected a list of tokens" in ended.refusal()


@pytest.mark.parametrize("key", ["bos_token", "additional_special_tokens", "chat_template"])
def test_halves_of_characters_in_a_tokenizers_configuration(hostile: HostileRuns, engines: Path, key: str) -> None:
    path = engines / "tokenizer_config.json"
    path.write_text(f'{{"{key}": {"[" * (key[0] == "a")}"a\\ud800"{"]" * (key[0] == "a")}}}')
    describe(engines)
    ended = hostile("generate", "Hello", "-m", engines, "--backend", "numpy")
    assert "half of a surrogate pair (U+D800) at position 1" in ended.refusal()


# --- what errors and lists show -------------------------------------------------------------------------------------


def test_messages_are_bounded(build: Callable[..., Ended], checkpoint: Path) -> None:
    for config in ({"model_type": "a" * 3_000_000}, {"model_type": "llama", "quantization_config": {"b" * 900_000: 1}}):
        (checkpoint / "config.json").write_text(json.dumps(config))
        assert len(build().refusal()) < 2100


def test_names_of_files_are_shown_safely(hostile: HostileRuns, engines: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    name = "a\nerror: nothing\x1b[31m.bin"
    (tmp_path / name).touch()
    for command in ("build", "convert"):
        (tmp_path / "b.bin").touch()
        message = hostile(command, tmp_path, tmp_path / "target").refusal()
        assert "a\\nerror: nothing\\x1b[31m.bin" in message
    (engines / "model\n.safetensors").touch()
    (engines / "lora" / "a\x1b").mkdir(parents=True)
    ended = hostile("info", engines)
    assert ended.code == 1 and "model\\n.safetensors" in ended.out and "a\\x1b" in ended.out and "\x1b" not in ended.out


def test_a_list_of_snapshots_shows_each_file_on_a_line_of_its_own(hostile: HostileRuns, tmp_path: Path) -> None:
    folder = tmp_path / "snap\nshots"
    folder.mkdir()
    for name in ("a\nfake: 12 snapshots", "b\x1b[2J", "c"):
        (folder / f"{name}.safetensors").write_bytes(b"no snapshot")
    ended = hostile("cache", "list", "--folder", folder)
    assert ended.code == 0 and ended.out.count("\n") == 4, ended
    assert "\x1b" not in ended.out and "a\\nfake" in ended.out and "snap\\nshots" in ended.out
    ended = hostile("cache", "verify", "--all", "--folder", folder)
    assert ended.code == 1 and ended.out.count("\n") == 3 and "\x1b" not in ended.out, ended
