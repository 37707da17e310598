"""What a prefill hands out to other programs, such as the action part of a policy: keys and values where they are."""

from __future__ import annotations

from dataclasses import dataclass

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

    def close(self) -> None:
        """Let go of the arrays."""
        self.keys = self.values = ()

    def __enter__(self) -> PrefilledStates:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
