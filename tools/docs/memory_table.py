"""Prints which model fits which Jetson, from the runtime's own memory plan: the table of docs/pages/supported.md.

python tools/docs/memory_table.py [CONTEXT]

Nothing is loaded or run: dimensions are those of the published checkpoints, memory is what `plan_memory` says before a
model is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
from board_forecast import MODELS, OTHERS
from random_checkpoint import LLAMA_3_2_1B, QWEN_2_5_VL_3B

from edgellm.engines.backends.device_layouts import packed_memory
from edgellm.engines.building.checks import choose_limits
from edgellm.engines.building.needed_kernels import planned_engines
from edgellm.engines.families import decoder_config
from edgellm.engines.families.programs import model_weights
from edgellm.engines.families.vision_config import read_vision_config
from edgellm.engines.model.config import DecoderConfig, DraftConfig
from edgellm.engines.model.decoder import HEAD, decoder_weights, head_format
from edgellm.engines.model.memory_plan import plan_memory
from edgellm.kernels.quantization.device_layout import DeviceLayout
from edgellm.kernels.quantization.packed_weight import WeightFormat
from edgellm.multimodal.vision_runner import vision_memory

GIBIBYTE = 1 << 30
#: Memory of the modules in GiB. The CPU and the GPU of a Jetson share it.
BOARDS = {
    "Orin Nano 8 GB": 8,
    "Orin NX 8 GB": 8,
    "Orin NX 16 GB": 16,
    "AGX Orin 32 GB": 32,
    "AGX Orin 64 GB": 64,
    "Thor 128 GB": 128,
}
#: An assumption, not a measurement: what firmware, Linux without a desktop, CUDA, Python and TensorRT's code take of a
#: board's memory, in GiB.
TAKEN_BY_THE_SYSTEM = 3
DTYPE, CONTEXT = "float16", 4096
#: Of linear layers, where they are packed, and of a draft's beside them.
INT4, INT8 = WeightFormat("int4", 128, zeros=False, dtype=DTYPE), WeightFormat("int8", None, zeros=False, dtype=DTYPE)
#: As in published EAGLE-3 heads of Llama 3.1 8B.
DRAFT_VOCABULARY = 32000

#: hidden size, intermediate size, layers, heads, KV heads, head size, vocabulary, whether the head is the embedding.
_Dimensions = tuple[int, int, int, int, int, int, int, bool]
_DENSE: dict[str, tuple[str, _Dimensions]] = {
    "Llama-3.2-1B": ("LlamaForCausalLM", (2048, 8192, 16, 32, 8, 64, 128256, True)),
    "Llama-3.2-3B": ("LlamaForCausalLM", (3072, 8192, 28, 24, 8, 128, 128256, True)),
    "Llama-3.1-8B": ("LlamaForCausalLM", (4096, 14336, 32, 32, 8, 128, 128256, False)),
    "Qwen2.5-0.5B": ("Qwen2ForCausalLM", (896, 4864, 24, 14, 2, 64, 151936, True)),
    "Qwen2.5-1.5B": ("Qwen2ForCausalLM", (1536, 8960, 28, 12, 2, 128, 151936, True)),
    "Qwen2.5-3B": ("Qwen2ForCausalLM", (2048, 11008, 36, 16, 2, 128, 151936, True)),
    "Qwen2.5-7B": ("Qwen2ForCausalLM", (3584, 18944, 28, 28, 4, 128, 152064, False)),
    "Qwen3-0.6B": ("Qwen3ForCausalLM", (1024, 3072, 28, 16, 8, 128, 151936, True)),
    "Qwen3-1.7B": ("Qwen3ForCausalLM", (2048, 6144, 28, 16, 8, 128, 151936, True)),
    "Qwen3-4B": ("Qwen3ForCausalLM", (2560, 9728, 36, 32, 8, 128, 151936, True)),
    "Qwen3-8B": ("Qwen3ForCausalLM", (4096, 12288, 36, 32, 8, 128, 151936, False)),
}
_MULTIMODAL: dict[str, _Dimensions] = {
    "Qwen2.5-VL-3B": (2048, 11008, 36, 16, 2, 128, 151936, True),
    "Qwen2.5-VL-7B": (3584, 18944, 28, 28, 4, 128, 152064, False),
}


@dataclass(frozen=True)
class Need:
    """Bytes that a model takes, without and with an EAGLE-3 head."""

    plain: int
    drafted: int


@dataclass(frozen=True)
class Weights:
    """How weights and KV rows are stored: linear layers of the base `packed` as `INT4`, all of the draft as `INT8`;
    the base's `head`."""

    packed: bool = False
    head: str = "as-published"
    kv_cache: str = "compute"


#: By the words of the table.
WEIGHTS = {
    "fp16": Weights(),
    "int4, KV rows int8": Weights(True, kv_cache="int8"),
    "int4, head and KV rows int8": Weights(True, "int8", "int8"),
}


def needs(context: int = CONTEXT, names: Collection[str] | None = None) -> dict[tuple[str, str], Need]:
    """What each model, or of these names, that was made for so many tokens of context takes, by its name and how its
    weights are stored."""
    published = {name: _text_config(architecture, sizes) for name, (architecture, sizes) in _DENSE.items()}
    published |= {name: MODELS[name] for name in OTHERS}
    published |= {name: _multimodal_config(sizes) for name, sizes in _MULTIMODAL.items()}
    models = {
        name: (values, decoder_config(dict(values)))
        for name, values in published.items()
        if names is None or name in names
    }
    return {
        (name, stored): _need(values, weights, context)
        for name, (values, config) in models.items()
        for stored, weights in WEIGHTS.items()
        if context <= config.max_position_embeddings
        and (weights.head == "as-published" or not config.tie_word_embeddings)  # else it stays
    }


def table(context: int = CONTEXT, names: Collection[str] | None = None) -> list[str]:
    """The table, or what it says of the models of these names, in Markdown, a line each."""
    head = ["Model", "weights", "without a draft", "with a draft", *BOARDS]
    lines = [_row(head), _row(["---"] * len(head))]
    for (name, stored), need in needs(context, names).items():
        sizes = [f"{size / GIBIBYTE:.1f} GiB" for size in (need.plain, need.drafted)]
        shown = name if stored == "fp16" else ""
        lines.append(_row([shown, stored, *sizes, *(_fit(need, memory) for memory in BOARDS.values())]))
    return lines


def _fit(need: Need, memory: int) -> str:
    room = (memory - TAKEN_BY_THE_SYSTEM) * GIBIBYTE
    if need.drafted <= room:
        return "yes"
    return "without a draft" if need.plain <= room else "no"


def _need(published: Mapping[str, Any], weights: Weights, context: int) -> Need:
    config, vision = decoder_config(dict(published)), read_vision_config(published)
    config, sizes = replace(config, head=weights.head), []
    for has_draft in (False, True):
        limits = choose_limits(
            config,
            has_draft=has_draft,
            vision=vision,
            kv_capacity=context,
            kv_cache=weights.kv_cache,
            is_packed=weights.packed,
        )
        images = None if vision is None else vision_memory(vision, limits.image_rows, DTYPE)
        draft = _draft(config) if has_draft else None
        base = replace(config, feature_layers=() if draft is None else draft.feature_layers)
        models = {"base": base} | ({} if draft is None else {"draft": draft})
        layouts = _layouts(models, weights.packed)
        limits = replace(limits, packed=weights.packed)
        every = models | ({} if vision is None else {"vision": vision})
        packed = packed_memory(models, layouts, DTYPE) | planned_engines(every, limits, DTYPE, layouts)
        specs = decoder_weights(config)
        sizes.append(plan_memory(config, limits, specs, DTYPE, packed, draft=draft, vision_memory=images).total)
    return Need(*sizes)


def _layouts(models: Mapping[str, DecoderConfig | DraftConfig], packed: bool) -> dict[str, dict[str, DeviceLayout]]:
    """Of the models with packed weights: those of linear layers, the draft's head among them, and of a packed head."""
    found: dict[str, dict[str, DeviceLayout]] = {}
    for model, config in models.items():
        specs = {spec.name: spec.shape for spec in model_weights(config) if len(spec.shape) == 2}
        tables = {name for name in specs if "embed" in name or (name == HEAD and model == "base")}
        names = specs.keys() - tables if packed else set()
        layouts = {name: DeviceLayout(INT4 if model == "base" else INT8, *specs[name]) for name in names}
        format = head_format(config.head, config.hidden_size, DTYPE) if isinstance(config, DecoderConfig) else None
        if format is not None:
            layouts[HEAD] = DeviceLayout(format, *specs[HEAD])
        if layouts:
            found[model] = layouts
    return found


def _draft(base: DecoderConfig) -> DraftConfig:
    """An EAGLE-3 head whose layer has the base's shapes, with a head of its own and the base's embedding."""
    layers = base.num_layers
    plain = {
        **{"layer_kinds": (), "lone_parts": False, "mixture": None, "gated_mlp": True, "hidden_act": "silu"},
        "local_rope_theta": None,
        "naming": "llama",
        "rope_scaling": None,
        "sliding_window": None,
        **{"full_heads": (), "rotary_dim": base.local_rotary_dim or base.rotary_dim, "value_norms": False},
        **{"shared_rows": 0, "layer_scalars": False, "layer_embedding_size": 0, "values_are_keys": False},
    }
    norms = {"pre_norms": True, "post_norms": False, "qk_norm": base.qk_norm and not base.joint_qk_norm}
    layer = replace(base, num_layers=1, tie_word_embeddings=False, deepstack_layers=0, head="as-published")
    return DraftConfig(
        generation="3",
        decoder=replace(layer, joint_qk_norm=False, **plain, **norms),
        draft_vocab_size=DRAFT_VOCABULARY,
        has_mapping=True,
        feature_layers=(2, layers // 2, layers - 3),
        feature_norm="none",
        layer_prefix="midlayer.",
        has_embedding=False,
        has_head=True,
        base_embedding="model.embed_tokens.weight",
        base_head="lm_head.weight",
        fc_bias=False,
        norm_before_residual=False,
        feed_back_normed=False,
    )


def _sizes(dimensions: _Dimensions) -> dict[str, Any]:
    hidden, inner, layers, heads, kv_heads, head_dim, vocabulary, tied = dimensions
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }


def _text_config(architecture: str, dimensions: _Dimensions) -> dict[str, Any]:
    family = {"architectures": [architecture], "model_type": architecture.removesuffix("ForCausalLM").lower()}
    return LLAMA_3_2_1B | family | {"rope_scaling": None} | _sizes(dimensions)


def _multimodal_config(dimensions: _Dimensions) -> dict[str, Any]:
    vision = QWEN_2_5_VL_3B["vision_config"] | {"out_hidden_size": dimensions[0]}
    return QWEN_2_5_VL_3B | _sizes(dimensions) | {"vision_config": vision}


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join(table(*map(int, sys.argv[1:2]))))
