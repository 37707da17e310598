"""Embeddings of media that were encoded lately, by the digests of their content: of every kind of media."""

from __future__ import annotations

from collections import OrderedDict

from edgellm.engines.runners.media import MediaEmbeddings


class EmbeddingCache:
    """Holds `capacity` bytes at most; what was used longest ago goes first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.nbytes = 0
        self._entries: OrderedDict[str, MediaEmbeddings] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, digest: str) -> MediaEmbeddings | None:
        """The embeddings of the content with that digest, which then count as just used."""
        found = self._entries.get(digest)
        if found is not None:
            self._entries.move_to_end(digest)
        return found

    def put(self, embeddings: MediaEmbeddings) -> None:
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
