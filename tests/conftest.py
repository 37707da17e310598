"""Fixtures that all tests share."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_multimodal
from gpu_turns import gpu_turn
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from edgellm.engines.backends.numpy_backend import one_blas_thread
from edgellm.engines.building import builder, plans
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.families import decoder_config
from edgellm.engines.families.vision_config import read_vision_config
from edgellm.engines.families.vision_encoders import host_weights, vision_weights
from edgellm.engines.formats.tensors import encoder_prefix
from edgellm.engines.model.adapted_projections import adapted_projections
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.decoder import decoder_weights, token_table
from edgellm.engines.model.limits import EngineLimits
from edgellm.kernels.gpu import find_gpu
from edgellm.kernels.user_paths import user_cache_directory

#: What chooses cases, and further fixtures.
pytest_plugins = (
    "chosen_cases",
    "absent_compiler",
    "built_directories",
    "command_line",
    "embedding_models",
    "hostile_runs",
    "multimodal_engines",
    "speech_models",
    "video_models",
)

# Asserts are rewritten and modules compiled once, not in every worker and every process that a test starts, also where
# the environment says that no bytecode is to be kept: that is a third of the time of all tests.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(scope="session", autouse=True)
def interrupts() -> None:
    """Take Ctrl-C as a terminal's program does, also where the tests were started with it ignored (nohup, `&`)."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def one_thread_for_a_worker() -> Iterator[None]:
    """Where there are several workers they have the cores: OpenBLAS's threads of each, and of what it starts, wait for
    those of the others without sleeping, which was a tenth of the processor time of all tests."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    with one_blas_thread(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENBLAS_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep plans, kernels and digests of the tests out of the user's cache directory.

    The latest kernels of that one are taken along: compiling them takes 30 s of processor time.
    """
    latest = sorted((user_cache_directory() / "kernels").glob("*.cubin"), key=lambda path: path.stat().st_mtime)
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("EDGELLM_CACHE_DIR", str(folder))
        for path in latest[-1:]:
            (folder / "kernels").mkdir()
            shutil.copy(path, folder / "kernels")
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_disk() -> Iterator[None]:
    """What tests write need not outlast a loss of power: waiting for the disk was more than half of the time in which
    a directory is built."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def once_each(compute: Callable[..., Any], at_most: int) -> Callable[..., Any]:
    """A function that computes what it is asked for once, and forgets all when that is so many values."""
    computed: dict[str, Any] = {}

    def find(*asked: Any) -> Any:
        if len(computed) > at_most:
            computed.clear()
        key = repr(asked)
        if key not in computed:
            computed[key] = compute(*asked)
        return computed[key]

    return find


@pytest.fixture(scope="session", autouse=True)
def plan_workers() -> Iterator[Callable[[], int]]:
    """Without a GPU, plans are built in this process and each once: a process that builds takes a second to start, and
    a plan as long. How many such processes there would be is what this gives. What TensorRT would run of a model is
    asked once, too: that is more than half of the time of a directory without plans."""
    count = plans._worker_count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "planned_shapes", once_each(builder.planned_shapes, 512))
        if find_gpu() is None:
            patch.setattr(plans, "_worker_count", lambda: 0)
            patch.setattr(plans, "build_plan", once_each(plans.build_plan, 32))  # some MB each
        yield count


@pytest.fixture
def own_workers(plan_workers: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are built in processes of their own, which Ctrl-C ends, but where a test says otherwise."""
    monkeypatch.setattr(plans, "_worker_count", plan_workers)


@pytest.fixture(autouse=True)
def turn_on_the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests marked `gpu` share it; one that measures times or memory, marked `alone`, has it to itself."""
    if request.node.get_closest_marker("gpu"):
        with gpu_turn(request.node.get_closest_marker("alone") is not None):
            yield
    else:
        yield


@pytest.fixture(scope="session")
def queues() -> None:
    """For ranks that share a GPU: in one of its 8 queues a kernel may stand behind another rank's, which waits for it.
    All processes of a whole run together cannot have four times as many."""
    if int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")) < 32:
        pytest.skip("ranks share a GPU: run these files alone with CUDA_DEVICE_MAX_CONNECTIONS=32")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout that the tests lie in."""
    return Path(__file__).parent.parent


TINY_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "torch_dtype": "float16",
    "eos_token_id": 257,
}
TINY_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_checkpoint(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """A Hugging Face directory with random weights, a byte-level tokenizer and a chat template.

    With a `vision_config` (see `tiny_multimodal.FAMILIES`) it has a vision part, too, and the tokens around images.
    """
    config = TINY_CONFIG | overrides
    if "text_config" in overrides:
        config = overrides | {"text_config": TINY_CONFIG | overrides["text_config"], "torch_dtype": "float16"}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    decoder = decoder_config(config)
    template, specs = TINY_TEMPLATE, [*decoder_weights(decoder), *token_table(decoder)]
    if "vision_config" in config:
        vision = read_vision_config(config)
        specs += [*vision_weights(vision), *host_weights(vision)]
        template = tiny_multimodal.TEMPLATES.get(vision.family, tiny_multimodal.TEMPLATE)
        tokenizer.add_special_tokens(list(tiny_multimodal.MARKERS_OF.get(vision.family, tiny_multimodal.MARKERS)))
        processor = tiny_multimodal.PREPROCESSORS[vision.family]
        (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<|im_end|>"}))
    random = np.random.default_rng(seed)
    tensors = {}
    for spec in specs:
        for name, shape in spec.parts:
            values = random.standard_normal(shape) * (0.3 if len(shape) > 1 else 0.1)
            is_tower = encoder_prefix(name) is not None and not name.endswith("mm_soft_emb_norm.weight")
            values += (1 - (0 if is_tower else decoder.norm_offset)) * (len(shape) == 1)  # norms are by about 1
            tensors[name] = values.astype(np.float16)
    save_file(tensors, directory / "model.safetensors")
    return directory


DRAFT_VOCABULARY = 200


def write_tiny_draft(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """An EAGLE-3 head with random weights for `write_tiny_checkpoint`, as it is published: `midlayer.*`, d2t, t2d."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": TINY_CONFIG["vocab_size"],
        "draft_vocab_size": DRAFT_VOCABULARY,
        "hidden_size": TINY_CONFIG["hidden_size"],
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "eagle_aux_hidden_state_layer_ids": [1, 2],
        "eagle_aux_hidden_state_convention": "entered",
    } | overrides
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    hidden, vocabulary, draft_vocabulary = (config[key] for key in ("hidden_size", "vocab_size", "draft_vocab_size"))
    shapes = {
        "fc.weight": (hidden, 2 * hidden),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (hidden, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (hidden // 2, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (hidden // 2, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, hidden),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (96, hidden),
        "midlayer.mlp.up_proj.weight": (96, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, 96),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocabulary, hidden),
    }
    random = np.random.default_rng(seed + 1000)
    tensors = {}
    for name, shape in shapes.items():
        values = random.standard_normal(shape) * (0.3 if len(shape) > 1 else 0.1) + (len(shape) == 1)
        tensors[name] = values.astype(np.float16)
    kept = np.sort(random.choice(vocabulary, draft_vocabulary, replace=False))
    tensors["d2t"] = kept - np.arange(draft_vocabulary)
    tensors["t2d"] = np.isin(np.arange(vocabulary), kept)
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="session")
def make_draft() -> Callable[..., Path]:
    """`write_tiny_draft`: (directory, seed, **changes of config.json) to the directory."""
    return write_tiny_draft


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft head for `tiny_checkpoint`; tests that change files copy it first."""
    return write_tiny_draft(tmp_path_factory.mktemp("checkpoints") / "draft")


@pytest.fixture(scope="session")
def make_checkpoint() -> Callable[..., Path]:
    """`write_tiny_checkpoint`: (directory, seed, **changes of config.json) to the directory."""
    return write_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 0.1 M parameters; tests that change files copy it first."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.fixture(scope="session")
def tiny_engines(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine directory of it without plans: context 96 tokens, prefill in chunks of 16, two slots."""
    target = tmp_path_factory.mktemp("engines") / "tiny"
    build_engine_directory(tiny_checkpoint, target, EngineLimits(max_batch=2, prefill_chunk=16, kv_capacity=96), [])
    return target


@pytest.fixture(scope="session")
def tiny_draft_engines(tiny_checkpoint: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_engines` with the draft head: trees 4 wide, 3 deep, up to 12 nodes verified."""
    target = tmp_path_factory.mktemp("engines") / "tiny_draft"
    trees = EngineLimits(2, 16, 96, draft_top_k=4, draft_steps=3, verify_tree_size=12)
    build_engine_directory(tiny_checkpoint, target, trees, [], draft=tiny_draft)
    return target


ADAPTED_MODULES = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("qkv_proj", "gate_up_proj", "c_fc", "c_proj", "input_linear", "output_linear"),  # as some families publish them
    *("in_proj", "out_proj"),  # of recurrent layers
)


def write_adapter(
    directory: Path,
    config: DecoderConfig,
    seed: int = 0,
    rank: int = 4,
    targets: Sequence[str] = ADAPTED_MODULES,
    dtype: type = np.float32,
    **settings: Any,
) -> Path:
    """An adapter in PEFT's layout with random matrices, of one rank, for every layer."""
    random, tensors = np.random.default_rng(seed + 500), {}
    for each in adapted_projections(decoder_weights(config)):
        for module, rows in each.modules:
            if module.rsplit(".", 1)[-1] in targets:
                name = f"base_model.model.{module}.lora"
                tensors[f"{name}_A.weight"] = (random.standard_normal((rank, each.inputs)) * 0.2).astype(dtype)
                tensors[f"{name}_B.weight"] = (random.standard_normal((rows, rank)) * 0.2).astype(dtype)
    directory.mkdir(parents=True)
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets)} | settings
    (directory / "adapter_config.json").write_text(json.dumps(values))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


@pytest.fixture(scope="session")
def make_adapter() -> Callable[..., Path]:
    """`write_adapter`: (directory, config, seed, rank, targets, dtype, **settings) to the directory."""
    return write_adapter
