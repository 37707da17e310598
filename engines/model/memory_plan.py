"""How much memory a model takes, computed before any of it is allocated."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from edgellm.engines.model.adapted_projections import adapted_projections, adapter_bytes
from edgellm.engines.model.config import DecoderConfig, DraftConfig, WeightSpec
from edgellm.engines.model.draft_decoder import draft_weights
from edgellm.engines.model.limits import GIVEN_NODES, EngineLimits
from edgellm.engines.model.states import (
    LayerState,
    WindowRows,
    decoder_states,
    kept_edge,
    largest_state,
    recurrent_states,
    state_bytes,
    state_edge,
)
from edgellm.kernels.arrays import ITEM_SIZES
from edgellm.kernels.decode.contract import MAX_TOKENS

MEBIBYTE = 1 << 20
#: A control group's limit and use of memory, and what its statistics call pages of files; the same in version 1.
_GROUP = ("memory.max", "memory.current", "file")
_OLD_GROUP = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache")


@dataclass
class MemoryPlan:
    """Named amounts of memory in bytes; those of `host` are the most that is taken of the host's when it is needed, and
    no part of the total."""

    items: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Sum of all items in bytes."""
        return sum(self.items.values())

    def describe(self) -> str:
        """One line an item, in MiB, with the total."""
        rows = [*self.items.items(), ("total", self.total)]
        rows += [(f"host: {name}, at most", size) for name, size in self.host.items()]
        return "\n".join(f"  {name:<28}{size / MEBIBYTE:>10.1f} MiB" for name, size in rows)


def plan_memory(
    config: DecoderConfig,
    limits: EngineLimits,
    specs: Sequence[WeightSpec],
    dtype: str,
    known: Mapping[str, int] | None = None,
    draft: DraftConfig | None = None,
    adapters: bool = False,
    vision_memory: Mapping[str, int] | None = None,
) -> MemoryPlan:
    """Memory of weights, KV caches, step buffers and sampling state.

    With a `draft` its own are added, with `adapters` the places for LoRA adapters. In bytes by name, `vision_memory` is
    what a vision encoder takes, and `known` what the engines share, and what is known better: packed weights.
    """
    item = ITEM_SIZES[dtype]
    # Where experts are computed in float32, by NumPy, they stay in the mapped file but for one at a time.
    mapped = [spec for spec in specs if spec.experts and dtype == "float32"]
    weights = sum(weight_bytes(spec, dtype) for spec in specs if not (mapped and spec.experts))
    layers = decoder_states(config, limits.kv_cache, limits)
    states, recurrent = state_edge(layers, limits.max_batch, limits.kv_rows), recurrent_states(layers)
    in_windows = (layer for layer in layers if isinstance(layer, WindowRows))
    windows = state_bytes(state_edge(in_windows, limits.max_batch, 0), dtype)
    tokens = max(limits.max_batch, limits.prefill_chunk)
    step = tokens * ((config.hidden_size + config.rotary_columns) * item + ITEM_SIZES["int32"])
    step += most_tokens(limits) * config.token_row_size * item
    if config.adds_sound:  # the rows of sound that are added, and silence
        step += 2 * most_tokens(limits) * config.hidden_size * item
    if config.image_tokens:  # the last row that each token sees
        step += limits.prefill_chunk * ITEM_SIZES["int32"]
    if config.deepstack_layers:  # and their zeros
        step += (1 + config.deepstack_layers) * limits.prefill_chunk * config.hidden_size * item
    sampling = limits.max_batch * config.vocab_size * 3 * ITEM_SIZES["float32"]
    rotary = limits.kv_rows * config.rotary_columns * ITEM_SIZES["float32"]
    items = {
        "weights": weights,
        "KV caches": state_bytes(states, dtype) - recurrent_bytes(layers, limits.max_batch) - windows,
        "step buffers": step + rotary,
        "logits and sampling": sampling,
        # On the host and on the device, which may be the same memory: a mask, and its number, for each row of logits.
        "token masks": 2 * most_logit_rows(limits) * (-(-config.vocab_size // 32) + 1) * ITEM_SIZES["int32"],
        "token biases": limits.max_batch * config.vocab_size * ITEM_SIZES["float32"],
    }
    if mapped:
        items["an expert's weights"] = max(weight_bytes(spec, dtype) // spec.experts for spec in mapped)
    if windows:
        items["KV rows of windows"] = windows
    if recurrent:
        zeros = largest_state(state_edge(recurrent, 1, 1)) * ITEM_SIZES["float32"]
        items["recurrent states"] = recurrent_bytes(layers, limits.max_batch) + zeros
        items["inputs of recurrent layers"] = kept_bytes(layers, limits.max_batch, 1) + (
            kept_bytes(layers, limits.max_batch, limits.verify_sizes[-1]) if draft is not None else 0
        )
    if draft is not None:
        items |= _plan_draft_memory(draft, limits, dtype)
    if adapters:
        items["LoRA adapters"] = adapter_bytes(adapted_projections(specs), limits, dtype)
    return MemoryPlan(items | dict(vision_memory or {}) | dict(known or {}))


def weight_bytes(spec: WeightSpec, dtype: str) -> int:
    """What a weight that is not packed takes where the model computes in `dtype`."""
    return math.prod(spec.shape) * ITEM_SIZES[dtype if spec.dtype == "compute" else spec.dtype]


def most_logit_rows(limits: EngineLimits) -> int:
    """The most rows of logits of a step: those of the nodes of every slot's tree, a draft's or a given one, since a
    directory with a draft may be opened without it."""
    return limits.max_batch * max((GIVEN_NODES, *limits.verify_sizes))


def most_tokens(limits: EngineLimits) -> int:
    """The most tokens of a step, of all slots together: a chunk of a prompt, the nodes of every slot's tree, or what
    follows in a text whose logits are all asked for."""
    return max(limits.prefill_chunk, most_logit_rows(limits), MAX_TOKENS)


def recurrent_bytes(states: Sequence[LayerState], slots: int) -> int:
    """What recurrent states take, however many tokens they have taken."""
    return state_bytes(state_edge(recurrent_states(states), slots, 1), "float32")


def kept_bytes(states: Sequence[LayerState], slots: int, tokens: int) -> int:
    """What steps of up to so many tokens keep of their inputs for commits of recurrent states."""
    return state_bytes(kept_edge(states, slots, tokens), "float32")


def token_bytes(config: DecoderConfig, limits: EngineLimits, dtype: str, draft: DraftConfig | None = None) -> int:
    """What the rows of one token of one sequence take, those of the draft included."""
    states = decoder_states(config, limits.kv_cache)  # of the latest tokens: a window lets go of those before
    rows = state_bytes(state_edge(states, 1, 1), dtype) - recurrent_bytes(states, 1)
    return rows + (0 if draft is None else state_bytes(state_edge(decoder_states(draft.decoder), 1, 1), dtype))


def _plan_draft_memory(draft: DraftConfig, limits: EngineLimits, dtype: str) -> dict[str, int]:
    """What a draft adds; a tree's tokens, features, masks and logits exist for every slot at once."""
    item, wide, slots = ITEM_SIZES[dtype], ITEM_SIZES["float32"], limits.max_batch
    hidden, feature, nodes = draft.hidden_size, draft.feature_size, limits.verify_sizes[-1]
    inputs, proposed = feature + hidden + draft.decoder.rotary_dim, max(limits.draft_top_k, limits.draft_block)
    rows = limits.prefill_chunk + slots * (nodes + proposed + 2 * limits.accept_tokens)
    masks = slots * (nodes + proposed + limits.accept_tokens) * limits.tree_key_ranges[-1]
    logits = 2 * nodes * draft.decoder.vocab_size + (proposed + 1) * draft.draft_vocab_size
    rotary = limits.kv_rows * draft.decoder.rotary_dim
    weights = sum(math.prod(spec.shape) for spec in draft_weights(draft))
    states = state_edge(decoder_states(draft.decoder), slots, limits.kv_rows)
    return {
        "draft weights": weights * item,
        "draft KV caches": state_bytes(states, dtype),
        "draft buffers": rows * inputs * item + masks + (slots * logits + rotary) * wide,
    }


def available_memory(processes: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes of RAM that can be allocated without swapping, where the system tells: of the machine, or of a container or
    unit whose limit is closer. `processes` and `groups` are where Linux tells them."""
    found = list(_left_in_groups(processes / "self/cgroup", groups))
    with suppress(OSError):
        told = re.search(r"^MemAvailable: +(\d+) kB", (processes / "meminfo").read_text("ascii"), re.MULTILINE)
        if told is not None:
            return min(int(told[1]) * 1024, *found) if found else int(told[1]) * 1024
    pages = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else 0
    return pages * os.sysconf("SC_PAGE_SIZE") or None


def _left_in_groups(own: Path, groups: Path) -> Iterator[int]:
    """What is left below the limits of this process's control groups, each with those that it is in; pages of files,
    mapped weights among them, count as free. Within a container the path that `own` names may not be there, but its
    limit stands at the top."""
    told = ""
    with suppress(OSError):
        told = own.read_text("utf-8")
    for line in told.splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        top = groups / "memory" if kinds else groups  # version 1 has a hierarchy for each kind
        limit, used, files = _OLD_GROUP if kinds else _GROUP
        place = top / path.lstrip("/")
        for folder in (place, *(each for each in place.parents if each.is_relative_to(top))):
            with suppress(OSError, ValueError, KeyError):  # "max" is no number: no limit
                most, taken = (int((folder / name).read_text("ascii")) for name in (limit, used))
                counts = dict(each.split() for each in (folder / "memory.stat").read_text("ascii").splitlines())
                yield max(0, most - taken + int(counts[files]))
