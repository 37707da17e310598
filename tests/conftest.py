"""Fixtures and options that all tests share."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import re
import shutil
import signal
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_multimodal
from absent_compiler import compiled  # noqa: F401 - a fixture
from built_directories import (  # noqa: F401 - fixtures
    built_directory,
    checkpoint,
    limits,
    open_copy,
    own_checkpoint,
    plain_directory,
    sharded_checkpoint,
)
from command_line import chat_engines, private_files, run_edgellm  # noqa: F401 - fixtures
from gpu_turns import gpu_turn
from hostile_runs import hostile  # noqa: F401 - a fixture
from multimodal_engines import multimodal_engines  # noqa: F401 - a fixture
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.families import decoder_config
from edgellm.engines.families.vision_config import read_vision_config
from edgellm.engines.families.vision_encoders import host_weights, vision_weights
from edgellm.engines.formats.tensors import vision_prefix
from edgellm.engines.model.adapted_projections import adapted_projections
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.model.limits import EngineLimits
from edgellm.kernels.cache_directory import user_cache_directory
from edgellm.kernels.gpu import find_gpu

# Asserts are rewritten and modules compiled once, not in every worker and every process that a test starts, also where
# the environment says that no bytecode is to be kept: that is a third of the time of all tests.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(scope="session", autouse=True)
def interrupts() -> None:
    """Take Ctrl-C as a terminal's program does, also where the tests were started with it ignored (nohup, `&`)."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


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


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--sample`, for tools that make tests slow; see `tools/bench/sanitize.py`. `--as`: see
    `tools/bench/as_device.py`."""
    parser.addoption(
        "--sample", type=int, metavar="COUNT", help="run only so many of the selected tests, evenly spread"
    )
    parser.addoption(
        "--as",
        dest="measured_as",
        metavar="NAME",
        help="in a part of the GPU, with the limits and code of a device; tests have no neighbour",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Measure as on a device where that is asked for."""
    name = config.getoption("measured_as")
    if name is not None:
        from tools.bench.as_device import ModeError, enter

        try:
            enter(name)
        except ModeError as error:
            raise pytest.UsageError(f"--as {name}: {error}") from error


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker a run of neighbours, which share fixtures, and take from the slower one at the end; with
    `--dist` as it says."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """A test for which the device that is measured has too little shared memory is skipped, with the reason."""
    report = yield
    name = item.config.getoption("measured_as")
    if name is not None and report.failed and item.get_closest_marker("gpu"):
        reason = str(call.excinfo.value).partition("\n")[0]
        if "bytes of shared memory" in reason:
            report.outcome = "skipped"
            report.longrepr = str(item.path), item.location[1] or 0, f"Skipped: not on {name}: {reason}"
    return report


#: Folders and files whose tests take a minute in all: those marked `fast`, for the edit loop.
FAST = (
    "kernels",
    "engines/backends",
    "engines/checkpoints",
    "engines/directories",
    "engines/families",
    "engines/model",
    "engines/runners",
    "drafting",
    "text",
    "test_import_rule.py",
    "test_llm.py",
    "test_sampling_params.py",
)
#: Of these the files that take longer.
NOT_FAST = (
    "drafting/test_drafting_controller.py",
    "engines/backends/test_tensorrt_operations.py",
    "engines/families/test_families_images.py",
    "engines/model/test_draft_networks.py",
    "kernels/acceptance/test_acceptance_lossless.py",
    "kernels/test_kernels_compiler.py",
    "text/test_text_template_attacks.py",
)


#: Files whose `slow` cases take seconds, which are marked `ci`.
SECONDS = ("engines/building/test_builder_workers.py", "engines/building/test_kernel_build.py")

#: Files, and tests of others, whose cases are families times drafts, or the like: a fourth of each test's cases show as
#: many of the values as so many can, the others are `slow`.
QUARTERED = (
    "commands/test_hostile_models.py",
    "commands/test_hostile_settings.py",
    "engines/backends/test_encoder_engine.py::test_equals_operations",
    "engines/backends/test_kernel_launches.py",
    "engines/backends/test_tensorrt_operations.py::test_every_phase_of_every_family_builds",
    "engines/building/test_family_builds.py::test_tensorrt_builds_what_a_family_varies",
    "engines/building/test_vision_build.py::test_every_family_builds",
    "engines/building/test_window_build.py::test_a_directory_is_built_and_its_kernels_compile",
    "engines/families/test_families_logits.py::test_every_prefix_then_single_tokens",
    "engines/families/test_recurrent_families.py::test_chunks_and_steps_leave_the_same_states",
    "engines/families/test_windows.py::test_trees_give_the_tokens_of_plain_decoding",
    "engines/quantization/test_scaling.py",
    "engines/quantization/test_quantizer.py::test_every_family_computes_nearly_what_it_did",
    "engines/speculation/test_constrained_equality.py",
    "engines/speculation/test_drafted_answers.py",
    "engines/speculation/test_eagle_equality.py",
    "engines/speculation/test_given_rounds.py",
    "engines/speculation/test_image_rounds.py",
    "engines/speculation/test_recurrent_rounds.py",
    "engines/speculation/test_suffix_answers.py",
    "kernels/acceptance/test_acceptance_lossless.py",
    "kernels/decode/test_decode_attention.py",
    "serving/test_constrained_answers.py",
    "serving/test_logprobs.py",
    "serving/test_preempted_answers.py",
    "serving/test_preempted_images.py",
    "serving/test_preempted_rows.py",
    "serving/test_preempted_turns.py",
    "serving/test_recurrent_conversations.py",
    "serving/test_recurrent_images.py",
    "serving/test_runtime.py::test_closing_frees_the_engines_in_that_thread",
    "serving/test_window_conversations.py",
    "snapshots/test_recurrent_snapshots.py",
    "tool_calls/test_single_arguments.py::test_every_call_that_the_grammar_allows_is_read_whole_and_valid",
    "vision/test_runtime_whole_images.py",
)


def a_fourth(cases: Sequence[pytest.Item]) -> list[pytest.Item]:
    """A fourth of a test's cases, at least one, and the same ones every time: one after another that which has the most
    words in its name that none before it has; of equals the checksum of the whole name decides, for each test anew."""
    words = {case: set(re.findall(r"[\w.]+", case.nodeid.partition("[")[2])) for case in cases}
    left = sorted(cases, key=lambda case: zlib.crc32(case.nodeid.encode()))
    chosen: list[pytest.Item] = []
    seen: set[str] = set()
    while 4 * len(chosen) < len(cases):
        best = max(left, key=lambda case: len(words[case] - seen))
        left.remove(best)
        chosen.append(best)
        seen |= words[best]
    return chosen


def mark_by_time(items: Sequence[pytest.Item]) -> None:
    """Mark what of many like cases is slow, what of all that is slow takes seconds, and what is fast."""
    many: dict[str, list[pytest.Item]] = {}
    for item in items:
        name = item.nodeid.removeprefix("tests/").partition("[")[0]
        path = name.partition("::")[0]
        if item.get_closest_marker("slow"):
            if path in SECONDS:
                item.add_marker(pytest.mark.ci)
        elif path in QUARTERED or name in QUARTERED:
            many.setdefault(name, []).append(item)
    for cases in many.values():
        for item in set(cases) - set(a_fourth(cases)):
            item.add_marker(pytest.mark.slow)
    for item in items:
        path = item.nodeid.removeprefix("tests/").partition("::")[0]
        if path.startswith(FAST) and path not in NOT_FAST and not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.fast)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark tests before they are selected. Of what is selected, skip tests marked `gpu` where they cannot run, with the
    reason; those that have to be alone come last."""
    mark_by_time(items)
    yield
    items.sort(key=lambda item: item.get_closest_marker("alone") is not None)
    count = config.getoption("sample")
    if count is not None and count < len(items):
        items[:] = [items[index * len(items) // count] for index in range(count)]
    if find_gpu() is None:
        reason = "no NVIDIA GPU (no driver, or it shows no device)"
    elif importlib.util.find_spec("pycuda") is None:
        reason = "pycuda is not installed: pip install '.[gpu]'"
    else:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Thousands of tests stay till the end: no collection of garbage walks them again, which took a tenth of the time
    of all."""
    gc.freeze()


@pytest.fixture(autouse=True)
def turn_on_the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests marked `gpu` share it; one that measures times or memory, marked `alone`, has it to itself."""
    if request.node.get_closest_marker("gpu"):
        with gpu_turn(request.node.get_closest_marker("alone") is not None):
            yield
    else:
        yield


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
    template, specs = TINY_TEMPLATE, decoder_weights(decoder)
    if "vision_config" in config:
        vision = read_vision_config(config)
        specs += [*vision_weights(vision), *host_weights(vision)]
        template = tiny_multimodal.TEMPLATES.get(vision.family, tiny_multimodal.TEMPLATE)
        tokenizer.add_special_tokens(list(tiny_multimodal.MARKERS))
        processor = tiny_multimodal.PREPROCESSORS[vision.family]
        (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<|im_end|>"}))
    random = np.random.default_rng(seed)
    tensors = {}
    for spec in specs:
        for name, shape in spec.parts:
            values = random.standard_normal(shape) * (0.3 if len(shape) > 1 else 0.1)
            is_tower = vision_prefix(name) is not None and not name.endswith("mm_soft_emb_norm.weight")
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
    *("qkv_proj", "gate_up_proj", "c_fc", "c_proj"),  # as some families publish them
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
