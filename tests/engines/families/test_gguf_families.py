"""Models of every family as llama.cpp's converter writes them: what was published, tensor by tensor, and its logits."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_models import ARCHITECTURES, rope_factors, write_model
from gguf_writing import Tensor, Typed, dense, random_blocks, write_gguf
from golden_files import golden_folder, read_tensors
from mtp_checkpoints import golden_checkpoint
from tiny_families import MIXTURES

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import load_numpy_weights
from edgellm.engines.errors import CheckpointError, UnsupportedModelError
from edgellm.engines.families import decoder_config
from edgellm.engines.families.drafts import read_mtp
from edgellm.engines.formats.gguf_file import GgufFile, open_split
from edgellm.engines.gguf.model_config import model_config
from edgellm.engines.gguf.weights import open_gguf_weights
from edgellm.engines.model.decoder import decoder_weights, token_table, unread_tensors
from edgellm.engines.model.rotary import inverse_frequencies

GOLDENS = golden_folder("decoder")
#: Whose published files say what llama.cpp's do not, and have no place for.
LOST = {
    **dict.fromkeys(("llama_dynamic", "llama_longrope_long", "llama_longrope_short"), "a scaling"),
    **dict.fromkeys(("mistral_window", "mistral_window_5", "qwen2_window_7"), "a window of all layers"),
    "smollm3_list_tied": "which layers have no rotary embedding",
    "gemma3": "a scale of attention of its own",
    "smollm3_interval": "which layers have no rotary embedding",
    "lfm2_biases_wide": "biases of convolutions",
    "nemotron_h_latent": "a width of experts: what llama.cpp calls their layers is not read",
    "granite4": "its name: without layers of Mamba-2 it is granite's",
}
#: What the converter does not write, and is read where it is there.
MORE = {
    "gemma3_old_layout": {"gemma3.attention.sliding_window_pattern": 2},
    "starcoder2": {"starcoder2.attention.sliding_window": 5},
    "lfm2_moe": {"lfm2moe.expert_weights_scale": 1.5},
    **{name: {"granitehybrid.context_length": 128} for name in ("granite4_hybrid", "granite4_moe")},
    **{name: {f"{name}.context_length": 128} for name in ("nemotron_h", "nemotron_h_moe")},
}
#: What files have no place for, and published models have all alike.
OWN = {"gpt_oss": {"swiglu_limit": 1.5}}


def _names() -> list[str]:
    found = []
    for path in sorted(GOLDENS.iterdir()):
        config = path / "config.json"
        if config.exists() and json.loads(config.read_text())["model_type"] in ARCHITECTURES and path.name not in LOST:
            found.append(path.name)
    return found


NAMES = _names()


def as_folder(checkpoint: Path, folder: Path, **more: Any) -> Path:
    """A checkpoint whose weights are in a GGUF file."""
    folder.mkdir(exist_ok=True)
    file = write_model(checkpoint, folder / "model.gguf", MORE.get(checkpoint.name), **more)
    (folder / "config.json").write_text(json.dumps(model_config(open_split(file)) | OWN.get(checkpoint.name, {})))
    for name in ("expected.safetensors", "generation_config.json"):
        if (checkpoint / name).exists():
            (folder / name).write_bytes((checkpoint / name).read_bytes())
    return folder


def test_every_architecture_is_tried() -> None:
    kinds = {json.loads((GOLDENS / name / "config.json").read_text())["model_type"] for name in NAMES}
    assert kinds == ARCHITECTURES.keys() - {"smollm3"}
    assert len(NAMES) > 20


@pytest.mark.parametrize("name", NAMES)
def test_the_model_is_what_was_published(tmp_path: Path, name: str) -> None:
    folder = as_folder(GOLDENS / name, tmp_path / "model")
    with Checkpoint.open(folder) as found, Checkpoint.open(GOLDENS / name) as published:
        expected = decoder_config(published.config, published.generation_config, published.dtype)
        config = decoder_config(found.config, found.generation_config, found.dtype)
        same = {"rope_scaling": config.rope_scaling, "family": config.family}
        if expected.family == "gemma4_text":  # whose values go beyond float16, which the tiny one has
            same["dtype"] = "bfloat16"
        for name in ("residual_scale", "rope_theta"):  # a root's multiple, of MiniCPM, and a power, of Hunyuan
            same[name] = getattr(config, name)
            assert same[name] == pytest.approx(getattr(expected, name), rel=1e-7)
        assert replace(config, **same) == replace(expected, **same)
        specs, unread = [*decoder_weights(config), *token_table(config)], unread_tensors(config)
        np.testing.assert_allclose(inverse_frequencies(config, 20)[0], inverse_frequencies(expected, 20)[0], rtol=2e-7)
        assert inverse_frequencies(config, 20)[1] == pytest.approx(inverse_frequencies(expected, 20)[1])
        found.check(specs, unread)
        for tensor, shape in (part for spec in specs for part in spec.parts):
            values, wanted = _values(found, tensor), _values(published, tensor)
            assert values.shape == tuple(shape)
            tolerance = 1e-6 if tensor.endswith(("norm.weight", "A_log")) else 0  # 1 was added, a logarithm undone
            np.testing.assert_allclose(values, wanted, rtol=0, atol=tolerance)


def _values(checkpoint: Checkpoint, name: str) -> np.ndarray:
    values, dtype = checkpoint.raw(name), checkpoint.info(name).dtype
    return (values.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else values.astype(np.float32)


def test_gemma3_takes_the_scale_of_its_size(tmp_path: Path) -> None:
    """The published file has one of its own; that of the largest follows from the hidden size."""
    file = write_model(GOLDENS / "gemma3", tmp_path / "model.gguf")
    assert decoder_config(model_config(open_split(file))).attention_scale == 16**-0.5
    large = {"gemma3.block_count": 62, "gemma3.attention.sliding_window_pattern": [False] * 62}
    write_model(GOLDENS / "gemma3", file, more=large)
    assert decoder_config(model_config(open_split(file))).attention_scale == (32 / 4) ** -0.5


@pytest.mark.parametrize("window", [None, 0])
def test_gemma3_without_a_window_has_none_in_any_layer(tmp_path: Path, window: int | None) -> None:
    file = write_model(GOLDENS / "gemma3", tmp_path / "model.gguf", {"gemma3.attention.sliding_window": window})
    assert model_config(open_split(file))["layer_types"] == ["full_attention"] * 3


def test_smollm3_has_no_rotary_embedding_in_every_fourth_layer(tmp_path: Path) -> None:
    file = write_model(GOLDENS / "smollm3_interval", tmp_path / "model.gguf", more={"smollm3.block_count": 9})
    assert decoder_config(model_config(open_split(file))).nope_layers == (3, 7)
    weights, (_, shape, data) = (
        open_gguf_weights(file)[0],
        read_tensors(GOLDENS / "smollm3_interval/model.safetensors")["model.layers.1.self_attn.q_proj.weight"],
    )
    found = weights.tensors["model.layers.1.self_attn.q_proj.weight"]
    assert (list(found.shape), weights.bytes_of(found).tobytes()) == (shape, data)


def test_starcoder2_has_its_window_where_files_do_not_say_it(tmp_path: Path) -> None:
    file = write_model(GOLDENS / "starcoder2", tmp_path / "model.gguf", more={"starcoder2.attention.sliding_window": 0})
    config = decoder_config(model_config(open_split(file)))
    assert (config.sliding_window, set(config.layer_kinds)) == (4096, {"window"})


def _first_files(tmp_path: Path, name: str, lacks: tuple[str, ...]) -> dict[str, Any]:
    """What the configuration says of a golden model whose file lacks keys, as those of the first converters do."""
    kind = ARCHITECTURES[name]
    file = write_model(GOLDENS / name, tmp_path / "model.gguf", more={f"{kind}.{key}": None for key in lacks})
    return model_config(open_split(file))


def test_gemma2_has_its_window_and_bounds_where_the_first_files_do_not_say_them(tmp_path: Path) -> None:
    lacks = ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
    config = decoder_config(_first_files(tmp_path, "gemma2", lacks))
    assert (config.sliding_window, config.scores_cap, config.logits_cap) == (4096, 50, 30)


def test_minicpm_has_its_scales_where_the_first_files_do_not_say_them(tmp_path: Path) -> None:
    config = decoder_config(_first_files(tmp_path, "minicpm", ("embedding_scale", "residual_scale", "logit_scale")))
    scales = config.embedding_scale, config.residual_scale * config.num_layers**0.5, config.logits_scale
    assert scales == pytest.approx((12, 1.4, 256 / config.hidden_size))


def _minimal(tmp_path: Path, tensors: dict[str, Any] | None = None, **changed: Any) -> Path:
    """A Llama of one layer without tensors but the embedding."""
    own = {"block_count": 1, "embedding_length": 8, "feed_forward_length": 8, "context_length": 64}
    own |= {"attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    metadata = {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in own.items()}
    given = {"token_embd.weight": dense(np.zeros((6, 8), np.float32))} | (tensors or {})
    metadata |= {key.replace("__", "."): value for key, value in changed.items()}
    return write_gguf(tmp_path / "m.gguf", {key: value for key, value in metadata.items() if value is not None}, given)


def test_what_files_leave_out_and_numbers_as_they_were_meant(tmp_path: Path) -> None:
    config = model_config(open_split(_minimal(tmp_path)))
    assert config == {
        "model_type": "llama",
        "vocab_size": 6,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "rope_parameters": {"rope_theta": 10000.0},
    }


@pytest.mark.parametrize("key", ["scaling__factor", "scale_linear"])
def test_a_factor_alone_is_that_of_positions(tmp_path: Path, key: str) -> None:
    config = model_config(open_split(_minimal(tmp_path, **{f"llama__rope__{key}": 8.0})))
    assert config["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    ("changed", "error", "expected"),
    [
        ({"general__architecture": "mamba"}, UnsupportedModelError, "is 'mamba'; supported are llama, mistral3, qwen2"),
        ({"general__architecture": "mamba"}, UnsupportedModelError, "Nearest to it is Granite 4 H or Nemotron 3 Nano"),
        ({"general__architecture": "phimoe"}, UnsupportedModelError, "Nearest to it is Phi-4-mini"),
        ({"general__architecture": None}, UnsupportedModelError, "is ''; supported are"),
        ({"general__architecture": "gemma4-assistant"}, UnsupportedModelError, "An assistant drafts from keys and"),
        ({"general__architecture": 5}, CheckpointError, r"'general\.architecture' is 5, expected a text"),
        ({"llama__block_count": "x"}, CheckpointError, r"'llama\.block_count' is 'x', expected a whole number"),
        ({"llama__block_count": None}, CheckpointError, r"'llama\.block_count' is None"),
        ({"llama__attention__head_count": [2, 2]}, CheckpointError, "expected a whole number for each of 1 layers"),
        (
            {"llama__attention__value_length": 9},
            CheckpointError,
            r"value_length' is 9, expected 'attention\.key_length'",
        ),
        ({"tokenizer__ggml__tokens": [1]}, CheckpointError, r"'tokenizer\.ggml\.tokens' is 1, expected texts"),
    ],
)
def test_metadata_that_is_wrong(tmp_path: Path, changed: Any, error: type[Exception], expected: str) -> None:
    with pytest.raises(error, match=expected):
        model_config(open_split(_minimal(tmp_path, **changed)))


WRONG = ("x", True, -1, 0, 1, 3, 1 << 31, 1e30, float("nan"), [], [1, 2], ["a"], [True, False])


@pytest.mark.parametrize(
    "name",
    ["llama_llama3", "gemma3", "qwen3_5_text", "lfm2", "phi3", "ministral3", "granite_tied", "gpt_oss", "gemma4"],
)
def test_no_value_of_metadata_does_more_than_an_error(tmp_path: Path, name: str) -> None:
    file = write_model(GOLDENS / name, tmp_path / "model.gguf")
    tried, refused = 0, 0
    for key in open_split(file)[0].metadata:
        for wrong in WRONG:
            changed = Typed(10, (1 << 31).to_bytes(8, "little")) if wrong == 1 << 31 else wrong
            write_model(GOLDENS / name, file, more={key: changed})
            tried += 1
            try:
                config = decoder_config(json.loads(json.dumps(model_config(open_split(file)))))
                opened = open_gguf_weights(file)[0]
                inverse_frequencies(config, 32)
                for info in opened.tensors.values():
                    opened.bytes_of(info)
            except (CheckpointError, UnsupportedModelError):
                refused += 1
    assert tried / 2 < refused < tried


@pytest.mark.parametrize(("factor", "size", "theta"), [(8.0, 128, 500000.0), (32.0, 64, 500000.0)])
def test_factors_of_llama_3_are_known_again(tmp_path: Path, factor: float, size: int, theta: float) -> None:
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    factors = rope_factors({"rope_scaling": scaling, "rope_theta": theta, "head_dim": size})
    assert factors is not None
    file = _minimal(tmp_path, {"rope_freqs.weight": dense(factors)}, llama__rope__freq_base=theta)
    assert model_config(open_split(file))["rope_parameters"] == {"rope_theta": theta} | scaling


def test_experts_are_refused(tmp_path: Path) -> None:
    config = model_config(open_split(_minimal(tmp_path, llama__expert_count=8)))
    with pytest.raises(UnsupportedModelError, match="mixture of experts"):
        decoder_config(config)


@pytest.mark.parametrize(
    ("name", "more", "expected"),
    [
        ("qwen3", {"qwen3.attention.causal": False}, "its tokens see later ones"),
        ("lfm2", {"lfm2.attention.sliding_window": 5}, "its layers look back on a window"),
        ("lfm2_moe", {"lfm2moe.expert_gating_func": 1}, "'expert_gating_func' of its experts is 1, supported is 2"),
        ("olmoe", {"olmoe.expert_weights_scale": 2.5}, r"'expert_weights_scale' of its experts is 2\.5, supp"),
        ("granitemoe", {"granitemoe.expert_shared_feed_forward_length": 16}, "it has a shared expert"),
        ("olmoe", {"olmoe.expert_used_count": 7}, "num_experts_per_tok is 7, but there are 6 experts"),
        ("gemma4_moe", {"gemma4.expert_gating_func": 2}, "'expert_gating_func' of its experts is 2, supported is 1"),
        (
            "gemma4",
            {"gemma4.feed_forward_length": [24] * 5 + [48]},
            "expected one, or twice that in each of the last 3",
        ),
        ("gemma4", {"gemma4.attention.sliding_window_pattern": None}, "expected true or false for each of 6 layers"),
        ("gemma4", {"gemma4.rope.dimension_count_swa": 4}, r"is 4, expected 'attention\.key_length_swa', 8"),
        ("gemma4", {"gemma4.attention.value_length_swa": 4}, r"is 4, expected 'attention\.key_length_swa', 8"),
        ("qwen3", {"qwen3.rope.dimension_count": 8}, r"partial_rotary_factor is 0\.5, which is not supported"),
    ],
)
def test_what_is_not_supported_of_an_architecture(tmp_path: Path, name: str, more: Any, expected: str) -> None:
    file = write_model(GOLDENS / name, tmp_path / "model.gguf", more)
    with pytest.raises((UnsupportedModelError, CheckpointError), match=expected):
        decoder_config(model_config(open_split(file)))


def test_tensors_that_are_wrong(tmp_path: Path) -> None:
    def opened(**tensors: Any) -> None:
        names = {name.replace("__", "."): value for name, value in tensors.items()}
        open_gguf_weights(_minimal(tmp_path, names))

    with pytest.raises(CheckpointError, match=r"'blk\.0\.attn_q\.weight' has 6 rows, expected a multiple of 4"):
        opened(blk__0__attn_q__weight=dense(np.zeros((6, 8), np.float32)))
    with pytest.raises(CheckpointError, match=r"'blk\.0\.attn_q\.bias' has the type q8_0, expected one of float32"):
        opened(blk__0__attn_q__bias=Tensor("q8_0", (32,), bytes(34)))
    with pytest.raises(CheckpointError, match="two of its tensors are one and the same"):
        opened(model__embed_tokens__weight=dense(np.zeros((6, 8), np.float32)))
    path = _minimal(tmp_path, {"blk.0.strange.weight": dense(np.zeros(4, np.float32))})
    assert "model.layers.0.strange.weight" in open_gguf_weights(path)[0].tensors


def test_a_head_for_multi_token_prediction_comes_along(tmp_path: Path) -> None:
    source = golden_checkpoint("qwen3_5_text", tmp_path / "published")
    with Checkpoint.open(as_folder(source, tmp_path / "model")) as found, Checkpoint.open(source) as published:
        config = decoder_config(found.config)
        assert read_mtp(found, config) == read_mtp(published, config)
        own = [tensor for tensor in published.tensors if tensor.startswith("mtp.")]
        assert len(own) > 10
        for tensor in own:
            np.testing.assert_allclose(_values(found, tensor), _values(published, tensor), rtol=0, atol=1e-6)


def test_experts_are_slices_of_their_stacks(tmp_path: Path) -> None:
    """In files of their own, too: gate and up of gpt-oss are in two of them."""
    file = write_model(GOLDENS / "gpt_oss", tmp_path / "model.gguf")
    whole, tensors = open_gguf_weights(file)[0], {}
    for name, info in GgufFile(file).tensors.items():
        tensors[name] = Tensor(info.dtype, info.shape, GgufFile(file).bytes_of(info).tobytes())
    parts = [{name: each for name, each in tensors.items() if ("ffn_up" in name) == later} for later in (False, True)]
    for number, own in enumerate(parts):
        metadata = (GgufFile(file).metadata if number == 0 else {}) | {
            "split.no": Typed(2, bytes([number, 0])),
            "split.count": Typed(2, bytes([2, 0])),
            "split.tensors.count": Typed(5, len(tensors).to_bytes(4, "little")),
        }
        write_gguf(tmp_path / f"split-0000{number + 1}-of-00002.gguf", metadata, own)
    first, second = open_gguf_weights(tmp_path / "split-00001-of-00002.gguf")
    assert not second.tensors and first.tensors.keys() == whole.tensors.keys()
    name = "model.layers.1.mlp.experts.3.gate_up_proj.weight"
    info = first.tensors[name]
    assert (info.name, info.shape, info.nbytes) == (name, (32, 24), 2 * 32 * 24)
    assert not whole.bytes_of(whole.tensors[name.replace("gate_up", "down")]).flags.writeable  # nothing was copied
    for name, info in whole.tensors.items():
        np.testing.assert_array_equal(first.bytes_of(first.tensors[name]), whole.bytes_of(info))


@pytest.mark.parametrize("kind", ["q8_0", "dense"])
def test_experts_are_read_where_they_are_used(make_checkpoint: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    """By NumPy, once the file is closed; one that was shortened since is an error, and no end of the process."""
    random = np.random.default_rng(1)

    def kinds(name: str, values: np.ndarray) -> Tensor | None:
        return random_blocks(kind, values.shape, random) if "_exps" in name and kind != "dense" else None

    folder = as_folder(make_checkpoint(tmp_path / "olmoe", **MIXTURES["olmoe"]), tmp_path / "model", kinds=kinds)
    with Checkpoint.open(folder) as checkpoint:
        spec = next(each for each in decoder_weights(decoder_config(checkpoint.config)) if each.experts)
        experts = load_numpy_weights(checkpoint, [spec])[spec.name]
    assert experts.of(3).any()
    os.truncate(folder / "model.gguf", 4096)
    with pytest.raises(CheckpointError, match=r"model\.gguf was changed while it was read"):
        experts.of(3)


@pytest.mark.parametrize(
    ("name", "stack", "change", "problem"),
    [
        (
            "olmoe",
            "blk.1.ffn_up_exps.weight",
            lambda each: None,
            "missing: model.layers.1.mlp.experts.0.up_proj.weight",
        ),
        ("olmoe", "blk.1.ffn_gate_inp.weight", lambda each: each[:4], r"gate\.weight is \[4, 24\], expected \[6, 24\]"),
        ("olmoe", "blk.1.ffn_up_exps.weight", lambda each: each[:4], "missing: model.layers.1.mlp.experts.4.up_proj"),
        ("olmoe", "blk.0.ffn_up_exps.weight", lambda each: each[0], r"unknown: blk\.0\.ffn_up_exps\.weight"),
        ("olmoe", "blk.0.ffn_up_exps.bias", lambda each: np.ones((6, 16)), r"unknown: blk\.0\.ffn_up_exps\.bias"),
        ("gpt_oss", "blk.0.ffn_up_exps.weight", lambda each: each[:, :8], r"unknown: blk\.0\.ffn_up_exps\.weight"),
        ("gpt_oss", "blk.0.ffn_gate_exps.bias", lambda each: None, r"unknown: blk\.0\.ffn_up_exps\.bias"),
        ("olmoe", "blk.0.ffn_up_exps.weight", lambda each: np.zeros((5000, 1, 1)), r"unknown: blk\.0\.ffn_up_exps"),
    ],
)
def test_stacks_that_do_not_fit_are_named(tmp_path: Path, name: str, stack: str, change: Any, problem: str) -> None:
    folder = as_folder(GOLDENS / name, tmp_path / "model")
    file = GgufFile(folder / "model.gguf")
    tensors = {key: Tensor(info.dtype, info.shape, file.bytes_of(info).tobytes()) for key, info in file.tensors.items()}
    old = tensors.pop(stack, None)
    values = change(np.zeros(old.shape if old else 1, np.float32))
    if values is not None:
        tensors[stack] = dense(values.astype(np.float32))
    write_gguf(folder / "model.gguf", file.metadata, tensors)
    with Checkpoint.open(folder) as found, pytest.raises(CheckpointError, match=problem):
        found.check(decoder_weights(decoder_config(found.config)))


@pytest.mark.parametrize("name", ["llama_biases_head_dim_10", "lfm2", "qwen2", "olmo2"])
def test_q_k_and_v_that_were_written_as_one(tmp_path: Path, name: str) -> None:
    """As the converter does with `--fuse-qkv`; some are permuted, of some two layers of three have none."""
    file = GgufFile(as_folder(GOLDENS / name, tmp_path / "model") / "model.gguf")
    tensors = {key: Tensor(info.dtype, info.shape, file.bytes_of(info).tobytes()) for key, info in file.tensors.items()}
    for layer in range(3):
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"blk.{layer}.attn_{part}.{kind}", None) for part in "qkv"]
            if (first := parts[0]) is not None:
                shape = sum(part.shape[0] for part in parts), *first.shape[1:]
                one = Tensor(first.kind, shape, b"".join(part.data for part in parts))
                tensors[f"blk.{layer}.attn_qkv.{kind}"] = one
    (tmp_path / "fused").mkdir()
    write_gguf(tmp_path / "fused/model.gguf", file.metadata, tensors)
    assert model_config(open_split(tmp_path / "fused/model.gguf")) == model_config([file])
    fused, apart = (open_gguf_weights(tmp_path / each / "model.gguf")[0] for each in ("fused", "model"))
    assert fused.tensors.keys() == apart.tensors.keys()
    for key, info in apart.tensors.items():
        assert (fused.tensors[key].shape, fused.tensors[key].nbytes) == (info.shape, info.nbytes)
        np.testing.assert_array_equal(fused.bytes_of(fused.tensors[key]), apart.bytes_of(info))


@pytest.mark.parametrize(
    ("name", "architecture"), [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl"), ("qwen3_moe", "qwen3vlmoe")]
)
def test_language_models_of_vision_models_are_those_of_texts(tmp_path: Path, name: str, architecture: str) -> None:
    file = GgufFile(write_model(GOLDENS / name, tmp_path / "model.gguf"))
    tensors = {key: Tensor(info.dtype, info.shape, file.bytes_of(info).tobytes()) for key, info in file.tensors.items()}
    texts = ARCHITECTURES[name]
    metadata = {key.replace(f"{texts}.", f"{architecture}."): value for key, value in file.metadata.items()}
    metadata |= {"general.architecture": architecture, f"{architecture}.rope.dimension_sections": [2, 1, 1, 0]}
    other = write_gguf(tmp_path / "other.gguf", metadata, tensors)
    assert model_config(open_split(other)) == model_config([file])
    assert open_gguf_weights(other)[0].tensors.keys() == open_gguf_weights(file.path)[0].tensors.keys()
