"""The networks of drafting, base and draft: which a directory's limits ask for, their edges, built by TensorRT-RTX."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from golden_files import golden_folder

from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.backends.plan_files import network_digest
from edgellm.engines.backends.platform import load_tensorrt
from edgellm.engines.backends.tensorrt_operations import TensorRTOperations, build_plan
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import EdgeLLMError, EngineError
from edgellm.engines.families import decoder_config
from edgellm.engines.families.drafts import read_draft
from edgellm.engines.families.programs import ModelConfig, model_program
from edgellm.engines.formats.strict_formats import plain_values
from edgellm.engines.model.config import DecoderConfig, DraftConfig
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.model.draft_decoder import draft_engine_weights, draft_weights
from edgellm.engines.model.graph import ProgramGraph
from edgellm.engines.model.limits import EngineLimits, EngineShape

GOLDENS = golden_folder("draft")
HEADS = sorted(path.name for path in GOLDENS.iterdir() if not path.name.endswith("_base"))
LIMITS = EngineLimits(1, 16, 96, draft_top_k=4, draft_steps=3, verify_tree_size=12)
LARGE = EngineLimits(8, 512, 8192, draft_top_k=10, draft_steps=6, verify_tree_size=60)


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
        "base.verify-b1-t2-l112",
        "base.verify-b1-t4-l112",
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
                assert shape.tokens % 8 == 0 or shape.tokens in (2, 4)
            if shape.phase == "propose":
                assert shape.selected == shape.tokens
            if shape.model == "draft" and shape.phase in ("accept", "prefill"):
                assert shape.selected == 1
        widest = limits.tree_key_ranges[-1] - limits.kv_capacity
        assert widest >= max(limits.verify_tree_size, (limits.draft_steps - 1) * limits.draft_top_k)
        assert widest >= limits.draft_steps + 1
        assert limits.verify_tree_size <= limits.verify_sizes[-1] <= 64
    assert LARGE.verify_sizes == (2, 4, 8, 16, 32, 64)
    assert EngineLimits(1, 16, 64, 1, 1, 2).verify_sizes == (2, 4, 8)
    assert LARGE.propose_widths == (1, 10)
    assert LARGE.tree_key_ranges == (1024, 4096, 8192 + 64)
    assert EngineLimits(1, 16, 64, 5, 1, 6).propose_widths == ()


@pytest.mark.parametrize("name", HEADS)
def test_every_draft_engine_builds(name: str) -> None:
    pytest.importorskip("tensorrt_rtx")
    draft, attention = golden_models(name)["draft"], "native" if name in ("eagle1", "eagle31") else "composed"
    for shape in EngineLimits(1, 16, 48, 3, 3, 8).engine_shapes():
        if shape.model == "draft" and (shape.phase, shape.tokens) != ("propose", 1):
            assert len(build_plan(draft, shape, "float16", attention, "sm_86")) > 1000


@pytest.mark.slow
def test_every_base_engine_with_features_builds() -> None:
    pytest.importorskip("tensorrt_rtx")
    config = golden_models("eagle3_speculators")["base"]
    for shape in EngineLimits(2, 16, 48, 3, 3, 8).engine_shapes():
        if (shape.phase, shape.batch) in (("decode", 1), ("prefill", 1), ("verify", 2)) and shape.model == "base":
            assert len(build_plan(config, shape, "float16", "composed", "sm_86")) > 1000


@pytest.mark.parametrize("name", HEADS)
def test_the_edge_of_every_engine(name: str) -> None:
    """Names, shapes and dtypes of inputs and outputs are those of the contract, and every weight is used."""
    pytest.importorskip("tensorrt_rtx")
    models, dtype = golden_models(name), "bfloat16" if name == "eagle31" else "float16"
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
    ProgramGraph(TensorRTOperations(trt, network, dtype, "composed"), model_program(config, shape)).run()
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    outputs = [network.get_output(index) for index in range(network.num_outputs)]
    edges = [{tensor.name: (tuple(tensor.shape), tensor.dtype.name) for tensor in group} for group in (inputs, outputs)]
    return edges[0], edges[1], {"float16": "HALF", "bfloat16": "BF16"}[dtype]


def test_a_description_of_the_wrong_model_is_refused(tiny_draft_engines: Path) -> None:
    directory = EngineDirectory.open(tiny_draft_engines)
    for shape in directory.limits.engine_shapes():
        other = directory.models["base" if shape.model == "draft" else "draft"]
        with pytest.raises(ValueError, match="is no engine of a"):
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


def test_networks_without_a_draft_are_those_that_plans_in_use_were_built_from() -> None:
    """Who changes this digest has all plans built anew, and says so in the changelog."""
    config = DecoderConfig("llama", 96, 64, 128, 2, 4, 2, 16, 256, 1e-5, 10000.0, 16, "float16", True)
    digest = network_digest(config, EngineShape("prefill", 1, 16, 64, 80), "float16", "auto")
    assert digest == "1da0cd50e2680a894f0dcc33ea308a2b24e45a49939af879489f00ccdd3d2d0a"
    assert plain_values(EngineShape("decode", 1, 1, 64, 80)) == {
        "phase": "decode",
        "batch": 1,
        "tokens": 1,
        "key_range": 64,
        "kv_rows": 80,
        "selected": 1,
    }
