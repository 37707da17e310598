"""The prompts of a runner's slots: cut into chunks, and brought to the engines of phase "prefill"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from edgellm.engines.backends.base import Backend, Engine, Transfer
from edgellm.engines.errors import EngineError
from edgellm.engines.formats.tensors import float32_into
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.decoder import looks_ahead
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.runners.adapter_slots import AdaptedRunner
from edgellm.engines.runners.captured_steps import LoadedEngines
from edgellm.engines.runners.media import PromptMedia
from edgellm.engines.runners.media_inputs import MediaInputs
from edgellm.engines.runners.rows import ArrivingRows, StepBuffers
from edgellm.engines.runners.states import ModelStates
from edgellm.engines.runners.token_rows import TokenRows
from edgellm.kernels.arrays import Array, leading
from edgellm.kernels.sampling.contract import ModelTables, SequenceState, StepInputs

#: What is to be done when the states of a prompt are those of its first so many tokens.
Stops = Mapping[int, Callable[[], object]]


def prompt_chunks(
    limits: EngineLimits,
    step: int | None,
    first: int,
    count: int,
    stops: Iterable[int] = (),
    whole: Sequence[tuple[int, int]] = (),
) -> Iterator[tuple[int, int]]:
    """Cut the tokens of a prompt from `first` to `count` into (tokens, engine's T); chunks end at the `stops`. The last
    chunk before each of them, and the very last, may be padded. `step` is the backend's `prompt_step`.

    Of each of the `whole` spans (first token, tokens), whose tokens see all of them, no chunk has a part: one
    that would end in the middle ends before it, and may be padded, too. None is longer than `prefill_chunk`, and no
    stop is inside one.
    """
    largest = limits.prefill_chunk
    for start, end in pairwise([first, *sorted(place for place in stops if first < place < count), count]):
        if whole:
            yield from _around_spans(limits, step, start, end, whole)
            continue
        sizes, rest = [largest] * ((end - start) // largest), (end - start) % largest
        if rest:
            sizes += [_rounded(limits, step, rest)] if _is_free(step, rest) else limits.cheapest_chunks(rest)
        ends = accumulate(sizes, initial=start)
        yield from ((min(size, end - place), size) for place, size in zip(ends, sizes, strict=False))


def _is_free(step: int | None, tokens: int) -> bool:
    """Whether one chunk takes so many tokens, rounded up. Short ones have engines of their own, which pad less."""
    return step is not None and (step == 1 or tokens > 2 * step)


def _rounded(limits: EngineLimits, step: int | None, tokens: int) -> int:
    return min(-(-tokens // (step or 1)) * (step or 1), limits.prefill_chunk)


def _around_spans(
    limits: EngineLimits, step: int | None, place: int, end: int, whole: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """See `prompt_chunks`: the largest of the chunks that are cheapest for the rest, or what is in front of the span
    that it would cut, or that span."""
    while place < end:
        tokens = min(end - place, limits.prefill_chunk)
        size = _rounded(limits, step, tokens) if _is_free(step, tokens) else limits.cheapest_chunks(tokens)[0]
        stop = min(place + size, end)
        cut = next((span for span in whole if span[0] < stop < sum(span)), None)
        if cut is not None:
            stop = cut[0] if cut[0] > place else sum(cut)
            tokens = stop - place
            size = _rounded(limits, step, tokens) if _is_free(step, tokens) else limits.chunk_for(tokens)
        yield stop - place, size
        place = stop


class PrefillingRunner(AdaptedRunner):
    """What a runner does with prompts. `offsets` [S] int32 are differences of position and row."""

    backend: Backend
    config: DecoderConfig
    engines: LoadedEngines
    states: ModelStates
    offsets: Array
    _tables: ModelTables
    _state: SequenceState
    _buffers: StepBuffers
    _media_inputs: MediaInputs
    token_rows: TokenRows
    _arriving: ArrivingRows | None = None
    #: Sizes of prompts whose launches are prepared.
    _prepared: set[int]

    def fill(self, slot: int, token_ids: np.ndarray) -> int:
        """Write the states of the first tokens [N] of a text, which are checked, to an idle slot; no draft goes along.
        Gives how many of the tokens the last chunk had (0 without any)."""
        self.backend.upload(self.offsets[slot : slot + 1], np.zeros(1, np.int32))
        return [0, *(tokens for _, tokens, _ in self._prompt(slot, token_ids, 0, None, {}))][-1]

    def prepare_prompt(self) -> bool:
        """Prepare the launches of prompts of a number of tokens, in the first slot, for which the first such prompt
        would wait; False where all are prepared. No prompt may be under way."""
        limits, step = self.limits, self.backend.prompt_step or self.limits.prefill_chunk
        sizes = {*limits.prefill_chunks, *range(3 * step, limits.prefill_chunk, step)} - self._prepared
        if not self.backend.fixed_shapes or not sizes:
            return False
        self._prepared.add(size := min(sizes))
        self._engine(limits.base_shape("prefill", 1, size, limits.key_ranges[-1]), slice(0, 1)).prepare()
        return True

    def last_hidden_state(self, slot: int, token_ids: Sequence[int]) -> np.ndarray:
        """Float32 [H]: what an embedding model puts out behind the final norm for the last token of a text [N].

        The slot must be idle; its states are then those of the text, which is computed from its first token on, so that
        its bits depend on nothing else. Raises EngineError for an empty text, more tokens than the context, and ids
        that the model has not.
        """
        count, most = len(token_ids), self.limits.kv_capacity
        if not 0 < count <= most:
            raise EngineError(f"a text of {count} tokens cannot be embedded: 1 to {most} tokens are possible")
        last = self.fill(slot, self.checked_ids(np.asarray(token_ids, np.int64)))
        found = self.backend.read(self._buffers.row_features(last - 1)).wait().reshape(-1)
        state = np.empty(found.shape, np.float32)
        float32_into(found, "bfloat16" if found.dtype == np.uint16 else found.dtype.name, state)
        return state

    def checked_ids(self, ids: np.ndarray, media: PromptMedia | None = None) -> np.ndarray:
        """Token ids as int32; EngineError where they are not this model's, or stand for media without `media`."""
        last = self.config.vocab_size - 1
        wrong = ids[(ids < 0) | (ids > last)]
        if wrong.size:
            raise EngineError(
                f"the prompt has the token id {wrong[0]}, this model's are 0..{last}: use its own tokenizer"
            )
        ids = ids.astype(np.int32)
        self._media_inputs.check(ids, media)
        return ids

    def expect_rows(self, rows: Iterable[tuple[str, Transfer]]) -> None:
        """States of an idle slot are copied by `Backend.upload_rows_beside` as `rows` is read: those of `states` in
        their order, then perhaps others', each with its transfer. What `start` enqueues next waits for them, layer by
        layer where the engine can."""
        self._arriving = ArrivingRows(self.backend, rows)

    def await_rows(self) -> None:
        """Let everything that is enqueued from now on wait for the states that are expected."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            arriving.wait_for_all()

    def tables(self, slots: slice) -> ModelTables:
        """What steps of the slots look rows up in."""
        return self._tables._replace(position_offsets=self.offsets[slots])

    def _prompt(
        self, slot: int, ids: np.ndarray, reused: int, media: PromptMedia | None, stops: Stops
    ) -> Iterator[tuple[int, int, int]]:
        """Enqueue the chunks of a prompt whose first `reused` tokens the states have taken; gives of each where it
        began, its tokens and the engine's, before what `stops` has for its end."""
        position = reused
        if reused == 0:  # a recurrent state would go on from whatever the slot had before
            self.states.clear_slot(slot)
        whole = () if media is None else media.whole
        for tokens, chunk in prompt_chunks(self.limits, self.backend.prompt_step, reused, len(ids), stops, whole):
            self._prefill(slot, ids[position : position + tokens], position, chunk, media)
            yield position, tokens, chunk
            position += tokens
            if position in stops:
                stops[position]()

    def _prefill(self, slot: int, ids: np.ndarray, start: int, chunk: int, media: PromptMedia | None) -> None:
        """Take `ids` [n], n <= chunk, into the states, as rows from `start` on; logits are those after the last."""
        token_ids = self._buffers.upload_prompt(ids, start, chunk, self.token_rows)
        self.backend.upload(self._buffers.last_token_ids, np.asarray([[len(ids) - 1]], np.int32))
        if self.states.is_recurrent:
            self.backend.upload(self._buffers.state_tokens, np.asarray([len(ids)], np.int32))
        one = slice(slot, slot + 1)
        plain = self.limits.base_shape("prefill", 1, chunk, self.limits.key_ranges[-1])
        if looks_ahead(self.config, plain):
            seen = np.arange(start, start + chunk, dtype=np.int32)
            if media is not None:
                seen[: len(ids)] = media.last_seen(start, start + len(ids))
            self.backend.upload(leading(self._buffers.last_seen, (1, chunk)), seen[np.newaxis])
        widest = self.engine_shape(plain, one)
        shape = replace(widest, key_range=self.engines.key_range(widest, start + len(ids)))
        engine, inputs = self._engine(shape, one), self._step_inputs(shape)
        self.backend.kernels.prepare_step(self.tables(one), token_ids, inputs)
        bound = inputs._asdict()
        self._media_inputs.write(slot, media, start, (start, start + len(ids)), token_ids, bound)
        by_layer = getattr(engine, "enqueue_by_layer", None)
        arriving = self._arriving
        if arriving is not None and by_layer is not None:
            by_layer(lambda index: arriving.wait_for(self.states.last_of[index]))
        else:
            self.await_rows()
            engine.enqueue()

    def _check_media(self, count: int, reused: int, media: PromptMedia | None) -> None:
        """Raise EngineError where spans whose tokens see each other are larger than a chunk, or the first `reused` of
        a prompt's `count` tokens end in one."""
        if media is None or not media.whole:
            return
        if (problem := self.limits.image_problem(self.config)) is not None:
            raise EngineError(problem)
        if media.prefix > self.limits.prefill_chunk:
            raise EngineError(f"{media.prefix} tokens that see each other are more than a chunk's")
        if 0 < reused < media.prefix:
            raise EngineError(f"{reused} of a prompt's {media.prefix} tokens, which see each other, cannot be reused")
        inside = media.inside(reused)
        if inside is not None:
            raise EngineError(
                f"{reused} of {count} prompt tokens to reuse end in {inside.kind.name} span {inside.number}, tokens "
                f"{inside.start} to {inside.stop - 1}, each of which sees all of it: reuse the {inside.start} before it"
            )

    def _set_offset(self, slot: int, media: PromptMedia | None) -> None:
        delta = media.position_delta if media else 0
        self.backend.upload(self.offsets[slot : slot + 1], np.asarray([delta], np.int32))

    def _engine(self, shape: EngineShape, slots: slice) -> Engine:
        """The engine for a shape, bound to the states and logits of the slots."""
        raise NotImplementedError

    def _step_inputs(self, shape: EngineShape) -> StepInputs:
        """What kernels write for an engine."""
        starts = self._state.kvcache_start_index[: shape.batch]
        return self._buffers.inputs(shape, self._buffers.prefill_start if shape.phase == "prefill" else starts)
