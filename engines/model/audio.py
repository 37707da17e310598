"""What an encoder of speech looks like, whatever its family calls it, and how sound becomes its frames and rows."""

from __future__ import annotations

from dataclasses import dataclass

#: Frames of a part at most; how many parts' logarithms are kept at least: a minute or two.
_PART, _KEPT_PARTS = 100, 128
#: Of sound; a frame, with what resampling looks at, needs no more than so many seconds behind its beginning.
_FRAMES_A_SECOND, _AROUND = 100, 0.05


@dataclass(frozen=True)
class AudioConfig:
    """Dimensions of an encoder of speech and of what leads from it to the language model.

    Chunks of `chunk_frames` frames of `mel_bins` bands are convolved one by one, by convolutions of `channels` of which
    `halvings` have a stride of 2; the rows of `window_chunks` chunks attend to each other, and `merged` neighbouring
    rows become one of the language model, whose hidden size is `out_hidden_size`. `tensor_prefix` and
    `projector_prefix` begin the checkpoint's tensor names.
    """

    family: str
    mel_bins: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    channels: int
    halvings: int
    chunk_frames: int
    window_chunks: int
    merged: int
    out_hidden_size: int
    tensor_prefix: str
    projector_prefix: str

    #: How many windows are encoded at once, beside those that these see.
    run_windows = 1

    @property
    def lead_windows(self) -> int:
        """Windows before those that are encoded, which these see."""
        return 0

    @property
    def kept_rows(self) -> int:
        """Of how many rows layers keep keys and values from run to run; 0: windows before are encoded again."""
        return 0

    @property
    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids before and behind a sound's tokens."""
        return (), ()

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of a prompt before any is written, where each token of a text has its part of a sound (Voxtral
        Realtime); None where a sound has tokens of its own."""
        return None

    def settled(self, seconds: float) -> int:
        """How many tokens of such a text, its first included, stay when a sound of so many `seconds` goes on."""
        return 0

    @property
    def window_frames(self) -> int:
        """Frames of a full window."""
        return self.chunk_frames * self.window_chunks

    @property
    def part_frames(self) -> int:
        """Frames of a part, as which sound is measured: windows are whole parts, but for the last."""
        return next(size for size in range(min(_PART, self.window_frames), 0, -1) if not self.window_frames % size)

    @property
    def kept_parts(self) -> int:
        """How many parts' logarithms are kept, as many at least as the longest run takes."""
        longest = (self.lead_windows + self.run_windows) * self.window_frames // self.part_frames
        return max(_KEPT_PARTS, longest)

    @property
    def group_frames(self) -> int:
        """Frames of a group of features, whose bands stand one behind the other: the program's order."""
        return self.chunk_frames if self.family == "qwen3_asr" else 1

    @property
    def window_rows(self) -> int:
        """The encoder's rows of a full window."""
        return self.chunk_rows(self.window_frames)

    @property
    def run_rows(self) -> int:
        """The encoder's rows of the longest run."""
        return (self.lead_windows + self.run_windows) * self.window_rows

    def chunk_rows(self, frames: int) -> int:
        """The encoder's rows of the whole chunks that hold so many frames."""
        return -(-frames // self.chunk_frames) * convolved(self.chunk_frames, self.halvings)

    def encoded_rows(self, frames: int) -> int:
        """The encoder's rows of so many frames: the last chunk may be shorter."""
        full, rest = divmod(frames, self.chunk_frames)
        return full * convolved(self.chunk_frames, self.halvings) + convolved(rest, self.halvings)

    def rows(self, frames: int) -> int:
        """Rows, each a token of the language model, of so many frames."""
        return self.encoded_rows(frames) // self.merged


@dataclass(frozen=True)
class ConformerConfig(AudioConfig):
    """Gemma 4's encoder, each row of which sees itself and rows before it alone: `past` of them in a layer's attention,
    itself too, `kernel` in its convolution. The second convolution of sound has `second_channels`, scores of attention
    are capped at `cap`, feed-forward layers are weighted by `share`; linear layers have bounds where `clipped`, and
    give `encoded_size` columns at last. `begin` and `end` are the ids around a sound."""

    second_channels: int
    kernel: int
    past: int
    cap: float
    share: float
    clipped: bool
    encoded_size: int
    begin: int
    end: int

    run_windows = 26  # 12 seconds; with those before them no convolution has more places than kernels take

    @property
    def lead_windows(self) -> int:
        """Those that a row's value follows from: what each layer sees, and the last row of the convolutions."""
        return -(-(self.num_layers * (self.past + self.kernel - 2) + 1) // self.window_rows)

    @property
    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.begin,), (self.end,)


@dataclass(frozen=True)
class RealtimeConfig(AudioConfig):
    """Voxtral Realtime's encoder, a row of which sees itself and the `past` - 1 before it in a layer: more than a run
    has, so that keys and values are kept. Heads have `head_size` elements, norms `epsilon`. Tokens are written `delay`
    tokens behind what they stand for, and a sound has `silence` of so many tokens before it and, beside the delay,
    behind it."""

    head_size: int
    past: int
    epsilon: float
    rope_theta: float
    delay: int
    silence: tuple[int, int]

    run_windows = 8  # what half a second changes, with the silence behind it

    @property
    def lead_windows(self) -> int:
        """That of the frames which the first row's convolutions read."""
        return 1

    @property
    def kept_rows(self) -> int:
        """Those that a row sees, with what two runs may write over: the last windows of both are not final."""
        return self.past - 1 + 2 * self.run_windows * self.window_rows

    @property
    def prompt_tokens(self) -> int:
        return self.silence[0] + self.delay

    def settled(self, seconds: float) -> int:
        return 1 + self.silence[0] + max(0, int((seconds - _AROUND) * _FRAMES_A_SECOND) // self.chunk_frames)


def convolved(size: int, times: int) -> int:
    """What so many convolutions over three places, with a stride of 2 and a zero at either end, leave of a size."""
    for _ in range(times):
        size = (size + 1) // 2
    return size
