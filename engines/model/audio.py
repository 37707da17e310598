"""What an encoder of speech looks like, whatever its family calls it, and how sound becomes its frames and rows."""

from __future__ import annotations

from dataclasses import dataclass

#: Convolutions of Qwen3-ASR's encoder, each of which halves frames and mel bands; a chunk's rows follow from that.
CONVOLUTIONS = 3


@dataclass(frozen=True)
class AudioConfig:
    """Dimensions of an encoder of speech and of what leads from it to the language model.

    Sound is cut into chunks of `chunk_frames` frames of `mel_bins` bands, which are convolved one by one by three
    convolutions of `channels`; the rows of `window_chunks` chunks attend to each other.
    `out_hidden_size` is the language model's hidden size. `activation` is that of layers and projector. `tensor_prefix`
    and `projector_prefix` begin the checkpoint's tensor names.
    """

    family: str
    mel_bins: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    channels: int
    chunk_frames: int
    window_chunks: int
    out_hidden_size: int
    activation: str
    norm_eps: float
    tensor_prefix: str
    projector_prefix: str

    @property
    def window_frames(self) -> int:
        """Frames of a full window."""
        return self.chunk_frames * self.window_chunks

    @property
    def chunk_rows(self) -> int:
        """Rows of a full chunk, each a token of the language model."""
        return convolved(self.chunk_frames)

    def rows(self, frames: int) -> int:
        """Rows of a window of so many frames, or of a whole sound: the last chunk may be shorter."""
        full, rest = divmod(frames, self.chunk_frames)
        return full * self.chunk_rows + convolved(rest)


def convolved(size: int, times: int = CONVOLUTIONS) -> int:
    """What so many convolutions over three places, with a stride of 2 and a zero at either end, leave of a size."""
    for _ in range(times):
        size = (size + 1) // 2
    return size
