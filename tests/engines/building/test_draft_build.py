"""Engine directories with a draft head: built for real by TensorRT-RTX, described, verified, and refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner, Result

from edgellm.commands.app import create_app
from edgellm.engines.backends.executors import planned_shapes
from edgellm.engines.backends.plan_files import Platform, load_or_build_plan
from edgellm.engines.backends.platform import load_tensorrt
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.checks import choose_limits
from edgellm.engines.building.inputs import read_decoder_config
from edgellm.engines.building.planning import refresh_plans
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import BuildError, CheckpointError, EngineDirectoryError
from edgellm.engines.formats.strict_formats import plain_values
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.model.draft_decoder import draft_weights
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.memory_plan import plan_memory
from tools.demo_model.describe import describe_in_place

LIMITS = EngineLimits(1, 16, 96, draft_top_k=4, draft_steps=3, verify_tree_size=12)


def edgellm(*arguments: object) -> Result:
    return CliRunner().invoke(create_app(), list(map(str, arguments)))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"draft_top_k": 0}, "--draft-top-k is 0: expected a whole number from 1 to 64"),
        ({"draft_top_k": -1}, "--draft-top-k is -1"),
        ({"draft_top_k": 65}, "--draft-top-k is 65"),
        ({"draft_steps": 0}, "--draft-steps is 0: expected a whole number from 1 to 32"),
        ({"draft_steps": 33}, "--draft-steps is 33"),
        ({"verify_tree_size": 1}, "--verify-tree-size is 1: expected a whole number from 2 to 64"),
        ({"verify_tree_size": 65}, "--verify-tree-size is 65"),
        ({"verify_tree_size": 1024}, "--verify-tree-size is 1024"),
    ],
)
def test_trees_beyond_the_engines_are_refused(asked: dict[str, int], message: str, tiny_checkpoint: Path) -> None:
    config = read_decoder_config(tiny_checkpoint)
    with pytest.raises(BuildError, match=message):
        choose_limits(config, has_draft=True, **asked)
    with pytest.raises(BuildError, match="there is no draft: name one"):
        choose_limits(config, **{name: value or 1 for name, value in asked.items()})


def test_default_limits_are_the_usual_tree(tiny_checkpoint: Path) -> None:
    limits = choose_limits(read_decoder_config(tiny_checkpoint), has_draft=True)
    assert (limits.draft_top_k, limits.draft_steps, limits.verify_tree_size) == (10, 6, 60)


def planned(directory: EngineDirectory) -> list[EngineShape]:
    """All plans of a directory on sm_86."""
    return planned_shapes(directory.models, directory.limits, directory.dtype, "sm_86", needless=True)


@pytest.fixture(scope="module")
def built(tiny_checkpoint: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine directory with the plans of base and draft for sm_86, not to be changed."""
    pytest.importorskip("tensorrt_rtx")
    target = tmp_path_factory.mktemp("built") / "engines"
    report = build_engine_directory(tiny_checkpoint, target, LIMITS, ["sm_86"], draft=tiny_draft, all_plans=True)
    assert {plan.shape for plan in report.plans} == set(planned(EngineDirectory.open(target)))
    assert report.weight_bytes == sum(
        (path / "model.safetensors").stat().st_size for path in (tiny_checkpoint, tiny_draft)
    )
    return target


def test_build_makes_every_plan(built: Path, tiny_draft: Path) -> None:
    directory = EngineDirectory.open(built, verify=True)
    assert directory.config.feature_layers == (1, 2)
    assert directory.draft is not None
    assert sorted(path.name for path in (built / "draft").iterdir()) == ["config.json", "model.safetensors"]
    for name in ("config.json", "model.safetensors"):
        assert (built / "draft" / name).read_bytes() == (tiny_draft / name).read_bytes()
    library = load_tensorrt()
    for shape in planned(directory):
        plan, was_built = load_or_build_plan(directory, shape, Platform("sm_86", library.flavour, library.version))
        assert not was_built
        assert len(plan) > 1000
    with directory.draft.checkpoint() as checkpoint:
        assert checkpoint.info("fc.weight").shape == (64, 128)


def test_refresh_builds_only_what_is_missing(built: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(built, tmp_path / "copy"))
    lost = [next((copy / "plans").rglob(f"{name}.engine")) for name in ("draft.propose-b1-t4-*", "base.decode-b1-t1-*")]
    for plan in lost:
        plan.unlink()
    assert not any(built.seconds for built in refresh_plans(copy, ["sm_86"]).plans)  # kernels take what is lost
    report = refresh_plans(copy, ["sm_86"], all_plans=True)
    assert sorted(built.shape.name for built in report.plans if built.seconds) == sorted(plan.stem for plan in lost)


def test_info_shows_the_draft(built: Path) -> None:
    result = edgellm("info", built, "--json", "--verify")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["draft"]["config"]["generation"] == "3"
    stored = load_file(built / "draft" / "model.safetensors")
    parameters = sum(math.prod(values.shape) for name, values in stored.items() if name not in ("d2t", "t2d"))
    assert facts["draft"]["parameters"] == parameters
    assert facts["memory"]["draft weights"] == 2 * parameters
    # keys and values of 2 heads of 16, float16
    assert facts["memory"]["draft KV caches"] == 2 * 2 * 16 * 2 * LIMITS.kv_rows
    assert facts["limits"] == plain_values(LIMITS)
    text = edgellm("info", built).stdout
    for words in (
        "EAGLE-3",
        "200 tokens",
        "layers 1, 2",
        "shares the base's embedding",
        "trees up to 4 wide",
        f"none needed and {len([*built.rglob('*.engine')])} for --executor tensorrt alone",
        "kernels: base decode 1; base prefill 16; base verify 2, 4, 8, 16; draft accept 4; draft propose 1, 4; draft "
        "prefill",
    ):
        assert words in text


def test_build_command(tiny_checkpoint: Path, tiny_draft: Path, tmp_path: Path) -> None:
    target, sizes = tmp_path / "engines", ("--prefill-chunk", "16", "--kv-capacity", "96")
    trees = ("--draft-top-k", "2", "--draft-steps", "2", "--verify-tree-size", "4")
    result = edgellm("build", tiny_checkpoint, target, "--draft", tiny_draft, *sizes, *trees)
    assert result.exit_code == 0, result.output
    directory = EngineDirectory.open(target, verify=True)
    assert directory.limits == EngineLimits(1, 16, 96, 2, 2, 4)
    for words in ("EAGLE-3", "trees up to 2 wide and 2 deep, up to 4 nodes verified"):
        assert words in result.stdout
    for arguments, message in (
        (("--draft-steps", "2"), "there is no draft: name one"),
        (("--draft", tiny_draft, "--verify-tree-size", "65"), "--verify-tree-size is 65"),
        (("--draft", tmp_path / "nothing"), "does not exist"),
        (("--draft", tiny_checkpoint), "cannot be the draft of"),
    ):
        result = edgellm("build", tiny_checkpoint, tmp_path / "other", *sizes, *arguments)
        assert result.exit_code != 0
        assert message in f"{result.output}{result.exception}"
        assert not (tmp_path / "other").exists()


def test_linked_weights_and_shards(tiny_checkpoint: Path, tiny_draft: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny_draft / "model.safetensors")
    draft = tmp_path / "draft"
    draft.mkdir()
    shutil.copy(tiny_draft / "config.json", draft)
    files = {name: f"model-0000{index % 2 + 1}-of-00002.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in files if files[name] == file}, draft / file)
    (draft / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    target = tmp_path / "engines"
    build_engine_directory(tiny_checkpoint, target, LIMITS, [], weights="link", draft=draft)
    directory = EngineDirectory.open(target, verify=True)
    assert directory.draft is not None
    assert sorted(directory.draft.files) == [
        "config.json",
        *sorted(set(files.values())),
        "model.safetensors.index.json",
    ]
    assert all((target / "draft" / name).is_symlink() for name in set(files.values()))


def test_a_draft_beside_a_checkpoint_is_described(tiny_checkpoint: Path, tiny_draft: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(tiny_checkpoint, tmp_path / "place"))
    shutil.copytree(tiny_draft, place / "draft")
    directory = describe_in_place(place, LIMITS)
    assert directory.draft is not None
    assert directory.draft.config.draft_vocab_size == 200
    assert directory.limits == LIMITS
    with pytest.raises(BuildError, match="--draft-top-k is 0"):
        describe_in_place(place, EngineLimits(1, 16, 96))
    shutil.rmtree(place / "draft")
    with pytest.raises(EngineDirectoryError, match=r"draft/config.json: missing\n.*draft/model.safetensors: missing"):
        EngineDirectory.open(place)
    with pytest.raises(BuildError, match="there is no draft"):
        describe_in_place(place, LIMITS)


def test_a_failed_build_leaves_nothing(tiny_checkpoint: Path, tiny_draft: Path, tmp_path: Path) -> None:
    draft = Path(shutil.copytree(tiny_draft, tmp_path / "draft"))
    weights = draft / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for broken, limits, error in (
        (draft, LIMITS, CheckpointError),
        (tiny_draft, EngineLimits(1, 16, 96), BuildError),
        (None, LIMITS, BuildError),
    ):
        with pytest.raises(error):
            build_engine_directory(tiny_checkpoint, tmp_path / "engines", limits, [], draft=broken)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["draft"]


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a truncated file": (
        lambda path: (path / "draft/model.safetensors").write_bytes(b"12345678"),
        r"draft/model.safetensors: 8 bytes, expected",
    ),
    "another head": (
        lambda path: flip_last_byte(path / "draft/model.safetensors"),
        r"draft/model.safetensors: SHA-256",
    ),
    "a file that is not described": (
        lambda path: (path / "draft/model-extra.safetensors").touch(),
        r"draft/model-extra.safetensors: not described",
    ),
    "no draft in the description": (lambda path: change(path, draft=None), r"disagree on whether there is a draft"),
    "other features": (
        lambda path: change(path, lambda values: values["config"].update(feature_layers=[1])),
        r"disagree on whether there is a draft, or on its features",
    ),
    "no room for trees": (
        lambda path: change(path, limits={"max_batch": 2, "prefill_chunk": 16, "kv_capacity": 96}),
        r"disagree on whether there is a draft",
    ),
    "an unknown generation": (
        lambda path: change(path, lambda values: values["draft"]["config"].update(generation="4")),
        r"'generation' is '4', expected one of 1, 3, 3.1",
    ),
    "a key too many": (
        lambda path: change(path, lambda values: values["draft"].update(extra=1)),
        r"draft: unknown keys 'extra'",
    ),
    "a field too few": (
        lambda path: change(path, lambda values: values["draft"]["config"]["decoder"].pop("head_dim")),
        r"draft: config: decoder: the key 'head_dim' is missing",
    ),
}


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def change(path: Path, edit: Callable[[dict[str, Any]], Any] | None = None, **values: Any) -> None:
    """Change `edgellm.json`; a value of None removes the key."""
    file = path / "edgellm.json"
    content = json.loads(file.read_text()) | values
    content = {key: value for key, value in content.items() if value is not None}
    if edit is not None:
        edit(content)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_directory_is_refused(what: str, tiny_draft_engines: Path, tmp_path: Path) -> None:
    damage, message = DAMAGE[what]
    copy = Path(shutil.copytree(tiny_draft_engines, tmp_path / "copy"))
    damage(copy)
    with pytest.raises(EngineDirectoryError, match=message):
        EngineDirectory.open(copy)


def test_a_folder_that_is_not_described_is_named(tiny_engines: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_engines, tmp_path / "copy"))
    (copy / "draft").mkdir()
    with pytest.raises(EngineDirectoryError, match="draft/: not described"):
        EngineDirectory.open(copy)


def test_directories_without_a_draft_are_written_as_before(tiny_engines: Path) -> None:
    values = json.loads((tiny_engines / "edgellm.json").read_text())
    assert sorted(values) == ["attention", "config", "created_with", "dtype", "files", "format_version", "limits"]
    assert sorted(values["limits"]) == ["kv_capacity", "max_batch", "prefill_chunk"]
    directory = EngineDirectory.open(tiny_engines)
    assert directory.draft is None
    with pytest.raises(EngineDirectoryError, match="has no draft model"):
        directory.model_config("draft")


def test_memory_of_a_draft_is_planned(tiny_draft_engines: Path) -> None:
    directory = EngineDirectory.open(tiny_draft_engines)
    assert directory.draft is not None
    specs, draft = decoder_weights(directory.config), directory.draft.config
    plain = plan_memory(directory.config, directory.limits, specs, "float16", {"engine scratch": 1000})
    plan = plan_memory(directory.config, directory.limits, specs, "float16", {"engine scratch": 1000}, draft)
    names = ["weights", "KV caches", "step buffers", "logits and sampling", "token masks", "token biases"]
    names += ["engine scratch"]
    assert list(plain.items) == names and directory.limits.max_batch == 2
    assert {name: plan.items[name] for name in plain.items} == plain.items
    stored = sum(math.prod(spec.shape) for spec in draft_weights(draft))
    assert plan.items["draft weights"] == 2 * stored
    assert plan.items["draft KV caches"] == 2 * 2 * (2 * 16) * 2 * directory.limits.kv_rows
    # at least the logits of a tree, twice, for both slots
    assert plan.items["draft buffers"] > 2 * 2 * 16 * 320 * 4
    assert plan.total == plain.total + sum(size for name, size in plan.items.items() if name.startswith("draft"))
