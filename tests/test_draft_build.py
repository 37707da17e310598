"""Engine directories with a draft head: built for real by TensorRT-RTX, described, verified, and refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner, Result

from edgellm.commands.app import create_app
from edgellm.engines.build_checks import choose_limits
from edgellm.engines.build_inputs import read_decoder_config
from edgellm.engines.builder import build_engine_directory, describe_in_place, refresh_plans
from edgellm.engines.checkpoint import Checkpoint
from edgellm.engines.decoder import decoder_weights
from edgellm.engines.decoder_config import DecoderConfig, EngineLimits, EngineShape
from edgellm.engines.descriptions import ModelConfig, model_description
from edgellm.engines.draft_config import DraftConfig
from edgellm.engines.draft_decoder import draft_engine_weights, draft_weights
from edgellm.engines.engine_directory import EngineDirectory
from edgellm.engines.errors import BuildError, CheckpointError, EdgeLLMError, EngineDirectoryError, EngineError
from edgellm.engines.families import decoder_config
from edgellm.engines.families.eagle import read_draft
from edgellm.engines.memory_plan import plan_memory
from edgellm.engines.network_digest import network_digest
from edgellm.engines.numpy_backend import NumpyBackend
from edgellm.engines.plan_files import Platform, load_or_build_plan
from edgellm.engines.strict_json import plain_values
from edgellm.engines.tensorrt_library import load_tensorrt
from edgellm.engines.tensorrt_operations import TensorRTOperations, build_plan

GOLDENS = Path(__file__).parent / "draft_goldens"
HEADS = sorted(path.name for path in GOLDENS.iterdir() if not path.name.endswith("_base"))
LIMITS = EngineLimits(1, 16, 96, draft_top_k=4, draft_steps=3, verify_tree_size=12)
LARGE = EngineLimits(8, 512, 8192, draft_top_k=10, draft_steps=6, verify_tree_size=60)


def edgellm(*arguments: object) -> Result:
    return CliRunner().invoke(create_app(), list(map(str, arguments)))


def golden_models(name: str) -> dict[str, ModelConfig]:
    """The configurations of a golden head and of its base, by model."""
    with Checkpoint.open(GOLDENS / name) as draft:
        for base_path in sorted(GOLDENS.glob("*_base")):
            with Checkpoint.open(base_path) as base:
                config = decoder_config(base.config, dtype=base.dtype)
                try:
                    head = read_draft(draft, base, config)
                except EdgeLLMError:
                    continue
                return {"base": replace(config, feature_layers=head.feature_layers), "draft": head}
    raise AssertionError(f"{name} fits no base")


def test_limits_name_every_engine() -> None:
    names = [shape.name for shape in LIMITS.engine_shapes()]
    assert names == [
        "base.decode-b1-t1-l96",
        "base.prefill-b1-t16-l96",
        "base.verify-b1-t8-l112",
        "base.verify-b1-t16-l112",
        "draft.accept-b1-t4-l112",
        "draft.propose-b1-t1-l112",
        "draft.propose-b1-t4-l112",
        "draft.prefill-b1-t16-l96",
    ]
    plain = EngineLimits(1, 16, 96)
    assert [shape.name for shape in plain.engine_shapes()] == names[:2]
    assert (plain.kv_rows, plain.verify_sizes, plain.propose_widths, plain.tree_rows) == (112, (), (), 0)


def test_limits_hold_every_row_of_a_round() -> None:
    for limits in (LIMITS, LARGE, EngineLimits(2, 16, 64, 64, 32, 2), EngineLimits(1, 16, 64, 1, 1, 64)):
        shapes = limits.engine_shapes()
        assert len(set(shapes)) == len({shape.name for shape in shapes}) == len(shapes)
        for shape in shapes:
            assert shape.key_range <= shape.kv_rows == limits.kv_rows
            if shape.phase == "verify":
                assert shape.selected == shape.tokens
                assert shape.tokens % 8 == 0
            if shape.phase == "propose":
                assert shape.selected == shape.tokens
            if shape.model == "draft" and shape.phase in ("accept", "prefill"):
                assert shape.selected == 1
        widest = limits.tree_key_ranges[-1] - limits.kv_capacity
        assert widest >= max(limits.verify_tree_size, (limits.draft_steps - 1) * limits.draft_top_k)
        assert widest >= limits.draft_steps + 1
        assert limits.verify_tree_size <= limits.verify_sizes[-1] <= 64
    assert LARGE.verify_sizes == (8, 16, 32, 64)
    assert LARGE.propose_widths == (1, 10)
    assert LARGE.tree_key_ranges == (1024, 4096, 8192 + 64)
    assert EngineLimits(1, 16, 64, 5, 1, 6).propose_widths == ()


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
    with pytest.raises(BuildError, match="there is no draft: name one with --draft"):
        choose_limits(config, **{name: value or 1 for name, value in asked.items()})


def test_default_limits_are_the_usual_tree(tiny_checkpoint: Path) -> None:
    limits = choose_limits(read_decoder_config(tiny_checkpoint), has_draft=True)
    assert (limits.draft_top_k, limits.draft_steps, limits.verify_tree_size) == (10, 6, 60)


@pytest.mark.parametrize("name", HEADS)
def test_every_draft_engine_builds(name: str) -> None:
    pytest.importorskip("tensorrt_rtx")
    draft, attention = golden_models(name)["draft"], "native" if name in ("eagle1", "eagle31") else "composed"
    for shape in EngineLimits(1, 16, 48, 3, 3, 8).engine_shapes():
        if shape.model == "draft" and (shape.phase, shape.tokens) != ("propose", 1):
            assert len(build_plan(draft, shape, "float16", attention, "sm_86")) > 1000


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("eagle3_speculators", "composed"),  # features before the final norm
        pytest.param("eagle2_biases", "native", marks=pytest.mark.slow),  # and after it
        pytest.param("eagle2_biases", "composed", marks=pytest.mark.slow),
        pytest.param("eagle3_speculators", "native", marks=pytest.mark.slow),
    ],
)
def test_every_base_engine_with_features_builds(name: str, attention: str) -> None:
    pytest.importorskip("tensorrt_rtx")
    config = golden_models(name)["base"]
    for shape in EngineLimits(2, 16, 48, 3, 3, 8).engine_shapes():
        if (shape.phase, shape.batch) in (("decode", 1), ("prefill", 1), ("verify", 2)) and shape.model == "base":
            assert len(build_plan(config, shape, "float16", attention, "sm_86")) > 1000


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", HEADS)
def test_the_edge_of_every_engine(name: str, dtype: str) -> None:
    """Names, shapes and dtypes of inputs and outputs are those of the contract, and every weight is used."""
    pytest.importorskip("tensorrt_rtx")
    models = golden_models(name)
    draft, base = models["draft"], models["base"]
    assert isinstance(draft, DraftConfig)
    own = {spec.name: spec.shape for spec in draft_weights(draft)}
    base_weights = {spec.name: spec.shape for spec in decoder_weights(base)}
    for shape in LIMITS.engine_shapes():
        inputs, outputs, compute = network_edge(models[shape.model], shape, dtype)
        batch, tokens, rows = shape.batch, shape.tokens, shape.selected
        layer = draft.decoder if shape.model == "draft" else base
        cache = ((batch, layer.num_kv_heads, LIMITS.kv_rows, layer.head_dim), compute)
        caches = {f"{kind}_cache_{index}" for kind in "kv" for index in range(layer.num_layers)}
        expected = {
            "inputs_embeds": ((batch, tokens, 32), compute),
            "rope_rotary_cos_sin": ((batch, tokens, layer.rotary_dim), compute),
            "attention_mask": ((batch, 1, tokens, shape.key_range), "BOOL"),
            "kvcache_start_index": ((batch,), "INT32"),
            **dict.fromkeys(caches, cache),
        }
        if rows < tokens:
            expected["last_token_ids"] = ((batch, rows), "INT32")
        if shape.model == "draft":
            weights = draft_engine_weights(draft, shape.phase, own, base_weights)
            assert weights.keys() == inputs.keys() & base_weights.keys() | inputs.keys() & own.keys()
            if shape.phase == "propose":
                expected["hidden_states_from_draft"] = ((batch, tokens, 32), compute)
            else:
                expected["hidden_states_input"] = ((batch, tokens, draft.feature_size), compute)
            hidden, vocabulary = (batch, rows, 32), draft.draft_vocab_size
        else:
            weights, hidden, vocabulary = base_weights, (batch, tokens, draft.feature_size), 80
        found_weights = {key: value for key, value in inputs.items() if key not in expected}
        assert {key: value for key, value in inputs.items() if key in expected} == expected
        for key, value in found_weights.items():
            assert value == (weights[key], compute), key
        assert outputs == {
            **{f"present_{key}": cache for key in caches},
            "logits": ((batch, rows, vocabulary), "FLOAT"),
            "hidden_states": (hidden, compute),
        }


def network_edge(config: ModelConfig, shape: EngineShape, dtype: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Shape and dtype of each input and output of the TensorRT network, and the name of the compute dtype."""
    trt = load_tensorrt().module
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    strongly_typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if strongly_typed is None else 1 << int(strongly_typed))
    model_description(TensorRTOperations(trt, network, dtype, "composed"), config, shape).describe()
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    outputs = [network.get_output(index) for index in range(network.num_outputs)]
    edges = [{tensor.name: (tuple(tensor.shape), tensor.dtype.name) for tensor in group} for group in (inputs, outputs)]
    return edges[0], edges[1], {"float16": "HALF", "bfloat16": "BF16"}[dtype]


def test_a_description_of_the_wrong_model_is_refused(tiny_draft_engines: Path) -> None:
    directory = EngineDirectory.open(tiny_draft_engines)
    for shape in directory.limits.engine_shapes():
        other = directory.models["base" if shape.model == "draft" else "draft"]
        with pytest.raises(ValueError, match="cannot be described by"):
            network_digest(other, shape, "float16", "auto")
    with pytest.raises(EngineError, match="there is no draft model"):
        NumpyBackend(directory.config).load_engine(EngineShape("accept", 1, 4, 112, 112, 1, "draft"))


def test_networks_of_draft_engines_differ(tiny_draft_engines: Path) -> None:
    directory = EngineDirectory.open(tiny_draft_engines)
    assert directory.draft is not None
    draft = directory.draft.config
    shape = next(shape for shape in directory.limits.engine_shapes() if shape.phase == "accept")
    changes = [{}, {"norm_before_residual": True}, {"feed_back_normed": True}, {"fc_bias": True}, {"has_head": False}]
    changes += [{"feature_norm": kind} for kind in ("each", "whole")] + [{"generation": "1", "feature_layers": (3,)}]
    digests = {network_digest(replace(draft, **change), shape, "float16", "auto") for change in changes}
    assert len(digests) == len(changes)
    renamed = replace(draft, layer_prefix="layers.0.", generation="3.1")  # says how the tensors are called, no more
    assert network_digest(renamed, shape, "float16", "auto") == network_digest(draft, shape, "float16", "auto")


@pytest.fixture(scope="module")
def built(tiny_checkpoint: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine directory with the plans of base and draft for sm_86, not to be changed."""
    pytest.importorskip("tensorrt_rtx")
    target = tmp_path_factory.mktemp("built") / "engines"
    report = build_engine_directory(tiny_checkpoint, target, LIMITS, ["sm_86"], draft=tiny_draft)
    assert len(report.plans) == len(LIMITS.engine_shapes())
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
    for shape in LIMITS.engine_shapes():
        plan, was_built = load_or_build_plan(directory, shape, Platform("sm_86", library.flavour, library.version))
        assert not was_built
        assert len(plan) > 1000
    with directory.draft.checkpoint() as checkpoint:
        assert checkpoint.info("fc.weight").shape == (64, 128)


def test_refresh_builds_only_what_is_missing(built: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(built, tmp_path / "copy"))
    (plan,) = (copy / "plans").rglob("draft.propose-b1-t4-*.engine")
    plan.unlink()
    report = refresh_plans(copy, ["sm_86"])
    assert [built.shape.name for built in report.plans if built.seconds] == ["draft.propose-b1-t4-l112"]
    assert plan.exists()


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
        "8 of 8",
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
        (("--draft-steps", "2"), "there is no draft: name one with --draft"),
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


def test_networks_without_a_draft_are_those_of_the_first_release() -> None:
    """Plans that are in use stay valid: this digest was taken before there were drafts."""
    config = DecoderConfig("llama", 96, 64, 128, 2, 4, 2, 16, 256, 1e-5, 10000.0, 16, "float16", True)
    digest = network_digest(config, EngineShape("prefill", 1, 16, 64, 80), "float16", "auto")
    assert digest == "de6174699e7f87755c00a5799b205c50a836158e24ae1336ba13d237e20c1740"
    assert plain_values(EngineShape("decode", 1, 1, 64, 80)) == {
        "phase": "decode",
        "batch": 1,
        "tokens": 1,
        "key_range": 64,
        "kv_rows": 80,
        "selected": 1,
    }


def test_memory_of_a_draft_is_planned(tiny_draft_engines: Path) -> None:
    directory = EngineDirectory.open(tiny_draft_engines)
    assert directory.draft is not None
    specs, draft = decoder_weights(directory.config), directory.draft.config
    plain = plan_memory(directory.config, directory.limits, specs, "float16", 1000)
    plan = plan_memory(directory.config, directory.limits, specs, "float16", 1000, draft)
    names = ["weights", "KV caches", "step buffers", "logits and sampling", "slot exchange", "engine scratch"]
    assert list(plain.items) == names and directory.limits.max_batch == 2
    assert plain.items["slot exchange"] == plain.items["KV caches"] // (2 * directory.config.num_layers) // 2
    assert {name: plan.items[name] for name in plain.items} == plain.items
    stored = sum(math.prod(spec.shape) for spec in draft_weights(draft))
    assert plan.items["draft weights"] == 2 * stored
    assert plan.items["draft KV caches"] == 2 * 2 * (2 * 16) * 2 * directory.limits.kv_rows
    # at least the logits of a tree, twice, for both slots
    assert plan.items["draft buffers"] > 2 * 2 * 16 * 320 * 4
    assert plan.total == plain.total + sum(size for name, size in plan.items.items() if name.startswith("draft"))
