"""LoRA adapters on the command line: `NAME=DIR`, and in words what mixes tokens, what drafts, and what computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import typer

from edgellm.engines.model.config import MTP
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.kernels.user_paths import user_path


def named_directories(options: Sequence[str]) -> dict[str, Path]:
    """Directories by name, from `NAME=DIR` each; typer.BadParameter for another form or a name given twice."""
    found: dict[str, Path] = {}
    for option in options:
        name, sign, directory = option.partition("=")
        if not (name and sign and directory):
            raise typer.BadParameter(f"--lora {option}: expected NAME=DIR, such as --lora json=adapters/json")
        if name in found:
            raise typer.BadParameter(f"--lora {option}: {name!r} is the name of {found[name]} already")
        found[name] = user_path(directory)
    return found


def adapters_in_words(names: Sequence[str], chosen: str | None) -> str:
    """Which adapters there are, and which one answers; "" where there are none."""
    if not names:
        return ""
    return f"LoRA adapters {', '.join(names)}; answers are given {f'with {chosen}' if chosen else 'without one'}"


def mixers_in_words(config: Mapping[str, Any]) -> str:
    """What mixes tokens in how many layers of a `DecoderConfig` as a dictionary; "" where it has no kinds."""
    words = {
        "attention": "of attention",
        "window": f"of attention within {config['sliding_window']} tokens",
        "mlp": "without",
        "convolution": f"short convolutions over {config['conv_width']} tokens",
    }
    if config["delta_heads"]:
        keys, values, key_size, size = config["delta_heads"]
        heads = f"{keys} key heads of {key_size}, {values} value heads of {size}"
        words["delta"] = f"of the gated delta rule ({heads}, behind convolutions over {config['conv_width']} tokens)"
        words["mamba"] = f"of Mamba-2 ({values} heads of {size}, {keys} groups, states of {key_size})"
    return ", ".join(f"{count} {words[kind]}" for kind, count in Counter(config["layer_kinds"]).items())


def mixture_in_words(config: Mapping[str, Any]) -> str:
    """The mixture of experts of a `DecoderConfig` as a dictionary."""
    mixture = config["mixture"]
    layers = config["num_layers"] - len(mixture["dense_layers"])
    experts = f"{mixture['experts']} experts of {mixture['size']}"
    return f"{layers} with mixtures of {experts}, {mixture['chosen']} for each token"


def draft_in_words(config: dict[str, Any]) -> str:
    """Kind, dimensions and features of a `DraftConfig` as a dictionary."""
    layer, kind = config["decoder"], f"EAGLE-{config['generation']}"
    if config["generation"] == "1":  # one kind of head: they differ in the tree
        kind, features = "EAGLE-1/2", "the last hidden state"
    elif config["generation"] == MTP:
        kind, features = "the model's own head for multi-token prediction", "the last hidden state"
    else:
        features = f"the hidden states entering layers {', '.join(map(str, config['feature_layers']))}"
    if (block := config.get("block")) is not None:
        mask = " under a causal mask" if block["causal"] else ""
        kind = f"DFlash of {layer['num_layers']} layers, blocks of {block['size']} tokens{mask}"
    shared, mixture = [name for name in ("embedding", "head") if not config[f"has_{name}"]], layer.get("mixture")
    inner = f"FFN {layer['intermediate_size']}"
    if mixture is not None:
        inner = f"{mixture['experts']} experts of {mixture['size']}, {mixture['chosen']} for each token"
    return (
        f"{kind}, {layer['num_heads']} query and {layer['num_kv_heads']} key-value heads of {layer['head_dim']}, "
        f"{inner}, {config['draft_vocab_size']:,} tokens, takes {features}"
        + (f", shares the base's {' and '.join(shared)}" if shared else "")
    )


def executor_facts(
    models: Mapping[str, Any],
    limits: EngineLimits,
    dtype: str,
    capability: str,
    packed: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> list[dict[str, str | None]]:
    """What runs which shapes on GPUs of a compute capability ("sm_90"), an entry each: first the kernels, then
    TensorRT, alone or for some steps, with the `reason` why not kernels (of several steps of a phase, the first's).
    `models` has the configuration by `EngineShape.model`, `packed` the layouts of packed weights."""
    # Which most commands do without:
    from edgellm.engines.backends.executors import Executors, shared_limit_of

    ways = Executors(models, limits, dtype, shared_limit_of(capability), packed)
    steps: dict[tuple[str, str], dict[tuple[str, str | None], list[EngineShape]]] = {}
    for shape in limits.all_engine_shapes():
        planned, reason = ways.planned(shape), ways.refusal(shape)
        name = "TensorRT" if planned is None else "kernels, and TensorRT for some steps" if planned else "kernels"
        if ways.problem(shape) is not None:
            name = "nothing but the NumPy backend"
        found = steps.setdefault((shape.model, shape.phase + (" with adapters" if shape.lora_slots else "")), {})
        found.setdefault(next((known for known in found if known[0] == name), (name, reason)), []).append(shape)
    told: dict[tuple[str, str | None], list[str]] = {("kernels", None): []}
    for (model, phase), by_executor in steps.items():
        every = {(shape.tokens, shape.batch) for shapes in by_executor.values() for shape in shapes}
        for executor, shapes in by_executor.items():
            told.setdefault(executor, []).append(f"{model} {phase} {sizes_in_words(shapes, every)}")
    return [
        {"name": name, "shapes": "; ".join(found), "reason": reason} for (name, reason), found in told.items() if found
    ]


def executors_in_words(facts: Sequence[Mapping[str, str | None]]) -> list[str]:
    return [f"{each['name']}: {each['shapes']}" + (f" ({each['reason']})" if each["reason"] else "") for each in facts]


def sizes_in_words(shapes: Sequence[EngineShape], every: Collection[tuple[int, int]]) -> str:
    """The tokens of shapes, with their batch sizes where others of `every` (tokens, batch) run otherwise."""
    batches: dict[int, list[int]] = {}
    for tokens, batch in sorted({(shape.tokens, shape.batch) for shape in shapes}):
        batches.setdefault(tokens, []).append(batch)
    texts = []
    for tokens, found in batches.items():
        is_all = len(found) == sum(other == tokens for other, _ in every)
        texts.append(f"{tokens}" if is_all else f"{tokens} (batch {', '.join(map(str, found))})")
    return ", ".join(texts)
