"""Image markers of a prompt: one token a marker becomes as many as its image has."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.multimodal.errors import ImageError
from edgellm.multimodal.image_processor import PreparedImage


def expand_image_tokens(prompt_ids: Sequence[int], image_token_id: int, images: Sequence[PreparedImage]) -> list[int]:
    """The ids of a prompt with each image token in it repeated for the tokens of its image, in order.

    Raises ImageError where there are more images than image tokens, or the reverse.
    """
    markers = sum(token_id == image_token_id for token_id in prompt_ids)
    if markers != len(images):
        raise ImageError(
            f"the prompt has {markers} image markers (token {image_token_id}), but there are {len(images)} images: "
            "show one image for each marker"
        )
    expanded: list[int] = []
    following = iter(images)
    for token_id in prompt_ids:
        expanded += [token_id] * (next(following).tokens if token_id == image_token_id else 1)
    return expanded
