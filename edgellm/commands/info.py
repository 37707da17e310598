"""`edgellm info`: what an engine directory is, and whether it is whole."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from edgellm.commands.descriptions import (
    draft_in_words,
    draft_limits_in_words,
    executor_facts,
    executors_in_words,
    kv_cache_in_words,
    lora_limits_in_words,
    mixers_in_words,
    vision_in_words,
    vision_limits_in_words,
)
from edgellm.commands.options import ModelOptions
from edgellm.commands.table import option, takes_options
from edgellm.engines.backends.device_layouts import PackedLayouts, model_layouts, packed_memory
from edgellm.engines.backends.executors import planned_shapes
from edgellm.engines.backends.plan_files import (
    Platform,
    cached_plans_path,
    directory_network,
    find_plan,
    platforms_with_plans,
    present_platform,
    refresh_command,
)
from edgellm.engines.backends.planned_engines import planned_engines
from edgellm.engines.checkpoints.weight_files import HEAD_FILE
from edgellm.engines.checkpoints.weights import described_parts
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.directories.engine_parts import is_weight_file
from edgellm.engines.errors import EngineError
from edgellm.engines.families.vision_encoders import host_weights, vision_weights
from edgellm.engines.formats.digests import FileDigest
from edgellm.engines.formats.strict_formats import plain_values
from edgellm.engines.model.config import DecoderConfig, DraftConfig
from edgellm.engines.model.decoder import as_published, decoder_weights, head_format
from edgellm.engines.model.draft_decoder import draft_weights
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.memory_plan import MEBIBYTE, plan_memory, recurrent_bytes, token_bytes
from edgellm.engines.model.states import decoder_states
from edgellm.llm import SHIPPED_MODEL
from edgellm.multimodal.vision_runner import vision_memory
from edgellm.snapshots.preempted_rows import KEPT_ROWS, PREEMPTION_BUDGET
from edgellm.snapshots.state_cache import KEPT_STATES, STATE_BUDGET
from edgellm.tool_calls.formats import checkpoint_format


@dataclass(frozen=True)
class InfoOptions(ModelOptions):
    """All options of the command."""

    verify: bool = option("Hash every file; exit with 1 on any difference.", default=False)
    as_json: bool = option("Print one JSON object.", "--json", default=False)


@takes_options
def info(given: InfoOptions) -> None:
    """Say what an engine directory is: model, limits, memory, plans; --verify hashes every file.

    Example: edgellm info robot --verify
    """
    facts = directory_facts(given.chosen_model() or SHIPPED_MODEL, given.verify)
    if given.as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        for line in _lines(facts):
            typer.echo(line)
    if facts["differences"]:
        raise typer.Exit(1)


def directory_facts(path: Path, verify: bool) -> dict[str, Any]:
    """All that there is to say, as JSON values; sizes in bytes.

    `differences` lists what is not as described: with `verify` every file and plan is hashed, without it weights only
    where their digest is remembered. Raises EngineDirectoryError for a directory that cannot be described at all.
    """
    directory = EngineDirectory.read(path)
    config, limits = directory.config, directory.limits
    specs, draft, vision = decoder_weights(config), directory.draft, directory.vision
    differences = directory.differences(verify, hash_weights=False)
    packed = {} if differences else _packed_facts(directory)
    has_packed = not differences and directory.packed_names
    layouts, refusal = _gpu_layouts(directory) if has_packed else ({}, None)
    computed = directory.dtype if refusal is None else "float32"  # in which NumPy runs what GPUs do not
    vision_bytes = None
    if vision is not None:
        vision_bytes = vision_memory(vision.config, limits.image_rows, computed)
    known = [] if refusal is not None else _known_platforms(directory, layouts)
    platforms = [_platform_facts(directory, layouts, platform) for platform in known]
    described = directory.models, limits, directory.dtype
    capabilities = {platform.compute_capability for platform in known}
    if verify:
        differences += [problem for platform in platforms for problem in platform["problems"]]
    facts = {
        "path": str(directory.path),
        "created_with": directory.created_with,
        "config": asdict(config),
        "parameters": sum(math.prod(spec.shape) for spec in decoder_weights(as_published(config))),
        "dtype": directory.dtype,
        "attention": directory.attention,
        "tool_format": directory.tool_format or checkpoint_format(directory.path, None),
        "limits": plain_values(limits),
        "weights": {name: directory.files[name].size for name in directory.weight_files},
        "executors": {name: executor_facts(*described, name, layouts) for name in sorted(capabilities)},
        "plans": platforms,
        "packed": packed,
        "gpu_refusal": refusal,
        "heads": _head_facts(directory),
        "memory": plan_memory(
            config,
            limits,
            specs,
            computed,
            {
                **packed_memory(directory.models, layouts, directory.dtype),
                **(planned_engines(directory.models, limits, computed, layouts) if refusal is None else {}),
            },
            draft=None if draft is None else draft.config,
            adapters=limits.has_lora,
            vision_memory=vision_bytes,
        ).items,
        "host_memory": {
            KEPT_ROWS: PREEMPTION_BUDGET,
            "token": token_bytes(config, limits, computed, None if draft is None else draft.config),
            **({KEPT_STATES: STATE_BUDGET, "state": state} if (state := _state_size(config)) else {}),
        },
        "verified": verify,
        "differences": differences,
    }
    if draft is not None:
        facts["draft"] = {
            "config": asdict(draft.config),
            "parameters": sum(math.prod(spec.shape) for spec in draft_weights(draft.config)),
            "weights": {name: file.size for name, file in draft.files.items() if is_weight_file(name)},
        }
    if vision is not None:
        weights = [*vision_weights(vision.config), *host_weights(vision.config)]
        facts["vision"] = {
            "config": asdict(vision.config),
            "parameters": sum(math.prod(spec.shape) for spec in weights),
            "max_image_patches": vision.config.patches_within(limits.image_rows[-1]),
            "weights": {name: file.size for name, file in (vision.files or {}).items() if is_weight_file(name)},
        }
    if limits.has_lora:
        facts["lora"] = {
            name: {"rank": adapter.rank, "digest": adapter.digest, "bytes": sum(f.size for f in adapter.files.values())}
            for name, adapter in directory.adapters.items()
        }
    return facts


def _packed_facts(directory: EngineDirectory) -> dict[str, Any]:
    """Of each model with packed weights: the method, how many weights are stored how, their bytes, what is not used."""
    facts = {}
    for model, quantization in directory.packed_models().items():
        if model == "draft" and directory.draft is not None:
            checkpoint, specs = directory.draft.checkpoint(), draft_weights(directory.draft.config)
        elif model == "vision" and directory.vision is not None:
            checkpoint, specs = directory.vision.checkpoint(), vision_weights(directory.vision.config)
        else:
            checkpoint, specs = directory.checkpoint(), decoder_weights(directory.config)
        with checkpoint:
            parts = described_parts(checkpoint, specs)
        stored = {words: {"weights": count, "bytes": size} for words, (count, size) in parts.items()}
        facts[model] = {"method": quantization.method, "stored": stored, "notes": list(quantization.notes)}
    return facts


def _head_facts(directory: EngineDirectory) -> dict[str, Any]:
    """Of each packed head, by its model: its format, the bytes of its file, and whether tokens are looked up in it."""
    parts: dict[str, tuple[DecoderConfig | DraftConfig, Mapping[str, FileDigest]]]
    parts = {"base": (directory.config, directory.files)}
    if directory.draft is not None:
        parts["draft"] = (directory.draft.config, directory.draft.files)
    return {
        model: {
            "head": config.head,
            "format": str(head_format(config.head, config.hidden_size, directory.dtype)),
            "bytes": files[HEAD_FILE].size,
            "embeds": model == "base" and directory.config.embeds_by_head,
        }
        for model, (config, files) in parts.items()
        if HEAD_FILE in files
    }


def _gpu_layouts(directory: EngineDirectory) -> tuple[PackedLayouts, str | None]:
    """What packed weights are in a GPU's memory, or why GPUs do not run the model."""
    try:
        return model_layouts(directory.models, directory.checkpoints, directory.dtype), None
    except EngineError as error:
        return {}, str(error)


def _known_platforms(directory: EngineDirectory, packed: PackedLayouts) -> list[Platform]:
    """Those with plans in the directory or in the user's cache, and this machine's."""
    places = [directory.plans_path]
    shapes = planned_shapes(directory.models, directory.limits, directory.dtype, "sm_80", True, packed)
    for shape in shapes:  # which are the same for all that have kernels
        places.append(cached_plans_path(directory_network(directory, shape)))
    found = {platform for place in places for platform, plans in platforms_with_plans(place) if plans}
    present = present_platform()
    return sorted(found | ({present} if present else set()), key=lambda platform: platform.folder)


def _platform_facts(directory: EngineDirectory, packed: PackedLayouts, platform: Platform) -> dict[str, Any]:
    models, limits, dtype = directory.models, directory.limits, directory.dtype
    needed = planned_shapes(models, limits, dtype, platform.compute_capability, False, packed)
    sizes: dict[EngineShape, int] = {}
    problems: list[str] = []
    for shape in planned_shapes(models, limits, dtype, platform.compute_capability, True, packed):
        plan, refusals = find_plan(directory, shape, platform, directory_network(directory, shape))
        problems += refusals
        if plan is not None:
            sizes[shape] = len(plan)
    found, present = sum(shape in sizes for shape in needed), present_platform()
    if platform != present:
        state = f"not for this machine ({present.describe() if present else 'no GPU with TensorRT'})"
    elif found == len(needed):
        state = "usable here"
    else:
        state = f"made on first use, or by: {refresh_command(directory, platform)}"
    return {
        "platform": platform.folder,
        "usable_here": platform == present and found == len(needed),
        "state": state,
        "plans": found,
        "expected": len(needed),
        "needless": len(sizes) - found,
        "bytes": sum(sizes.values()),
        "problems": problems,
    }


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    config, limits, weights = facts["config"], facts["limits"], facts["weights"]
    yield facts["path"]
    yield _row(
        "model",
        f"{config['family']}, {facts['parameters'] / 1e6:,.1f} M parameters, {facts['dtype']}, "
        f"made with EdgeLLM {facts['created_with']}",
    )
    yield _row(
        "layers",
        f"{config['num_layers']} of hidden size {config['hidden_size']}, {config['num_heads']} query and "
        f"{config['num_kv_heads']} key-value heads of {config['head_dim']}, FFN {config['intermediate_size']}",
    )
    if config["layer_kinds"]:
        yield _row("", mixers_in_words(config))
    yield _row("vocabulary", f"{config['vocab_size']:,} tokens, end of sequence {_ids(config['eos_token_ids'])}")
    yield _row(
        "limits",
        f"context {limits['kv_capacity']:,} (model: {config['max_position_embeddings']:,}), batch "
        f"{limits['max_batch']}, prefill chunk {limits['prefill_chunk']}, attention {facts['attention']}"
        + kv_cache_in_words(limits.get("kv_cache", "compute")),
    )
    if facts["tool_format"] is not None:
        yield _row("tools", f"calls in the format {facts['tool_format']}")
    if "draft" in facts:
        draft = facts["draft"]
        size = sum(draft["weights"].values()) / MEBIBYTE
        yield _row(
            "draft",
            f"{draft_in_words(draft['config'])}, {draft['parameters'] / 1e6:,.1f} M parameters of its own, "
            f"{size:,.1f} MiB of files",
        )
        yield _row("", draft_limits_in_words(limits))
    if "vision" in facts:
        vision = facts["vision"]
        yield _row("vision", f"{vision_in_words(vision['config'])}, {vision['parameters'] / 1e6:,.1f} M parameters")
        yield _row("", vision_limits_in_words(vision["max_image_patches"], limits["image_rows"]))
    if "lora" in facts:
        for name, adapter in facts["lora"].items():
            yield _row("adapter", f"{name}: rank {adapter['rank']}, {adapter['bytes'] / MEBIBYTE:,.1f} MiB")
        yield _row("" if facts["lora"] else "adapters", lora_limits_in_words(limits))
    yield _row("weights", f"{len(weights)} file{'s' * (len(weights) > 1)}, {sum(weights.values()) / MEBIBYTE:,.1f} MiB")
    for model, head in facts["heads"].items():
        own = "of the draft, " if model == "draft" else ""
        looked_up = ", tokens are looked up in it" if head["embeds"] else ""
        yield _row("head", f"{own}packed: {head['format']}, {head['bytes'] / MEBIBYTE:,.1f} MiB{looked_up}")
    for capability, found in facts["executors"].items():
        for number, text in enumerate(executors_in_words(found)):
            yield _row("" if number else capability, text)
    for platform in facts["plans"]:
        needless = f" and {platform['needless']} that kernels make needless" if platform["needless"] else ""
        yield _row(
            "plans",
            f"{platform['platform']}: {platform['plans']} of {platform['expected']}{needless}, "
            f"{platform['bytes'] / MEBIBYTE:,.1f} MiB, {platform['state']}",
        )
        yield from (_row("", problem) for problem in platform["problems"])
    for model, packed in facts["packed"].items():
        yield _row("packed", f"{model}, {packed['method']}")
        for words, part in packed["stored"].items():
            yield _row("", f"{words}, {part['weights']} weights of {part['bytes'] / MEBIBYTE:,.1f} MiB")
        yield from (_row("", note) for note in packed["notes"])
    if facts["gpu_refusal"]:
        yield _row("plans", f"none: {facts['gpu_refusal']}")
    elif not facts["plans"]:
        yield _row("plans", "none: the NumPy backend runs it; on a GPU with TensorRT they are made on first use")
    total = sum(facts["memory"].values())
    parts = ", ".join(f"{name} {size / MEBIBYTE:,.1f}" for name, size in facts["memory"].items() if size)
    where = "on a GPU"
    if facts["gpu_refusal"]:
        where = "on the NumPy backend, which makes float32 of the weights"
    yield _row("memory", f"{total / MEBIBYTE:,.1f} MiB {where}: {parts}")
    budget, token = facts["host_memory"][KEPT_ROWS], facts["host_memory"]["token"]
    yield _row("", f"of the host up to {budget / MEBIBYTE:,.1f} MiB: {KEPT_ROWS}, {budget // token:,} tokens")
    if "state" in facts["host_memory"]:
        budget, size = facts["host_memory"][KEPT_STATES], facts["host_memory"]["state"]
        places = f"{budget // size:,} of {size / MEBIBYTE:,.2f} MiB"
        yield _row("", f"of the host up to {budget / MEBIBYTE:,.1f} MiB: {KEPT_STATES}, {places}")
    if facts["verified"] and not facts["differences"]:
        yield _row("verified", "every file is as described")
    yield from (_row("differs", difference) for difference in facts["differences"])


def _state_size(config: DecoderConfig) -> int:
    """What the recurrent states of one place of a text take."""
    return recurrent_bytes(decoder_states(config), 1)


def _ids(token_ids: list[int]) -> str:
    return ", ".join(map(str, token_ids)) or "none"


def _row(name: str, text: str) -> str:
    return f"  {name:<12}{text}"
