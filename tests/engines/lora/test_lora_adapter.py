"""Reading adapters: what is right is read, everything else is refused, all of it in one error."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_files import golden_folder
from safetensors.numpy import load_file, save_file
from tiny_families import WINDOWED
from typer.testing import CliRunner

from edgellm.commands.app import create_app
from edgellm.engines.building.inputs import read_decoder_config
from edgellm.engines.errors import AdapterError
from edgellm.engines.lora.adapter import LoraAdapter
from edgellm.engines.lora.config import LoraConfig
from edgellm.engines.lora.patterns import PatternMatcher, name_starts, patterns_problems
from edgellm.engines.model.config import DecoderConfig

GOLDENS = golden_folder("lora")
FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def adapter(tiny_adapters: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(tiny_adapters["attention"], tmp_path / "adapter")


def change(adapter: Path, **settings: Any) -> Path:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return adapter


def change_tensors(adapter: Path, removed: str = "", **added: np.ndarray) -> Path:
    path = adapter / "adapter_model.safetensors"
    tensors = {name: values for name, values in load_file(path).items() if name != removed}
    save_file(tensors | {name.replace("__", "."): values for name, values in added.items()}, path)
    return adapter


def refusal(adapter: Path, config: DecoderConfig, **arguments: Any) -> str:
    with pytest.raises(AdapterError) as error:
        LoraAdapter.read(adapter, config, **arguments)
    assert str(adapter) in str(error.value)
    return str(error.value)


def test_what_is_read(adapter: Path, tiny_config: DecoderConfig) -> None:
    found = LoraAdapter.read(adapter, tiny_config)
    assert found.rank == 3
    assert len(found.pairs) == 2 * tiny_config.num_layers
    tensors = load_file(adapter / "adapter_model.safetensors")
    a, b = found.pairs["model.layers.0.self_attn.q_proj"].matrices()
    np.testing.assert_array_equal(a, tensors[f"{FIRST}.lora_A.weight"])
    np.testing.assert_array_equal(b, tensors[f"{FIRST}.lora_B.weight"] * np.float32(2))
    assert found.nbytes == sum(values.nbytes for values in tensors.values())


def test_bfloat16_is_read_exactly(tiny_config: DecoderConfig, tmp_path: Path, make_adapter: Any) -> None:
    adapter = make_adapter(tmp_path / "adapter", tiny_config, targets=["q_proj"])
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    header, data, offset = {}, b"", 0
    for name, values in tensors.items():
        bits = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        header[name] = {"dtype": "BF16", "shape": values.shape, "data_offsets": [offset, offset + len(bits)]}
        data, offset = data + bits, offset + len(bits)
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    a, _ = LoraAdapter.read(adapter, tiny_config).pairs["model.layers.0.self_attn.q_proj"].matrices()
    expected = (tensors[f"{FIRST}.lora_A.weight"].view(np.uint32) & 0xFFFF0000).view(np.float32)
    np.testing.assert_array_equal(a, expected)


def test_the_digest_is_that_of_both_files(adapter: Path, tiny_config: DecoderConfig, tmp_path: Path) -> None:
    first = LoraAdapter.read(adapter, tiny_config).digest
    again = shutil.copytree(adapter, tmp_path / "again")
    assert LoraAdapter.read(again, tiny_config).digest == first
    digests = {first, LoraAdapter.read(change(again, lora_alpha=7), tiny_config).digest}
    name = f"{FIRST}.lora_A.weight"
    changed = load_file(adapter / "adapter_model.safetensors")[name]
    changed[0, 0] += 1
    digests.add(LoraAdapter.read(change_tensors(adapter, **{name: changed}), tiny_config).digest)
    assert len(digests) == 3
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "some"}, "'bias' is 'some'"),
        ({"r": 10**400}, "'r' is 1000"),
        ({"lora_bias": True}, "lora_bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"peft_type": "LOHA"}, "'peft_type' is 'LOHA'"),
        ({"peft_type": None}, "expected 'LORA'"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
        ({"trainable_token_indices": [3]}, "trained token embeddings"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters"),
        ({"alora_invocation_tokens": [1, 2]}, "activated LoRA"),
        ({"use_something_new": True}, "'use_something_new' is True"),
        ({"init_lora_weights": "pissa_niter_16"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "olora"}, "changes the base weights"),
        ({"target_modules": ["q_proj", "v_proj", "lm_head"]}, "'lm_head'"),
        ({"target_modules": ["q_proj", "v_proj", "model.embed_tokens"]}, "embedding"),
        ({"target_modules": ["c_attn"]}, "matches no linear layer"),
        ({"target_modules": []}, "'target_modules' is empty"),
        ({"target_modules": None}, "'target_modules' is empty"),
        ({"target_modules": {"q_proj": 1}}, "expected a list of names"),
        ({"target_modules": "("}, "not a regular expression"),
        ({"layers_pattern": ["blocks"]}, "layers_pattern"),
        ({"layers_to_transform": [-1]}, "layers_to_transform"),
        ({"r": 0}, "'r' is 0"),
        ({"r": 2.5}, "'r' is 2.5"),
        ({"r": True}, "'r' is True"),
        ({"lora_alpha": "16"}, "'lora_alpha'"),
        ({"lora_alpha": 10**400}, "'lora_alpha' is 1000"),
        ({"use_rslora": "no"}, "'use_rslora' is 'no'"),
        ({"rank_pattern": {"q_proj": "8"}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": [1]}}, "alpha_pattern"),
        ({"r": 5}, "is [3, 64], expected [5, 64]"),
        ({"rank_pattern": {"q_proj": 2}}, "is [3, 64], expected [2, 64]"),
        ({"target_modules": ["q_proj"]}, "unexpected"),
        ({"target_modules": ["q_proj", "k_proj", "v_proj"]}, "missing: model.layers.2.self_attn.k_proj.lora_B [32, 3]"),
        ({"layers_to_transform": [0, 1]}, "layers.2.self_attn.q_proj.lora_A.weight is not among the targets"),
        ({"exclude_modules": ["v_proj"]}, "v_proj.lora_B.weight is not among the targets"),
    ],
)
def test_settings_that_are_refused(
    adapter: Path, tiny_config: DecoderConfig, settings: dict[str, Any], words: str
) -> None:
    assert words in refusal(change(adapter, **settings), tiny_config)


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_dropout": 0.1, "task_type": "CAUSAL_LM", "init_lora_weights": "gaussian", "peft_version": "0.10.0"},
        {"modules_to_save": None, "use_dora": False, "layer_replication": None, "some_future_key": None},
        {"megatron_config": None, "megatron_core": "megatron.core", "loftq_config": {}, "qalora_group_size": 16},
        {"target_modules": "all-linear", "exclude_modules": r".*\.(k|o)_proj|.*mlp.*"},
        {"target_modules": [f"model.layers.{layer}.self_attn.{kind}_proj" for layer in range(3) for kind in "qv"]},
    ],
)
def test_settings_that_change_nothing(adapter: Path, tiny_config: DecoderConfig, settings: dict[str, Any]) -> None:
    expected = LoraAdapter.read(adapter, tiny_config)
    found = LoraAdapter.read(change(adapter, **settings), tiny_config)
    assert found.pairs.keys() == expected.pairs.keys()


BUSY = [
    *(f"{'.*' * 8}!", ".*" * 30 + "!", "(.*)*(.*)*(.*)*x", "(x+x+)+y", "(((.*)*)*)*!", ".?" * 300 + "!"),
    *("(a|a|.)" * 100 + "!", "((.*)*(?=(.*)*x))*!", "(a|a)*b" * 3),
]


@pytest.mark.parametrize("pattern", BUSY)
def test_patterns_that_could_take_for_ever(adapter: Path, tiny_config: DecoderConfig, pattern: str) -> None:
    """One name in a matcher that tries one way after another takes up to centuries."""
    started = time.process_time()
    for key, value in (("target_modules", pattern), ("exclude_modules", pattern), ("alpha_pattern", {pattern: 2})):
        try:
            LoraAdapter.read(change(adapter, **{key: value}), tiny_config)
        except AdapterError as error:
            assert re.search(r"matches no|unexpected|not among|too many steps", str(error))
    assert time.process_time() - started < 60


def test_the_steps_of_all_names_and_patterns_are_counted(adapter: Path, tiny_config: DecoderConfig) -> None:
    settings = LoraConfig.read(change(adapter, rank_pattern={f"{'.?' * 40}{number}": 2 for number in range(3000)}))
    assert settings.problems == ()
    few = replace(settings, _matcher=PatternMatcher(100_000))
    with pytest.raises(AdapterError, match="too many steps"):
        few.rank_of("model.layers.0.self_attn.q_proj")
    with pytest.raises(AdapterError, match="too many steps"):  # nothing, 60 ** 20 times
        PatternMatcher(100_000).matches("(" * 20 + "){60}" * 20, "model", [0])
    change(adapter, rank_pattern={f"{'a' * 90}{number}": 2 for number in range(3000)})
    assert "more than 262,144 characters together" in refusal(adapter, tiny_config)
    change(adapter, rank_pattern={"a" * 2000: 2})
    assert "has 2,000 characters: expected at most 1,000" in refusal(adapter, tiny_config)


@pytest.mark.parametrize(
    "pattern", [r"(q)\1", r"(?i)q_proj", r"(?<=a)b", r"(?>a)b", r"a++", r"(?P<x>a)(?P=x)", r"\x41", "(" * 30 + ")" * 30]
)
def test_patterns_that_are_not_followed(adapter: Path, tiny_config: DecoderConfig, pattern: str) -> None:
    words = refusal(change(adapter, alpha_pattern={pattern: 2}), tiny_config)
    assert re.search("too involved at|not a regular expression", words)  # the latter of older Pythons


LAYERS = r"(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)"
KINDS = r"(?:k_proj|v_proj|q_proj|out_proj|o_proj|up_proj|gate_proj|down_proj)"
PATTERNS = [
    r"(model\.)?layers\.\d+\.self_attn\.(q|v)_proj",
    r"^(model\.)?(language_model\.)?layers\.(0|1|2)\.(?:\w+\.)*[qv]_proj$",
    rf"(?:.*?(?:language|text|).*?{LAYERS}.*?{KINDS}.*?)|(?:\bmodel\.layers\.[\d]{{1,}}\.{LAYERS}\.(?:{KINDS}))",
    r"^(model(?=\.).*\.(q_proj|v_proj))$",
    r"^(language_model|model)(?!.*(lm_head|output|emb|wte|shared)).*",
    r"model.layers.1.self_attn.q_proj",
    r"layers\.1\.self_attn.q_proj",
    r"1.self_attn.q_proj",
    r"layers\.[13]{1,2}\..*",
    r"[^.]+_proj",
    r"self_attn",
]
MODULES = [
    f"model.{between}layers.{layer}.{module}"
    for between in ("", "language_model.")
    for layer in (0, 1, 13)
    for module in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp")
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_as_with_re(pattern: str) -> None:
    assert patterns_problems([pattern]) == []
    matcher = PatternMatcher()
    for name in MODULES:
        assert matcher.matches(pattern, name, [0]) == (re.fullmatch(pattern, name) is not None)
        ends = re.match(rf"(.*\.)?({pattern})$", name) is not None
        assert matcher.matches(pattern, name, name_starts(name)) == ends


def test_random_patterns_match_as_with_re() -> None:
    random = np.random.default_rng(4)
    atoms = ["a", "b", r"\.", ".", "0", "[ab]", "[^a]", r"\d", r"\w", r"\b", "^", "$", "[]a]", r"[\]b]"]
    repetitions = ["*", "+", "?", "{2}", "{1,2}", "{,2}", "{1,}", "*?", "+?", "??", ""]

    def pattern(depth: int) -> str:
        kind = random.integers(6) if depth else 0
        if kind < 2:
            return str(random.choice(atoms))
        inner = pattern(depth - 1), pattern(depth - 1)
        if kind == 2:
            return "".join(inner)
        if kind == 3:
            return f"({'|'.join(inner)})"
        return (
            f"(?:{inner[0]}){random.choice(repetitions)}" if kind == 4 else f"(?{random.choice(['=', '!'])}{inner[0]})"
        )

    for _ in range(300):
        text = "".join(pattern(3) for _ in range(random.integers(1, 4)))
        assert patterns_problems([text]) == [], text
        matcher = PatternMatcher()
        for _ in range(10):
            name = "".join(random.choice(list("ab.0"), random.integers(0, 7)))
            assert matcher.matches(text, name, [0]) == (re.fullmatch(text, name) is not None), (text, name)
            ends = re.match(rf"(.*\.)?({text})$", name) is not None
            assert matcher.matches(text, name, name_starts(name)) == ends, (text, name)


def test_every_module_of_a_large_model_may_have_a_rank(tiny_config: DecoderConfig, adapter: Path) -> None:
    kinds = [*(f"self_attn.{kind}_proj" for kind in "qkvo"), *(f"mlp.{kind}_proj" for kind in ("gate", "up", "down"))]
    modules = [f"model.layers.{layer}.{kind}" for layer in range(126) for kind in kinds]
    ranks = {name: 1 + number % 7 for number, name in enumerate(modules)}
    settings = LoraConfig.read(change(adapter, rank_pattern=ranks, alpha_pattern=ranks))
    assert settings.problems == ()
    started = time.process_time()
    for name, rank in ranks.items():
        assert settings.rank_of(name) == rank and settings.scale_of(name) == 1
    assert time.process_time() - started < 20


def test_many_names_and_layers_take_no_time(adapter: Path, tiny_config: DecoderConfig) -> None:
    expected = LoraAdapter.read(adapter, tiny_config).pairs.keys()
    many = [f"m{number}" for number in range(100_000)]
    change(
        adapter, target_modules=[*many, "q_proj", "v_proj"], exclude_modules=many, layers_to_transform=[*range(9999)]
    )
    started = time.process_time()
    assert LoraAdapter.read(adapter, tiny_config).pairs.keys() == expected
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("removed", "added", "words"),
    [
        ("", {"something": np.zeros(3, np.float32)}, "unknown: 'something' [3]"),
        ("", {f"{FIRST}.bias": np.zeros(64, np.float32)}, "biases of adapters are not supported"),
        ("", {f"{FIRST}.lora_magnitude_vector": np.zeros(3, np.float32)}, "lora_magnitude_vector"),
        ("", {"base_model.model.lm_head.weight": np.zeros((2, 2), np.float32)}, "unknown: 'base_model.model.lm_head"),
        ("", {FIRST.replace("layers.0", "layers.9") + ".lora_A.weight": np.zeros((3, 64), np.float32)}, "layers.9"),
        ("", {f"{FIRST}.lora_A.default.weight": np.zeros((3, 64), np.float32)}, "unknown"),
        (f"{FIRST}.lora_A.weight", {}, "missing: model.layers.0.self_attn.q_proj.lora_A [3, 64]"),
        (f"{FIRST}.lora_B.weight", {}, "missing: model.layers.0.self_attn.q_proj.lora_B [64, 3]"),
        ("", {f"{FIRST}.lora_A.weight": np.zeros((64, 3), np.float32)}, "is [64, 3], expected [3, 64]"),
        ("", {f"{FIRST}.lora_B.weight": np.zeros((63, 3), np.float32)}, "is [63, 3], expected [64, 3]"),
        ("", {f"{FIRST}.lora_A.weight": np.zeros((3, 64), np.int8)}, "is int8, expected one of"),
        ("", {f"{FIRST}.lora_A.weight": np.full((3, 64), np.nan, np.float32)}, "not finite"),
        ("", {f"{FIRST}.lora_B.weight": np.full((64, 3), np.inf, np.float16)}, "not finite"),
    ],
)
def test_tensors_that_are_refused(
    adapter: Path, tiny_config: DecoderConfig, removed: str, added: dict[str, np.ndarray], words: str
) -> None:
    assert words in refusal(change_tensors(adapter, removed, **added), tiny_config)


@pytest.mark.parametrize("bias", ["none", "lora_only", "all"])
def test_an_adapter_whose_biases_were_asked_for_and_are_not_there_is_read(
    adapter: Path, tiny_config: DecoderConfig, bias: str
) -> None:
    """As PEFT saves it where the base model's linear layers have none."""
    assert LoraAdapter.read(change(adapter, bias=bias), tiny_config).pairs


def test_pairs_of_modules_that_nothing_reads_are_left_out(
    make_checkpoint: Any, make_adapter: Any, tmp_path: Path
) -> None:
    """First releases of Gemma 4's class had keys and values in layers that attend to others' rows."""
    config = read_decoder_config(make_checkpoint(tmp_path / "model", **WINDOWED["gemma4"]))
    adapter = make_adapter(tmp_path / "adapter", config, targets=["k_proj", "v_proj"])
    expected = set(LoraAdapter.read(adapter, config).pairs)
    first, shared = "base_model.model.model.layers.0.self_attn.k_proj.", (f"layers.{index}" for index in (2, 3))
    tensors = load_file(adapter / "adapter_model.safetensors")
    pair = {name: values for name, values in tensors.items() if name.startswith(first)}
    change_tensors(adapter, **{name.replace("layers.0", it): pair[name] for it in shared for name in pair})
    assert set(LoraAdapter.read(adapter, config).pairs) == expected


def test_all_problems_come_in_one_error(adapter: Path, tiny_config: DecoderConfig) -> None:
    change(adapter, use_dora=True, bias="some", new_thing={"a": 1})
    change_tensors(adapter, f"{FIRST}.lora_A.weight", extra=np.zeros(2, np.float32))
    message = refusal(adapter, tiny_config)
    for words in ("DoRA", "'bias'", "'new_thing'", "missing", "unknown", "(5 problems)"):
        assert words in message


def test_another_model(adapter: Path, tiny_config: DecoderConfig) -> None:
    assert "expected [3, 128]" in refusal(adapter, replace(tiny_config, hidden_size=128))


def test_damaged_files(adapter: Path, tiny_config: DecoderConfig, tmp_path: Path) -> None:
    weights, settings = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    data, text = weights.read_bytes(), settings.read_text()
    for length in (0, 4, 100, len(data) // 2, len(data) - 1):
        weights.write_bytes(data[:length])
        refusal(adapter, tiny_config)
    weights.write_bytes(data)
    for content in ("", "[]", "{", '{"r": NaN}', "\udcff"):
        settings.write_bytes(content.encode(errors="surrogateescape"))
        refusal(adapter, tiny_config)
    settings.unlink()
    assert "adapter_config.json" in refusal(adapter, tiny_config)
    settings.write_text(text)
    weights.unlink()
    assert "adapter_model.safetensors does not exist" in refusal(adapter, tiny_config)
    os.mkfifo(weights)
    assert "not a regular file" in refusal(adapter, tiny_config)
    assert "does not exist" in refusal(tmp_path / "nowhere", tiny_config)
    assert "is a file" in refusal(settings, tiny_config)


def test_pickled_weights_can_be_converted_as_the_error_says(
    adapter: Path, tiny_config: DecoderConfig, tmp_path: Path
) -> None:
    """The conversion itself is that of checkpoints; here it must fit what the message promises."""
    pickled = golden_folder("torch_files") / "plain.bin"
    (adapter / "adapter_model.safetensors").rename(tmp_path / "weights.safetensors")
    shutil.copy(pickled, adapter / "adapter_model.bin")
    message = refusal(adapter, tiny_config)
    assert "pickled" in message
    assert f"edgellm convert {adapter / 'adapter_model.bin'} NEW_DIR" in message
    result = CliRunner().invoke(create_app(), ["convert", str(adapter / "adapter_model.bin"), str(tmp_path / "new")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "new" / "model.safetensors").is_file()


@pytest.mark.parametrize("path", sorted(GOLDENS.iterdir()), ids=lambda path: path.name)
def test_no_golden_adapter_has_a_problem(path: Path) -> None:
    assert LoraConfig.read(path).problems == ()
