"""Settings files: defaults, precedence, and what is refused."""

from __future__ import annotations

from dataclasses import fields
from importlib import resources
from pathlib import Path

import pytest
import typer
import yaml

from edgellm.commands import bench, build, cache, chat, convert, doctor, eval, generate, info, quantize, serve
from edgellm.commands.settings import Settings, load_settings
from edgellm.commands.table import Option, Options, options_of
from edgellm.errors import SettingsError


@pytest.fixture(autouse=True)
def no_user_settings(tmp_path, monkeypatch):
    monkeypatch.delenv("EDGELLM_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_packaged_defaults():
    packaged = resources.files("edgellm.configs") / "defaults.yaml"
    assert load_settings(str(packaged)) == load_settings() == Settings()
    assert set(yaml.safe_load(packaged.read_text())) == {item.name for item in fields(Settings)}


def test_a_file_overrides_the_defaults(tmp_path):
    (tmp_path / "models").mkdir()
    path = written(
        tmp_path / "mine.yaml",
        "model: models/robot\nbackend: numpy\nsystem: |\n  You are Pip.\nhistory: false\nstats: true\n"
        "sampling:\n  temperature: 0.7\n  stop: [END]\n",
    )
    settings = load_settings(path)
    assert settings.model == tmp_path / "models/robot"
    assert (settings.backend, settings.system) == ("numpy", "You are Pip.\n")
    assert (settings.history, settings.stats) == (False, True)
    assert settings.sampling == {"temperature": 0.7, "stop": ("END",)}


def test_drafting_settings(tmp_path):
    (tmp_path / "tree.json").write_text("[[0], [0, 0]]")
    text = "drafting: {choices: tree.json, adaptive: false, acceptance: typical, posterior_threshold: 0.2, preset: cpu}"
    assert load_settings(written(tmp_path / "mine.yaml", text)).drafting == {
        "choices": ((0,), (0, 0)),
        "adaptive": False,
        "acceptance": "typical",
        "posterior_threshold": 0.2,
        "preset": "cpu",
    }
    assert load_settings(written(tmp_path / "off.yaml", "drafting: {draft: false, draft_steps: null}")).drafting == {
        "draft": False
    }


def test_adapters_and_a_snapshot(tmp_path):
    (tmp_path / "pip.safetensors").touch()
    path = written(
        tmp_path / "mine.yaml", "adapter: json\nadapters: {json: loras/json, style: /s}\nsystem_cache: pip.safetensors"
    )
    settings = load_settings(path)
    assert settings.adapter == "json"
    assert settings.adapters == {"json": tmp_path / "loras/json", "style": Path("/s")}
    assert settings.system_cache == str(tmp_path / "pip.safetensors")
    assert load_settings(written(tmp_path / "name.yaml", "system_cache: pip")).system_cache == "pip"
    (tmp_path / "pip").write_text("a file of that name is not what is meant")
    assert load_settings(tmp_path / "name.yaml").system_cache == "pip"


def test_where_the_users_file_is_found(tmp_path, monkeypatch, edgellm):
    written(tmp_path / "config" / "edgellm" / "config.yaml", "system: from the home\n")
    assert load_settings().system == "from the home"
    third = written(tmp_path / "third.yaml", "given: 1\n")
    assert load_settings(written(tmp_path / "given.yaml", "system: given\n")).system == "given"
    monkeypatch.setenv("EDGELLM_CONFIG", str(written(tmp_path / "other.yaml", "environment: 1\n")))
    assert "unknown key 'environment'" in edgellm("generate", "hi")[2]
    assert "unknown key 'given'" in edgellm("generate", "hi", "--config", third)[2]


def test_an_empty_file_changes_nothing(tmp_path):
    assert load_settings(written(tmp_path / "empty.yaml", "# nothing\n")) == Settings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle: x", "unknown key 'modle': did you mean model?"),
        ("temprature: 1", "unknown key 'temprature': did you mean temperature?"),
        ("temperature: 1", "has temperature outside its section: expected it as in sampling: {temperature: ...}"),
        ("kv_capacity: 64", "expected it as in build: {kv_capacity: ...}"),
        ("colour: red", "unknown key 'colour': expected one of model, backend"),
        ("sampling: {temprature: 1}", "unknown key 'temprature': did you mean temperature?"),
        ("sampling: {top_p: 2}", "top_p is 2: expected a number above 0 and up to 1"),
        ("sampling: [1]", "sampling is \\[1\\]: expected keys and values"),
        ("backend: cuda", "backend is 'cuda': expected one of auto, numpy, tensorrt"),
        ("model: 5", "model is 5: expected a path"),
        ("system: [a]", "system is \\['a'\\]: expected text"),
        ("adapter: 3", "adapter is 3: expected the name of an adapter, or null"),
        ("system_cache: []", "system_cache is \\[\\]: expected a file or the name of a snapshot, or null"),
        ("adapters: [a]", "adapters is \\['a'\\]: expected names and directories"),
        ("adapters: {a: 1}", "adapters in .*: 'a' is 1: expected a name and a directory"),
        ("history: maybe", "history is 'maybe': expected true or false"),
        ("states_mib: -1", "states_mib is -1: expected a whole number of MiB from 0 to 1048576"),
        ("states_mib: much", "states_mib is 'much': expected a whole number of MiB from 0 to 1048576"),
        ("stats: 3", "stats is 3: expected true or false, or null"),
        ("- a\n- b", "holds a list"),
        ("a: b: c", "not valid YAML"),
        ("model: !!python/object/apply:os.system ['true']", "not valid YAML"),
        ("1: x", "unknown key '1'"),
        ("sampling: {seed: 1}\nsystem: a\nsampling: {top_k: 1}", "the key 'sampling' again in line 3"),
        ("sampling: {seed: 1, 'seed': 2}", "the key 'seed' again in line 1"),
        ("drafting: fast", "drafting is 'fast': expected keys and values"),
        ("drafting: {draft_step: 3}", "no drafting setting 'draft_step': did you mean draft_steps?"),
        ("drafting: {draft_steps: 0}", "draft_steps is 0: expected a whole number from 1 to 32"),
        ("drafting: {draft: false, draft_top_k: 4}", "draft_top_k is given, but draft is false"),
        ("drafting: {acceptance: maybe}", "acceptance is 'maybe': expected one of exact, typical"),
        ("drafting: {choices: none.yaml}", "choices file .*none.yaml cannot be read"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    path = written(tmp_path / "bad.yaml", text)
    with pytest.raises(SettingsError, match=message) as caught:
        load_settings(path)
    assert str(path) in str(caught.value)


def test_missing_and_unreadable_files(tmp_path, monkeypatch, edgellm):
    with pytest.raises(SettingsError, match="No such file"):
        load_settings(tmp_path / "missing.yaml")
    monkeypatch.setenv("EDGELLM_CONFIG", str(tmp_path / "missing.yaml"))
    assert "No such file" in edgellm("generate", "hi")[2]
    (tmp_path / "latin.yaml").write_bytes(b"system: caf\xe9\n")
    with pytest.raises(SettingsError, match="not UTF-8 text: invalid byte 0xe9 at byte offset 11"):
        load_settings(tmp_path / "latin.yaml")


def every_option() -> dict[str, Option]:
    """The options of all commands, by command and name."""
    found = {}
    for module in (bench, build, cache, chat, convert, doctor, eval, generate, info, quantize, serve):
        for cls in vars(module).values():
            if isinstance(cls, type) and issubclass(cls, Options) and cls.__module__ == module.__name__:
                found |= {f"{cls.__name__}.{name}": each for name, each in options_of(cls).items()}
    assert len(found) > 200
    return found


def test_numbers_names_and_paths_of_all_options_have_one_form():
    """Python's own int, float and Path take all of these."""
    for place, described in every_option().items():
        wrong = []
        if described.type in (int, float):
            wrong = ["", "1_0", "nan", "inf", "-inf", "1e999", "0x10", " 1", "\uff11", "9" * 5000]
        elif not described.is_free and described.type is not bool:
            wrong = ["", " ", "a\0b", "~\0"]
        for text in wrong:
            with pytest.raises(typer.BadParameter, match="expected"):
                described.read(text)
                pytest.fail(f"{place} takes {text[:20]!r}")
    free = {place.partition(".")[2] for place, described in every_option().items() if described.is_free}
    assert free >= {"prompt", "system", "draft", "stop", "regex", "choice", "api_key", "temperature"}
