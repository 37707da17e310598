"""Embeddings of images that were seen lately, by their content."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from edgellm.kernels.arrays import Array


@dataclass(frozen=True, eq=False)
class ImageEmbeddings:
    """What the language model takes of one image.

    `rows` [M, H] compute stand for its M tokens; `deepstack` are [M, H] compute each, added at these tokens after the
    first layers. `digest` names the content, `grid` are (frames, height, width) in patches.
    """

    rows: Array
    deepstack: tuple[Array, ...]
    digest: str
    grid: tuple[int, int, int]

    @property
    def nbytes(self) -> int:
        """Memory of all arrays."""
        return sum(array.nbytes for array in (self.rows, *self.deepstack))


class EmbeddingCache:
    """Holds `capacity` bytes at most; what was used longest ago goes first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.nbytes = 0
        self._entries: OrderedDict[str, ImageEmbeddings] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, digest: str) -> ImageEmbeddings | None:
        """The embeddings of the image with that digest, which then count as just used."""
        found = self._entries.get(digest)
        if found is not None:
            self._entries.move_to_end(digest)
        return found

    def put(self, embeddings: ImageEmbeddings) -> None:
        """Keep embeddings, unless they alone are too large."""
        if embeddings.nbytes > self.capacity or embeddings.digest in self._entries:
            return
        self._entries[embeddings.digest] = embeddings
        self.nbytes += embeddings.nbytes
        while self.nbytes > self.capacity:
            _, oldest = self._entries.popitem(last=False)
            self.nbytes -= oldest.nbytes

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self.nbytes = 0
