"""What a prefill hands out to other programs, such as the action part of a policy: keys and values where they are, and
hidden states."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from edgellm.engines.backends.base import Backend
from edgellm.engines.closing import Closing
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.base_runner import BaseEngineRunner, FeatureUser
from edgellm.engines.runners.media import PromptMedia
from edgellm.kernels.arrays import ITEM_SIZES, Array
from edgellm.kernels.dlpack import SharedArray


@dataclass(eq=False)
class PrefilledStates(Closing):
    """Keys and values of a prompt's N tokens in some `layers`, numbered from 0, in the model's own memory.

    Each of `keys` and `values` is [1, key-value heads, N, head size] in the dtype of computing (float32 on NumPy; on a
    GPU float16 or bfloat16, as the directory was built), keys with their positions' rotation: what `past_key_values` of
    transformers have. They follow DLPack's protocol (`np.from_dlpack`, `torch.from_dlpack`) without a copy; elements of
    a row are side by side, rows follow each other, and `strides` (in elements) say how far heads are apart. All of them
    is computed when they are handed out, so that any stream may read them at once. They are not to be written.

    Each of `hidden_states` is [1, N, hidden size] in the same dtype: what enters one of the layers that the model was
    opened with, in their order (see `hidden_layers` there). They are empty where they were not asked for.

    The slot of the model that holds them serves nobody else until they, and all arrays that were made of them, are let
    go of: `close` lets go of these, and so does leaving a `with` block. Do it before the model is closed.
    `reused_tokens` of the `token_ids` were not computed again.
    """

    token_ids: tuple[int, ...]
    reused_tokens: int
    layers: tuple[int, ...]
    keys: tuple[SharedArray, ...]
    values: tuple[SharedArray, ...]
    hidden_states: tuple[SharedArray, ...] = ()

    def close(self) -> None:
        """Let go of the arrays."""
        self.keys = self.values = self.hidden_states = ()


class HiddenStates(FeatureUser):
    """The hidden states that enter some `layers`, of all tokens of a prompt of each slot: memory that a prefill fills.

    Engines give them out as features, of all layers side by side, and write over them with each chunk.
    """

    def __init__(self, backend: Backend, config: DecoderConfig, limits: EngineLimits, layers: Sequence[int]) -> None:
        """`layers` are among the `feature_layers` of the `config`."""
        self._backend, self._size, taken = backend, config.hidden_size, config.feature_layers
        self._shape = limits.max_batch, limits.kv_capacity, len(taken) * self._size
        self._firsts = [taken.index(layer) * self._size for layer in layers]
        self._slot, self._user = 0, FeatureUser()

    @property
    def memory(self) -> Mapping[str, int]:
        """What they take, by name, in bytes."""
        return {"hidden states": math.prod(self._shape) * ITEM_SIZES[self._backend.compute_dtype]}

    def allocate(self) -> None:
        """Take the memory, once it was planned for."""
        self._rows = self._backend.zeros(self._shape, "compute")

    @contextmanager
    def filled(self, base: BaseEngineRunner, slot: int) -> Iterator[None]:
        """Keep those of the prompt that is computed meanwhile where those of `slot` are."""
        self._slot, self._user, base.feature_user = slot, base.feature_user, self
        try:
            yield
        finally:
            base.feature_user, self._user = self._user, FeatureUser()

    def take_chunk(
        self, slot: int, following: np.ndarray, position: int, features: Array, media: PromptMedia | None
    ) -> None:
        """See `FeatureUser.take_chunk`; rows of padding are written over, or left."""
        own = self._rows[self._slot : self._slot + 1].reshape(*self._shape[1:])
        rows = own[position : position + features.shape[1]]
        self._backend.copy(rows, features.reshape(-1, self._shape[2])[: rows.shape[0]])
        self._user.take_chunk(slot, following, position, features, media)

    def take_tokens(self, slots: slice, tokens: Array, features: Array) -> list[Callable[[], None]]:
        return self._user.take_tokens(slots, tokens, features)

    def shared(self, slot: int, tokens: int, owner: object) -> tuple[SharedArray, ...]:
        """Those of a slot's first tokens, [1, tokens, hidden size] of each layer; they keep `owner`."""
        rows, shape = self._rows[slot : slot + 1], (1, tokens, self._size)
        return tuple(SharedArray(rows, shape, owner, self._backend.gpu_index, first) for first in self._firsts)
