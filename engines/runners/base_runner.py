"""Runs the base model's engines: prefill of one slot, decode steps of the leading slots, on either backend.

State lives in device arrays that kernels advance, so a decode step is one captured launch: embedding lookup, positions
and mask, the engine, selection of the token, advance. The host only reads the tokens, from memory that it sees.
Invariants: the last token of a sequence has no KV row yet; `kvcache_start_index` counts the rows before it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np

from edgellm.engines.backends.base import Backend, Engine, Readback, uploaded
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import EngineError
from edgellm.engines.lora.adapter import LoraAdapter
from edgellm.engines.model.config import DecoderConfig, DraftConfig
from edgellm.engines.model.decoder import EMBEDDING, decoder_weights, embedding_name, head_weight_name, looks_ahead
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.memory_plan import most_logit_rows, most_tokens, plan_memory
from edgellm.engines.model.rotary import rotary_table
from edgellm.engines.model.states import decoder_states
from edgellm.engines.model.steps import LAST_SEEN
from edgellm.engines.runners.adapter_slots import AdapterSlots, require_adapters
from edgellm.engines.runners.captured_steps import CapturedSteps, HostStage, LoadedEngines, Stages, in_order
from edgellm.engines.runners.media import PromptMedia
from edgellm.engines.runners.media_inputs import MediaInputs, MediaRows
from edgellm.engines.runners.prefill import PrefillingRunner, Stops
from edgellm.engines.runners.rows import StepBuffers, bound_inputs
from edgellm.engines.runners.sampling_state import EmittedRings, SamplingState, SamplingValues, StepRules
from edgellm.engines.runners.states import ModelStates
from edgellm.engines.runners.token_rows import TokenRows
from edgellm.kernels.arrays import Array, leading
from edgellm.kernels.contracts import rows_of
from edgellm.kernels.sampling.contract import ModelTables, SequenceState

_PHASES = ("prefill", "decode")
#: Of a decode step: sequences, KV rows, whether one has an adapter, whether all draw by argmax.
StepKey = tuple[int, int, bool, bool]


class FeatureUser:
    """What goes along with the base model and takes its features, as a draft model does; this one leaves them."""

    def take_chunk(
        self, slot: int, following: np.ndarray, position: int, features: Array, media: PromptMedia | None
    ) -> None:
        """`features` [1, >= n, F] compute are those of a prompt with `media` from `position` on; `following` [n] int32
        are its tokens behind each of them, of which there are one less at its end."""

    def take_tokens(self, slots: slice, tokens: Array, features: Array) -> list[Callable[[], None]]:
        """What takes `tokens` [n] int32, which the slots drew after rows whose features are `features` [n, 1, F]."""
        return []


class BaseEngineRunner(PrefillingRunner):
    """Owns engines, weights, KV caches and device state of one base model.

    `limits.max_batch` slots each hold one sequence. Not thread-safe. A `draft` counts in the memory plan, as does
    `vision_memory`, what a vision encoder takes (bytes by name). Who goes along is put into `feature_user` before the
    first prompt; what it needs besides is public: `weights`, `states`, `tables`, `offsets` [S] (position less row),
    `media_rows`, `sampling`, `lengths` (the committed rows of each slot, as the host knows them, never too few; 0 for
    an idle one, which `left` says of the sequence that it had last).

    With `adapters`, LoRA adapters by name (there may be none yet), the engines that apply them are loaded, too; they
    run where a sequence has an adapter. `adapters` (None without) takes further ones.
    """

    def __init__(
        self,
        backend: Backend,
        config: DecoderConfig,
        limits: EngineLimits,
        checkpoint: Checkpoint,
        progress: Callable[[int, int], None] | None = None,
        draft: DraftConfig | None = None,
        adapters: Mapping[str, LoraAdapter] | None = None,
        vision_memory: Mapping[str, int] | None = None,
    ) -> None:
        self.backend, self.config, self.limits = backend, config, limits
        self.feature_user = FeatureUser()
        if adapters is not None:
            require_adapters(limits)
        if (problem := limits.window_problem(config)) is not None:
            raise EngineError(f"the limits' window_rows: {problem}")
        shapes = limits.engine_shapes() if adapters is None else limits.all_engine_shapes()
        #: Of phases prefill and decode.
        self.engines = LoadedEngines(
            backend, [shape for shape in shapes if shape.model == "base" and shape.phase in _PHASES]
        )
        specs, rows = decoder_weights(config), max(limits.max_batch, limits.prefill_chunk)
        mask = self.engines.mask_size("base", rows, limits.key_ranges[-1])
        self.memory_plan = plan_memory(
            config,
            limits,
            specs,
            backend.compute_dtype,
            {"masks": mask, "engine scratch": backend.scratch_bytes(), **backend.known_memory},
            draft,
            adapters is not None,
            vision_memory,
        )
        backend.check_memory(self.memory_plan)
        self.weights = backend.load_weights(checkpoint, specs, progress)
        #: Also of prompts and rounds.
        self.token_rows = TokenRows(backend, config, checkpoint, most_tokens(limits))
        rotary = uploaded(backend, rotary_table(config, limits.kv_rows, limits.kv_capacity))
        self.offsets = backend.zeros((limits.max_batch,), "int32")
        self._tables = ModelTables(self.weights[embedding_name(config)], rotary, self.offsets)
        layers, start = decoder_states(config, limits.kv_cache, limits), backend.zeros((limits.max_batch,), "int32")
        #: The states of the slots; those of idle ones may be exchanged and copied.
        self.states = ModelStates(backend, layers, limits.max_batch, limits.kv_rows, start, is_base=True)
        self.adapters: AdapterSlots | None = None
        if adapters is not None:
            self.adapters = AdapterSlots(backend, config, limits)
            for name, adapter in adapters.items():
                self.adapters.add(name, adapter)
        self._kept = self.states.kept_inputs(limits.max_batch, 1)
        self._allocate_state(start)
        #: What decode steps run.
        self.steps = CapturedSteps(backend)
        self._stages: dict[Hashable, Stages] = {}
        self._prepared: set[int] = set()
        self._decode_shapes: dict[tuple[int, bool], EngineShape] = {}
        self.lengths, self.left = [0] * limits.max_batch, [0] * limits.max_batch

    def start(
        self,
        slot: int,
        prompt_ids: Sequence[int],
        reused: int,
        sampling: SamplingValues,
        media: PromptMedia | None = None,
        rules: StepRules | None = None,
        generated: int = 0,
        stops: Stops | None = None,
    ) -> Readback:
        """Prefill `slot` with the prompt [N], whose first `reused` tokens its states have taken already, and draw a
        token, one of those that the `rules` allow. The last `generated` tokens are an answer that goes on. On the way
        is done what `stops` has for places behind `reused`.

        Returns the readback of that token, [1] int32. Raises EngineError if the prompt is empty, longer than the
        context allows, not in the vocabulary, or has tokens of media elsewhere than its `media`; the slot is then
        unchanged.
        """
        ids = np.asarray(prompt_ids, np.int64)
        count, capacity = len(ids), self.limits.kv_capacity
        if not 0 < count < capacity:
            raise EngineError(f"a prompt of {count} tokens does not fit: 1 to {capacity - 1} tokens are possible")
        if not 0 <= reused < count:
            raise EngineError(f"{reused} of {count} prompt tokens to reuse: at least the last one is recomputed")
        ids = self.checked_ids(ids, media)
        self._check_media(count, reused, media)
        one = slice(slot, slot + 1)
        self._media_inputs.hear(slot, media)
        self._set_offset(slot, media)
        for position, tokens, chunk in self._prompt(slot, ids, reused, media, stops or {}):
            following = ids[position + 1 : position + tokens + 1]
            self.feature_user.take_chunk(slot, following, position, self._buffers.features(1, chunk), media)
        self.await_rows()
        self._set_sequence(slot, prompt_ids, generated, sampling)
        drawn = self._tokens[one]
        if rules is not None or self.sampling.biased(one):
            self.sampling.obey(rules, 1)
            self.sampling.constrain(one, self._logits[one])
        self.sampling.select(one, self._logits[one], drawn, self.sequences(one), self.sampling.plain(one))
        in_order(self.feature_user.take_tokens(one, drawn, self._buffers.row_features(tokens - 1)))()
        self.lengths[slot] = count
        read = partial(self._emitted.read, one, one)
        return read() if media is None else self.media_rows.checked(slot, read)

    def resume(
        self,
        slot: int,
        text_ids: Sequence[int],
        generated: int,
        sampling: SamplingValues,
        media: PromptMedia | None = None,
    ) -> None:
        """Go on in the idle `slot` with a text [N] whose first N - 1 rows it holds, and whose last `generated` tokens
        were drawn: nothing is computed."""
        self._media_inputs.hear(slot, media)
        self._set_offset(slot, media)
        self._set_sequence(slot, text_ids, generated, sampling)
        self.force_token(slot, text_ids[-1])
        self.lengths[slot] = len(text_ids) - 1

    def _set_sequence(self, slot: int, text_ids: Sequence[int], generated: int, sampling: SamplingValues) -> None:
        """Let the slot hold a text [N] of which all but the last token is committed."""
        self.sampling.set(slot, sampling, text_ids, generated)
        state, count = self._state, len(text_ids)
        for array, value in ((state.kvcache_start_index, count - 1), (state.positions, count), (state.active, 1)):
            self.backend.upload(array[slot : slot + 1], np.asarray([value], np.int32))

    def begin(self, batch: int) -> StepKey:
        """Enqueue the forward pass of the next step in the `batch` leading slots, whose tokens may be under way, and
        give what `decode` goes on with.

        It changes nothing: whichever step comes instead writes the same KV rows again. It counts until a slot is
        started, stopped, moved or forced. Raises EngineError as `decode` does.
        """
        key = self._step_key(batch)
        self.steps.run(("forward", *key[:3]), self._forward_step(*key[:3]))
        return key

    def decode(self, batch: int, rules: StepRules | None = None, begun: StepKey | None = None) -> Readback:
        """Take one step in the `batch` leading slots; returns the readback of their tokens, [batch] int32 (idle: -1).

        With `rules` it is two launches: they fill the masks while the first computes the logits, which may have
        `begun`. So it is with biases. Raises EngineError where a sequence has no KV row left.
        """
        if rules is not None or begun is not None or self.sampling.biased(slice(0, batch)):
            key = begun or self.begin(batch)
            self.sampling.obey(rules, key[0])
            self.steps.run(("choice", key[0], key[3]), self._choice_step(key[0], key[3]))
        else:
            key = self._step_key(batch)
            self.steps.run(key, self._whole_step(*key))
        for slot in range(batch):
            self.lengths[slot] += 1 if self.lengths[slot] else 0
        return self._emitted.read(slice(0, batch), slice(0, key[0]))

    def plan_steps(self) -> None:
        """Plan the capture of decode steps of every kind, those without rules first (see `CapturedSteps`)."""
        kinds = [
            (batch, key_range, adapts)
            for batch, adapts in product(self.limits.batches, self.adapter_kinds)
            for key_range in self.engines.key_ranges(self._decode_shape(batch, adapts))
        ]
        for kind, plain in product(kinds, (True, False)):
            key = *kind, plain
            self.steps.plan(key, partial(self._whole_step, *key), partial(self._read_all, kind[0]))
        for kind in kinds:
            self.steps.plan(("forward", *kind), partial(self._forward_step, *kind))
        for batch, plain in product(self.limits.batches, (True, False)):
            stages = partial(self._choice_step, batch, plain)
            self.steps.plan(("choice", batch, plain), stages, partial(self._read_all, batch))

    def _read_all(self, batch: int) -> None:
        """Read what a step emitted in the leading slots, none of which has a sequence."""
        every = slice(0, batch)
        self._emitted.read(every, every).wait()

    def _step_key(self, batch: int) -> StepKey:
        """The key of the next step in the leading slots."""
        longest = max(self.lengths[:batch]) + 1
        if longest > self.limits.kv_rows:
            raise EngineError(
                f"the KV cache of {self.limits.kv_rows} rows is full: stop the sequence, or build with a larger "
                "--kv-capacity"
            )
        bucket = min(size for size in self.limits.batches if size >= batch)
        slots = slice(0, batch)
        adapts = self.adapts(slots)
        key_range = self.engines.key_range(self._decode_shape(bucket, adapts), longest)
        return bucket, key_range, adapts, self.sampling.plain(slots)

    def _whole_step(self, batch: int, rows: int, adapts: bool, plain: bool) -> Stages:
        """A decode step without masks and biases: the logits of so many sequences, over so many rows, with adapters,
        and the choice of their tokens, plainly."""
        key = batch, rows, adapts, plain
        if key not in self._stages:
            choice = self._choose(batch, plain, False)
            kind = f"{'greedy' if plain else 'sampled'}{', with adapters' if adapts else ''}"
            name = f"plain decode of {batch} sequences, {rows} rows, {kind}"
            self._stages[key] = self._with_rows(batch, name, self._forward(batch, rows, adapts), choice)
        return self._stages[key]

    def _forward_step(self, batch: int, rows: int, adapts: bool) -> Stages:
        """The first half of a step under masks or biases, which every way of drawing shares."""
        key = "forward", batch, rows, adapts
        if key not in self._stages:
            name = f"logits of {batch} sequences, {rows} rows{', with adapters' if adapts else ''}"
            self._stages[key] = self._with_rows(batch, name, self._forward(batch, rows, adapts))
        return self._stages[key]

    def _choice_step(self, batch: int, plain: bool) -> Stages:
        key = "choice", batch, plain
        if key not in self._stages:
            name = f"choice for {batch} sequences, {'greedy' if plain else 'sampled'}"
            self._stages[key] = {name: in_order(self._choose(batch, plain, True))}
        return self._stages[key]

    def _with_rows(
        self, batch: int, name: str, forward: list[Callable[[], None]], behind: Sequence[Callable[[], None]] = ()
    ) -> Stages:
        """A forward pass and what is `behind` it; its last part waits for rows of the tokens that the leading slots
        take, where they have such."""
        *before, last = forward
        if self.config.adds_sound:
            sound = HostStage(self._bring_sound, batch)
            return {"rows of sound": sound, name: in_order([*forward, *behind])}
        if not self.config.token_row_size:
            return {name: in_order([*forward, *behind])}
        stages = self.token_rows.stages(self.sequences(slice(0, batch)).token_ids, in_order(before))
        return {**stages, name: in_order([last, *behind])}

    def silence(self, shape: EngineShape) -> dict[str, Array]:
        """What an engine of a text that hears nothing is bound to for that."""
        return self._media_inputs.silence(shape)

    def _bring_sound(self, batch: int) -> None:
        """Bring the rows of sound that belong to the tokens which the leading slots take next."""
        for slot, length in enumerate(self.lengths[:batch]):
            self._media_inputs.bring_sound(slot, slot, length, length + 1)

    def force_token(self, slot: int, token_id: int) -> None:
        """Put `token_id` in the place of the token that the slot drew last, as teacher forcing does."""
        self.backend.upload(self._state.token_ids[slot : slot + 1], np.asarray([[token_id]], np.int32))

    def stop(self, slot: int) -> None:
        """Leave `slot` idle; its states stay."""
        self.backend.upload(self._state.active[slot : slot + 1], np.zeros(1, np.int32))
        self.set_adapter(slot, None)
        self.left[slot], self.lengths[slot] = self.lengths[slot] or self.left[slot], 0

    def move(self, source: int, target: int) -> None:
        """Go on with the sequence of slot `source` in the idle slot `target`; `source` is idle then, and holds the KV
        rows that `target` held.

        Everything must have been waited for.
        """
        self.swap_rows(source, target)
        state = self._state
        for array in (state.token_ids, state.positions, state.active, self.offsets, self._logits):
            self.backend.copy(array[target : target + 1], array[source : source + 1])
        self.sampling.move(source, target)
        self._media_inputs.move(source, target)
        if self.adapters is not None:
            self.adapters.move(source, target)
        self.stop(source)

    def swap_rows(self, first: int, second: int) -> None:
        """Exchange the states of two slots."""
        self.states.move(first, second, self.rows_held(first, second), True)
        for known in (self.lengths, self.left):
            known[first], known[second] = known[second], known[first]

    def copy_rows(self, source: int, target: int) -> None:
        """Let the idle slot `target` hold what the idle slot `source` holds."""
        self.states.move(source, target, self.rows_held(source), False)
        self.left[target] = self.left[source]

    def rows_held(self, *slots: int) -> int:
        """How many of the first rows of these slots may be asked for again, and one: where an idle one's part in a step
        writes."""
        return 1 + max(self.lengths[slot] or self.left[slot] for slot in slots)

    def logits(self, slot: int) -> np.ndarray:
        """The logits [V] float32 of the slot's latest step (waits for it)."""
        return self.backend.read(self._logits[slot : slot + 1]).wait()[0]

    def close(self) -> None:
        """Free everything, also where the backend reports a failure of earlier work, which is raised."""
        try:
            self.backend.synchronize()
        finally:
            self.feature_user = FeatureUser()  # not one which holds this runner: both go at once, and in this thread
            self.steps.clear()
            self._stages.clear()
            self.engines.clear()
            self.weights.clear()
            self.states.clear()
            if self.adapters is not None:
                self.adapters.clear()
            self.backend.close()

    def _allocate_state(self, start: Array) -> None:
        backend, config, limits = self.backend, self.config, self.limits
        slots, vocab = limits.max_batch, config.vocab_size
        self._buffers = StepBuffers(backend, config, limits, self.engines, slots)
        self._tokens = backend.zeros((slots,), "int32")
        self._emitted = EmittedRings(backend, slots)
        self._logits = backend.zeros((slots, vocab), "float32")
        self.media_rows = MediaRows(backend, slots)
        self._media_inputs = MediaInputs(backend, config, limits, self._tables.rotary, self.media_rows)
        self.sampling = SamplingState(backend, slots, vocab, limits.kv_capacity, most_logit_rows(limits))
        active, positions = (backend.zeros((slots,), "int32") for _ in range(2))
        token_ids, counts, emitted = backend.zeros((slots, 1), "int32"), self.sampling.token_counts, self._emitted
        self._state = SequenceState(active, token_ids, start, positions, counts, emitted.index, emitted.tokens)

    def _decode_shape(self, batch: int, adapts: bool) -> EngineShape:
        shape = self._decode_shapes.get((batch, adapts))
        if shape is None:
            plain = self.limits.base_shape("decode", batch, 1, self.limits.key_ranges[-1])
            shape = self._decode_shapes[batch, adapts] = self.limits.with_adapters(plain) if adapts else plain
        return shape

    def _engine(self, shape: EngineShape, slots: slice) -> Engine:
        """The engine for a shape, bound to the KV rows and logits of the slots."""

        def of_slots() -> dict[str, Array]:
            kept = self._kept.of(shape.batch, 1) if shape.phase == "decode" else None
            bindings = self.adapter_inputs(shape, slots) | self._buffers.outputs(shape) | self.states.bound(slots, kept)
            return bindings | {"logits": self._logits[slots].reshape(shape.batch, 1, self.config.vocab_size)}

        def constant() -> dict[str, Array]:
            inputs = bound_inputs(self._step_inputs(shape)) | self.token_rows.bound(shape)
            bound = self.engine_weights() | inputs | self._media_inputs.engine_inputs(shape)
            if shape.phase == "prefill" and self.states.is_recurrent:
                bound["state_tokens"] = self._buffers.state_tokens
            if looks_ahead(self.config, shape):
                bound[LAST_SEEN] = leading(self._buffers.last_seen, (1, shape.tokens))
            return bound | ({"last_token_ids": self._buffers.last_token_ids} if shape.selected < shape.tokens else {})

        keep = shape.phase == "decode"  # prompts come in any length: not worth keeping
        return self.engines.bound(shape, slots, of_slots, constant, keep)

    def engine_weights(self) -> dict[str, Array]:
        """All weights but an embedding table that only the lookup kernel reads."""
        if head_weight_name(self.config) == EMBEDDING:
            return self.weights
        return {name: weight for name, weight in self.weights.items() if name != EMBEDDING}

    def _forward(self, batch: int, key_range: int, adapts: bool) -> list[Callable[[], None]]:
        """What enqueues the logits for each of the leading slots, from device state to device state; the last of it
        takes tokens' own rows, where they have such. All that it works on is looked up here, once."""
        slots = slice(0, batch)
        shape = replace(self._decode_shape(batch, adapts), key_range=key_range)
        engine = self._engine(shape, slots)
        inputs, token_ids = self._step_inputs(shape), self.sequences(slots).token_ids
        prepare = partial(self.backend.kernels.prepare_step, self.tables(slots), token_ids, inputs)
        return [prepare, *engine.around_rows()]

    def _choose(self, batch: int, plain: bool, constrained: bool) -> list[Callable[[], None]]:
        """The same of the choice of a token by these logits."""
        slots = slice(0, batch)
        state, sampling, logits, tokens = self.sequences(slots), self.sampling, self._logits[slots], self._tokens[slots]
        return [
            *([partial(sampling.constrain, slots, logits)] if constrained else []),
            *self.states.commit_step(slots, state.active, self._kept.of(batch, 1)),
            partial(sampling.select, slots, logits, tokens, state, plain),
            *self.feature_user.take_tokens(slots, tokens, self._buffers.features(batch, 1)),
        ]

    def sequences(self, slots: slice) -> SequenceState:
        """The state of the slots."""
        return rows_of(self._state, slots)
