"""What a prefill hands out to other programs, such as the action part of a policy: keys and values where they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import finalize

from edgellm.engines.runners.states import ModelStates
from edgellm.errors import is_whole, require
from edgellm.kernels.dlpack import SharedArray


@dataclass(eq=False)
class PrefilledStates:
    """Keys and values of a prompt's N tokens in some `layers`, numbered from 0, in the model's own memory.

    Each of `keys` and `values` is [1, key-value heads, N, head size] in the dtype of computing (float32 on NumPy; on a
    GPU float16 or bfloat16, as the directory was built), keys with their positions' rotation: what `past_key_values` of
    transformers have. They follow DLPack's protocol (`np.from_dlpack`, `torch.from_dlpack`) without a copy; elements of
    a row are side by side, rows follow each other, and `strides` (in elements) say how far heads are apart. All of them
    is computed when they are handed out, so that any stream may read them at once. They are not to be written.

    The slot of the model that holds them serves nobody else until they, and all arrays that were made of them, are let
    go of: `close` lets go of these, and so does leaving a `with` block. Do it before the model is closed.
    `reused_tokens` of the `token_ids` were not computed again.
    """

    token_ids: tuple[int, ...]
    reused_tokens: int
    layers: tuple[int, ...]
    keys: tuple[SharedArray, ...]
    values: tuple[SharedArray, ...]

    @classmethod
    def of_slot(
        cls,
        states: ModelStates,
        slot: int,
        token_ids: Sequence[int],
        reused: int,
        layers: Sequence[int],
        hold: Callable[[], Callable[[], None]],
    ) -> PrefilledStates:
        """Those of a slot, which `hold` holds from now on. Raises EngineError, and holds nothing, for layers that have
        none."""
        holder = _Holder()
        pairs = [states.shared_rows(slot, layer, len(token_ids), holder) for layer in layers]
        finalize(holder, hold()).atexit = False
        keys, values = zip(*pairs, strict=True)
        return cls(tuple(token_ids), reused, tuple(layers), keys, values)

    def close(self) -> None:
        """Let go of the arrays."""
        self.keys = self.values = ()

    def __enter__(self) -> PrefilledStates:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Holder:
    """Lives as long as somebody reads the rows of a slot."""


def checked_layers(layers: Any, count: int) -> list[int]:
    """Layers of a model with so many, all by default; RequestError for what are none."""
    if layers is None:
        return list(range(count))
    is_list = isinstance(layers, (list, tuple, range)) and len(layers) > 0
    expected = f"a list of whole numbers from 0 to {count - 1}, or None for all"
    require(is_list and all(is_whole(each, 0, count - 1) for each in layers), "layers", layers, expected)
    return list(layers)
