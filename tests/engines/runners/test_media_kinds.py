"""Prompts with spans of two kinds: images, and a second one whose tokens stand as those of text do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from golden_images import NAMES, WHOLE_IMAGES, GoldenModel, assert_close

from edgellm.engines.errors import EngineError, MediaError
from edgellm.engines.model.config import MediaKind
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.media import MediaEmbeddings, PromptMedia, place_media
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.errors import RequestError
from edgellm.media.encoders import MediaEncoders
from edgellm.text.messages import MediaReference

#: Tokens of text that become spans of the second kind: before, between and behind the images.
SPOKEN = 2


class TableEncoder:
    """Encodes a piece, a list of token ids, as the rows that a language model embeds these tokens as."""

    def __init__(self, kind: MediaKind, runner: BaseEngineRunner) -> None:
        self.kind, self._runner, self.memory = kind, runner, {f"{kind.name} rows": 8}

    def prepare(self, reference: MediaReference) -> Any:
        tokens = list(reference.source)
        return SimpleNamespace(kind=self.kind.name, tokens=len(tokens), source=tokens, digest=str(tokens))

    def written(self, piece: Any, number: int, /) -> list[int]:
        return [self.kind.token_id] * piece.tokens

    def encode(self, pieces: Sequence[Any], /) -> list[MediaEmbeddings]:
        return [embeddings_of(self._runner, piece.source, piece.digest) for piece in pieces]


def embeddings_of(runner: BaseEngineRunner, tokens: Sequence[int], digest: str) -> MediaEmbeddings:
    rows = np.stack([runner.tables(slice(0, 1)).embedding[token] for token in tokens])
    return MediaEmbeddings(rows, (np.zeros_like(rows),) * runner.config.deepstack_layers, digest)


def spoken(golden: GoldenModel, runner: BaseEngineRunner) -> tuple[list[int], PromptMedia]:
    """The prompt with its images, in which runs of text are spans of another kind that has their rows."""
    kind = MediaKind("sound", next(token for token in range(256) if token not in golden.token_ids))
    ids, starts = list(golden.token_ids), [0]
    starts += [span.stop for span in golden.placed().spans if span.stop + SPOKEN < len(ids)]
    sounds = []
    for start in starts:
        text = ids[start : start + SPOKEN]
        if golden.config.image_token_id not in text:
            sounds.append(embeddings_of(runner, text, f"sound at {start}"))
            ids[start : start + SPOKEN] = [kind.token_id] * SPOKEN
    assert len(sounds) >= 2
    return ids, place_media(ids, {golden.config.media["image"]: golden.images, kind: sounds}, golden.config)


@pytest.mark.parametrize("chunk", [16, 24])
@pytest.mark.parametrize("name", [*NAMES, *WHOLE_IMAGES])
def test_a_second_kind_has_the_rows_and_positions_of_text(name: str, chunk: int) -> None:
    """Logits are those that transformers has for the text, wherever chunks cut spans of both kinds."""
    golden = GoldenModel(name)
    limits = EngineLimits(1, chunk, 256)
    runner = golden.runner(replace(limits, window_rows=limits.rows_for_window(golden.config.window)))
    ids, media = spoken(golden, runner)
    runner.start(0, ids, 0, SamplingValues(), media).wait()
    assert_close(runner.logits(0), golden.expected["logits"][-1])
    golden.assert_continued(runner)


def test_spans_of_two_kinds_in_one_prompt() -> None:
    golden = GoldenModel(NAMES[0])
    runner = golden.runner(EngineLimits(1, 16, 256))
    ids, media = spoken(golden, runner)
    assert [span.start for span in media.spans] == sorted(span.start for span in media.spans)
    assert {span.kind.name for span in media.spans} == {"image", "sound"}
    for span in media.spans:
        assert media.identities(ids)[span.start : span.stop] == [
            (span.embeddings.digest, index) for index in range(span.tokens)
        ]
    if media.positions is not None:
        np.testing.assert_array_equal(media.positions, golden.placed().positions)
    sounds = tuple(span for span in media.spans if span.kind.name == "sound")
    with pytest.raises(EngineError, match=r"has image tokens .* but no images"):
        runner.start(0, ids, 0, SamplingValues(), replace(media, spans=sounds))
    fewer = tuple(span for span in media.spans if span is not sounds[0])
    with pytest.raises(EngineError, match=rf"sound tokens .* and {len(sounds) - 1} sounds with"):
        runner.start(0, ids, 0, SamplingValues(), replace(media, spans=fewer))
    with pytest.raises(EngineError, match=r"1 sound tokens .* but there are 2 sounds with 4 tokens"):
        place_media(
            [5, sounds[0].kind.token_id], {sounds[0].kind: [each.embeddings for each in sounds[:2]]}, golden.config
        )


def test_a_span_with_tokens_of_text_among_its_own() -> None:
    """As where each row of an image ends in a token of its own: chunks cut it anywhere."""
    golden = GoldenModel("llava" if "llava" in NAMES else NAMES[0])
    text = [place for place, token in enumerate(golden.token_ids) if token != golden.config.image_token_id]
    places = [*text[:2], *text[3:-2]]
    kind = MediaKind("sound", next(token for token in range(256) if token not in golden.token_ids))
    ids = [kind.token_id if place in places else token for place, token in enumerate(golden.token_ids)]
    runner = golden.runner(EngineLimits(1, 16, 256))
    sound = embeddings_of(runner, [golden.token_ids[place] for place in places], "a sound")
    runs = np.diff([0, *(np.flatnonzero(np.diff(places) > 1) + 1), len(places)])
    image = golden.config.media["image"]
    media = place_media(ids, {image: golden.images, kind: [replace(sound, runs=tuple(runs))]}, golden.config)
    runner.start(0, ids, 0, SamplingValues(), media).wait()
    assert_close(runner.logits(0), golden.expected["logits"][-1])
    heard = [each for each in media.identities(ids) if isinstance(each, tuple) and each[0] == "a sound"]
    assert heard == [("a sound", index) for index in range(len(places))]
    with pytest.raises(EngineError, match="sound 1 are interrupted"):
        place_media(ids, {image: golden.images, kind: [sound]}, golden.config)


def test_encoders_by_name_take_what_is_theirs_in_the_prompts_order() -> None:
    golden = GoldenModel("llava" if "llava" in NAMES else NAMES[0])
    runner = golden.runner(EngineLimits(1, 16, 256))
    encoders = MediaEncoders(
        [TableEncoder(MediaKind("sound", 3), runner), TableEncoder(MediaKind("smell", 4), runner)],  # type: ignore[list-item]
        replace(golden.config, mrope_section=()),
        Path("robot"),
    )
    assert encoders.memory == {"sound rows": 8, "smell rows": 8}
    shown = [("smell", [7]), ("sound", [8, 9]), ("smell", [5, 6, 7])]
    pieces = encoders.prepare([MediaReference(ids, False, "RGB", kind, kind) for kind, ids in shown])
    ids = encoders.expand([1, 4, 3, 2, 4], pieces)
    assert ids == [1, 4, 3, 3, 2, 4, 4, 4]
    media = encoders.encode(ids, pieces)
    assert [(span.kind.name, span.number, span.start, span.tokens) for span in media.spans] == [
        ("smell", 1, 1, 1),
        ("sound", 1, 2, 2),
        ("smell", 2, 5, 3),
    ]
    table = runner.tables(slice(0, 1)).embedding
    np.testing.assert_array_equal(media.spans[2].embeddings.rows, table[5:8])
    with pytest.raises(MediaError, match=r"0 sound markers .* for 1 sound:"):
        encoders.expand([4, 4], pieces)
    with pytest.raises(RequestError, match="shows 1 image, but robot has no vision model"):
        encoders.prepare([MediaReference([], False, "RGB", "image 1")])
