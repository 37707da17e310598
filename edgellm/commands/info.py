"""`edgellm info`: what an engine directory is, and whether it is whole."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from edgellm.commands import descriptions
from edgellm.commands.console import mebibytes
from edgellm.commands.options import GPUOption, ModelOptions
from edgellm.commands.table import option, takes_options
from edgellm.engines.backends import plan_files
from edgellm.engines.backends.device_layouts import PackedLayouts, gpu_layouts, packed_memory
from edgellm.engines.backends.executors import planned_shapes
from edgellm.engines.backends.rank_weights import RankWeights
from edgellm.engines.building.needed_kernels import planned_engines
from edgellm.engines.checkpoints.weight_files import HEAD_FILE
from edgellm.engines.checkpoints.weights import described_parts
from edgellm.engines.directories.description import ModelSource
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.directories.engine_parts import is_weight_file
from edgellm.engines.directories.kernel_folders import KERNELS_FOLDER
from edgellm.engines.families.audio_encoders import audio_memory
from edgellm.engines.families.programs import ModelConfig, model_weights
from edgellm.engines.families.vision_encoders import host_weights
from edgellm.engines.formats.digests import FileDigest
from edgellm.engines.formats.strict_formats import plain_values
from edgellm.engines.model.config import POOLINGS, WeightSpec
from edgellm.engines.model.decoder import as_published, decoder_weights, embedding_name, head_format, head_weight_name
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.memory_plan import MEBIBYTE, plan_memory, recurrent_bytes, token_bytes, weight_bytes
from edgellm.engines.model.states import decoder_states
from edgellm.hub.inventory import existing_directory, gguf_file
from edgellm.kernels.gpu import choose_gpu, find_gpu
from edgellm.kernels.kept import read_manifest
from edgellm.kernels.ranks.launcher import MOST_RANKS
from edgellm.multimodal.vision_runner import vision_memory
from edgellm.opened_model import SHIPPED_MODEL
from edgellm.snapshots.kept_on_host import KEPT_ROWS, KEPT_STATES, PREEMPTION_BUDGET, STATE_BUDGET
from edgellm.tool_calls.formats import checkpoint_format


class InfoOptions(ModelOptions, GPUOption):
    verify: bool = option("Hash every file; exit with 1 on any difference.")
    as_json: bool = option("Print one JSON object.", "--json")
    gpus: int = option("Say what each of so many GPUs needs that share the model.", default=1, least=1, most=MOST_RANKS)


@takes_options
def info(given: InfoOptions) -> None:
    """Say what an engine directory is: model, limits, memory, plans, kernels; --verify hashes every file.

    Example: edgellm info robot --verify
    """
    choose_gpu(given.gpu)
    facts = directory_facts(existing_directory(given.chosen_model() or SHIPPED_MODEL), given.verify, given.gpus)
    typer.echo(json.dumps(facts, indent=2) if given.as_json else "\n".join(fact_lines(facts)))
    if facts["differences"]:
        raise typer.Exit(1)


def directory_facts(path: Path, verify: bool, gpus: int = 1) -> dict[str, Any]:
    """All that there is to say, as JSON values; sizes in bytes.

    `differences` lists what is not as described: with `verify` every file and plan is hashed, without it weights only
    where their digest is remembered. Raises EngineDirectoryError for a directory that cannot be described at all,
    EngineError that names what of it so many `gpus` cannot share.
    """
    directory = EngineDirectory.read(path)
    config, limits, draft, vision = directory.config, directory.limits, directory.draft, directory.vision
    differences, file = directory.differences(verify, hash_weights=False), gguf_file(directory)
    packed = {} if differences else packed_facts(directory)
    layouts: PackedLayouts = {}
    refusal = None  # why GPUs do not run the model
    if not differences and directory.packed_names:
        layouts, refusal = gpu_layouts(directory.models, directory.checkpoints, directory.dtype)
    computed = directory.dtype if refusal is None else "float32"  # in which NumPy runs what GPUs do not
    known = [] if refusal is not None else _known_platforms(directory, layouts)
    platforms = [_platform_facts(directory, layouts, platform) for platform in known]
    kernels = [] if differences else kernel_facts(directory)
    capabilities = {platform.compute_capability for platform in known} | {own["target"] for own in kernels}
    if refusal is None and (gpu := find_gpu()) is not None:  # it takes no TensorRT to run kernels
        capabilities.add(gpu.compute_capability)
    planned = planned_engines(directory.models, limits, computed, layouts) if refusal is None else {}
    encoders = dict[str, int]()
    if directory.audio is not None:
        encoders |= audio_memory(directory.audio, computed, refusal is not None, limits)
    if vision is not None:
        encoders |= vision_memory(vision.config, limits.image_rows, computed, video_tokens=directory.video_tokens)
    draft_config = None if draft is None else draft.config
    state = recurrent_bytes(decoder_states(config), 1)  # of one place of a text
    weights, more = decoder_weights(config), packed_memory(directory.models, layouts, directory.dtype) | planned
    memory = plan_memory(
        config, limits, weights, computed, more, draft=draft_config, adapters=limits.has_lora, vision_memory=encoders
    )
    if verify:
        differences += [problem for platform in platforms for problem in platform["problems"]]
    facts: dict[str, Any] = {
        "path": str(directory.path),
        "created_with": directory.created_with,
        "source": None if directory.source is None else plain_values(directory.source),
        "file": None if file is None else str(file),
        "config": asdict(config),
        "parameters": _parameters(decoder_weights(as_published(config))),
        "mixture": {} if differences else _mixture_facts(directory),
        "dtype": directory.dtype,
        "attention": directory.attention,
        "tool_format": directory.tool_format or checkpoint_format(directory.path, None),
        "limits": plain_values(limits),
        "weights": {name: directory.files[name].size for name in directory.weight_files},
        "executors": {
            name: descriptions.executor_facts(directory.models, limits, directory.dtype, name, layouts)
            for name in sorted(capabilities)
        },
        "plans": platforms,
        "kernels": kernels,
        "packed": packed,
        "gpu_refusal": refusal,
        "heads": _head_facts(directory),
        "memory": memory.items,
        "memory_by_gpu": [],
        "float32_weights": sum(weight_bytes(spec, "float32") for spec in weights),
        "host_memory": {
            KEPT_ROWS: PREEMPTION_BUDGET,
            "token": token_bytes(config, limits, computed, draft_config),
            **({KEPT_STATES: STATE_BUDGET, "state": state} if state else {}),
        },
        "verified": verify,
        "differences": differences,
    }
    if gpus > 1 and refusal is None and not differences:
        parts = RankWeights(directory, gpus, layouts.get("base", {}))
        scratch = memory.items.get("engine scratch", 0)  # at most: each has narrower layers
        facts["memory_by_gpu"] = [parts.plan(rank, memory, scratch).items for rank in range(gpus)]
    if draft is not None:
        facts["draft"] = _part_facts(draft.config, draft.files)
    if vision is not None:
        facts["vision"] = _part_facts(vision.config, vision.files or {}, host_weights(vision.config))
        facts["vision"]["max_image_patches"] = vision.config.patches_within(limits.image_rows[-1])
    if limits.has_lora:
        facts["lora"] = {
            name: {"rank": adapter.rank, "digest": adapter.digest, "bytes": sum(f.size for f in adapter.files.values())}
            for name, adapter in directory.adapters.items()
        }
    return facts


def kernel_facts(directory: EngineDirectory) -> list[dict[str, Any]]:
    """The compiled kernels of a directory, by target and CUDA. Null without a GPU are `usable_here` and `taken_for`, of
    how many multiprocessors kernels are taken here; `better` is the command that makes this GPU's own where it has
    another number."""
    gpu, found = find_gpu(), []
    kept = None if gpu is None else directory.kept_kernels(gpu)
    for name in directory.kernels:
        manifest = read_manifest(directory.path / KERNELS_FOLDER / name)
        usable = None
        if gpu is not None and kept is not None:
            fits = gpu.architecture == manifest.architecture and manifest.release[0] <= gpu.driver_cuda[0]
            usable = fits and kept.gpu.multiprocessors in manifest.multiprocessors
        found.append(
            {
                "target": manifest.architecture,
                "multiprocessors": list(manifest.multiprocessors),
                "cuda": ".".join(map(str, manifest.release)),
                "modules": len(manifest.modules),
                "bytes": manifest.size,
                "created_with": manifest.created_with,
                "usable_here": usable,
                "taken_for": kept.gpu.multiprocessors if kept is not None and usable else None,
                "better": kept.better if kept is not None and usable else None,
            }
        )
    return found


def kernels_in_words(kernels: Sequence[Mapping[str, Any]]) -> list[str]:
    here = {None: "", True: ", usable here", False: ", not for this machine"}
    return [
        f"{each['target']}: {each['modules']} compiled for {', '.join(map(str, each['multiprocessors']))} "
        f"multiprocessors by CUDA {each['cuda']}, {mebibytes(each['bytes']).strip()}{here[each['usable_here']]}"
        + (f", those for {each['taken_for']}; this GPU's own: {each['better']}" if each["better"] else "")
        for each in kernels
    ]


def _mixture_facts(directory: EngineDirectory) -> dict[str, int]:
    """The parameters at work for a token of a mixture of experts, and what it reads of the files, in bytes: one row of
    the embedding table, and the experts that are chosen."""
    config = directory.config
    if config.mixture is None:
        return {}
    active = read = 0
    with directory.checkpoints["base"]() as checkpoint:
        for spec in decoder_weights(config):
            share = config.mixture.chosen / spec.experts if spec.experts else 1
            active += int(math.prod(spec.shape) * share)
            if spec.name == embedding_name(config) != head_weight_name(config):
                share = 1 / config.vocab_size
            read += int(sum(size for _, size in described_parts(checkpoint, [spec]).values()) * share)
    return {"active_parameters": active, "token_bytes": read}


def _parameters(specs: Sequence[WeightSpec]) -> int:
    return sum(math.prod(spec.shape) for spec in specs)


def _part_facts(
    config: ModelConfig, files: Mapping[str, FileDigest], more: Sequence[WeightSpec] = ()
) -> dict[str, Any]:
    """What there is of a draft or a vision encoder, which has `more` weights on the host."""
    sizes = {name: file.size for name, file in files.items() if is_weight_file(name)}
    return {"config": asdict(config), "parameters": _parameters([*model_weights(config), *more]), "weights": sizes}


def packed_facts(directory: EngineDirectory) -> dict[str, Any]:
    """What packs each model with packed weights: method, weights and bytes by how they are stored, and notes."""
    facts = {}
    for model, quantization in directory.packed_models().items():
        with directory.checkpoints[model]() as checkpoint:
            parts = described_parts(checkpoint, model_weights(directory.models[model]))
        stored = {words: {"weights": count, "bytes": size} for words, (count, size) in parts.items()}
        facts[model] = {"method": quantization.method, "stored": stored, "notes": list(quantization.notes)}
    return facts


def _head_facts(directory: EngineDirectory) -> dict[str, Any]:
    """What there is of a head that the build has packed, by its model: its format, the bytes of its file, and whether
    tokens are looked up in it."""
    config = directory.config
    if HEAD_FILE not in directory.files:
        return {}
    form, size = str(head_format(config.head, config.hidden_size, directory.dtype)), directory.files[HEAD_FILE].size
    return {"base": {"head": config.head, "format": form, "bytes": size, "embeds": config.embeds_by_head}}


def _known_platforms(directory: EngineDirectory, packed: PackedLayouts) -> list[plan_files.Platform]:
    """Those with plans in the directory or in the user's cache, and this machine's."""
    # Shapes are the same for all that have kernels.
    shapes = planned_shapes(directory.models, directory.limits, directory.dtype, "sm_80", True, packed)
    networks = (plan_files.directory_network(directory, shape) for shape in shapes)
    places = [directory.plans_path, *map(plan_files.cached_plans_path, networks)]
    found = {platform for place in places for platform, plans in plan_files.platforms_with_plans(place) if plans}
    present = plan_files.present_platform()
    return sorted(found | ({present} if present else set()), key=lambda platform: platform.folder)


def _platform_facts(directory: EngineDirectory, packed: PackedLayouts, platform: plan_files.Platform) -> dict[str, Any]:
    described = directory.models, directory.limits, directory.dtype, platform.compute_capability
    needed = planned_shapes(*described, False, packed)
    sizes: dict[EngineShape, int] = {}
    problems: list[str] = []
    for shape in planned_shapes(*described, True, packed):
        network = plan_files.directory_network(directory, shape)
        plan, refusals = plan_files.find_plan(directory, shape, platform, network)
        problems += refusals
        if plan is not None:
            sizes[shape] = len(plan)
    found, present = sum(shape in sizes for shape in needed), plan_files.present_platform()
    if platform != present:
        state = f"not for this machine ({present.describe() if present else 'no GPU with TensorRT'})"
    elif found == len(needed):
        state = "usable here"
    else:
        state = f"made on first use, or by: {plan_files.refresh_command(directory, platform)}"
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


def fact_lines(facts: dict[str, Any]) -> Iterator[str]:
    """The facts in words: the path, then rows of a name and a text, the name once for rows that belong together."""
    yield facts["path"]
    yield from (f"  {name:<12}{text}" for name, text in _rows(facts))


def _rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    config, limits, weights = facts["config"], facts["limits"], facts["weights"]
    made = f"{facts['dtype']}, made with EdgeLLM {facts['created_with']}"
    yield "model", f"{config['family']}, {_millions(facts['parameters'])} M parameters, {made}"
    heads = f"{config['num_heads']} query and {config['num_kv_heads']} key-value heads of {config['head_dim']}"
    size = f"{config['num_layers']} of hidden size {config['hidden_size']}"
    yield "layers", f"{size}, {heads}, FFN {config['intermediate_size']}"
    if config["layer_kinds"]:
        yield "", descriptions.mixers_in_words(config)
    if config["mixture"] is not None:
        yield "", descriptions.mixture_in_words(config)
    if facts["mixture"]:
        active, read = _millions(facts["mixture"]["active_parameters"]), facts["mixture"]["token_bytes"]
        yield "", f"a token goes through {active} M parameters, {mebibytes(read).strip()} of the weights' files"
    if config["pooling"] != POOLINGS[0]:
        yield "embeddings", f"of {config['hidden_size']} dimensions, by the last token: it gives no answers"
    ends = ", ".join(map(str, config["eos_token_ids"])) or "none"
    yield "vocabulary", f"{config['vocab_size']:,} tokens, end of sequence {ends}"
    cache = f", KV cache of {limits['kv_cache']}" if "kv_cache" in limits else ""
    context = f"context {limits['kv_capacity']:,} (model: {config['max_position_embeddings']:,})"
    chunk = f"prefill chunk {limits['prefill_chunk']}, attention {facts['attention']}{cache}"
    yield "limits", f"{context}, batch {limits['max_batch']}, {chunk}"
    if facts["source"] is not None:
        yield "source", str(ModelSource(**facts["source"]))
    if facts["file"] is not None:
        yield "source", facts["file"]
    if facts["tool_format"] is not None:
        yield "tools", f"calls in the format {facts['tool_format']}"
    if "draft" in facts:
        draft = facts["draft"]
        own = f"{_millions(draft['parameters'])} M parameters of its own, {mebibytes(sum(draft['weights'].values()))}"
        yield "draft", f"{descriptions.draft_in_words(draft['config'])}, {own} of files"
        size = f"{limits['draft_top_k']} wide and {limits['draft_steps']} deep"
        yield "", f"trees up to {size}, up to {limits['verify_tree_size']} nodes verified"
    if "vision" in facts:
        vision, encoder = facts["vision"], facts["vision"]["config"]
        shown, side = ("patches", "patch_size") if encoder["image_size"] is None else ("images", "image_size")
        layers = f"{encoder['family']}, {encoder['num_layers']} layers of {encoder['hidden_size']}"
        pixels = f"{shown} of {encoder[side]} x {encoder[side]} pixels"
        yield "vision", f"{layers}, {pixels}, {_millions(vision['parameters'])} M parameters"
        rows = ", ".join(f"{count:,}" for count in limits["image_rows"])
        yield "", f"images of up to {vision['max_image_patches']:,} patches (engines of {rows} rows)"
    if "lora" in facts:
        for name, adapter in facts["lora"].items():
            yield "adapter", f"{name}: rank {adapter['rank']}, {mebibytes(adapter['bytes'])}"
        at_once = f"{limits['lora_slots']} at once, rank up to {limits['max_lora_rank']}"
        yield "" if facts["lora"] else "adapters", at_once
    yield "weights", f"{len(weights)} file{'s' * (len(weights) > 1)}, {mebibytes(sum(weights.values()))}"
    for head in facts["heads"].values():
        looked_up = ", tokens are looked up in it" if head["embeds"] else ""
        yield "head", f"packed: {head['format']}, {mebibytes(head['bytes'])}{looked_up}"
    for capability, found in facts["executors"].items():
        for number, text in enumerate(descriptions.executors_in_words(found)):
            yield "" if number else capability, text
    for platform in facts["plans"]:
        needless = f" and {platform['needless']} for --executor tensorrt alone" if platform["needless"] else ""
        needed = f"{platform['plans']} of {platform['expected']}" if platform["expected"] else "none needed"
        there = f"{needed}{needless}, {mebibytes(platform['bytes'])}, {platform['state']}"
        yield "plans", f"{platform['platform']}: {there}"
        yield from (("", problem) for problem in platform["problems"])
    for number, text in enumerate(kernels_in_words(facts["kernels"])):
        yield "" if number else "kernels", text
    for model, packed in facts["packed"].items():
        yield "packed", f"{model}, {packed['method']}"
        for words, part in packed["stored"].items():
            yield "", f"{words}, {part['weights']} weights of {mebibytes(part['bytes'])}"
        yield from (("", note) for note in packed["notes"])
    executors = facts["executors"].values()
    if facts["gpu_refusal"]:
        yield "plans", f"none: {facts['gpu_refusal']}"
    elif not facts["plans"] and executors and all(each["name"] == "kernels" for found in executors for each in found):
        yield "plans", "none are needed: kernels run every step"
    elif not facts["plans"]:
        yield "plans", "none: kernels and NumPy need none, those of what TensorRT runs are made on first use"
    parts = ", ".join(f"{name} {size / MEBIBYTE:,.1f}" for name, size in facts["memory"].items() if size)
    where = "on the NumPy backend, which makes float32 of the weights" if facts["gpu_refusal"] else "on a GPU"
    yield "memory", f"{mebibytes(sum(facts['memory'].values()))} {where}: {parts}"
    if shares := facts["memory_by_gpu"]:
        yield "", f"of {len(shares)} GPUs: {', '.join(mebibytes(sum(own.values())) for own in shares)}"
    if facts["packed"] and not facts["gpu_refusal"]:
        yield "", f"on the NumPy backend, which makes float32 of them, weights {mebibytes(facts['float32_weights'])}"
    host = facts["host_memory"]
    kept = [(KEPT_ROWS, f"{host[KEPT_ROWS] // host['token']:,} tokens")]
    if "state" in host:
        size = f"{host['state'] / MEBIBYTE:,.2f} MiB"
        kept.append((KEPT_STATES, f"{host[KEPT_STATES] // host['state']:,} of {size}"))
    for name, count in kept:
        yield "", f"of the host up to {mebibytes(host[name])}: {name}, {count}"
    if facts["verified"] and not facts["differences"]:
        yield "verified", "every file is as described"
    yield from (("differs", difference) for difference in facts["differences"])


def _millions(parameters: int) -> str:
    return f"{parameters / 1e6:,.1f}"
