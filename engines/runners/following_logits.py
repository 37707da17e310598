"""The logits behind every token of a text, as decoding would have them: the base model alone, and nothing is drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from edgellm.engines.backends.base import uploaded
from edgellm.engines.errors import EngineError
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.captured_steps import LoadedEngines
from edgellm.engines.runners.rows import StepBuffers, bound_inputs
from edgellm.kernels.arrays import Array, leading
from edgellm.kernels.decode.contract import MAX_TOKENS


class FollowingLogits:
    """Computes texts in an idle slot: what is context alone by prefill, the rest in steps of up to 64 tokens which give
    the logits of all, as a round verifies a chain. Kernels compute the bits of decode steps so.

    A model whose verify steps no kernels take is decoded token by token where engines have fixed shapes. It holds
    memory for the logits of one step, on the device and on the host. Not thread-safe; let it go before the runner
    is closed.
    """

    def __init__(self, base: BaseEngineRunner) -> None:
        self._base, limits, backend = base, base.limits, base.backend
        sizes = [MAX_TOKENS, limits.prefill_chunks[0]]
        if backend.fixed_shapes:
            sizes = [size for size in sizes if all(map(backend.takes_any_key_range, self._shapes(size)))]
            # A padded step may reach so many rows past the context as a padded chunk of a prompt, no more.
            sizes = sizes if limits.prefill_chunks[0] in sizes else [1]
        self._sizes = sorted(sizes)
        shapes = [
            replace(shape, key_range=key_range)
            for size in self._sizes
            for shape in self._shapes(size)
            for key_range in limits.key_ranges
        ]
        self._engines = LoadedEngines(backend, shapes)
        own = replace(limits, max_batch=1, prefill_chunk=self._sizes[-1])
        self._buffers = StepBuffers(backend, base.config, own, self._engines, 1)
        vocabulary = base.config.vocab_size
        self._logits = backend.zeros((self._sizes[-1] * vocabulary,), "float32")
        self._kept = base.states.kept_inputs(1, self._sizes[-1])
        chain = np.arange(self._sizes[-1], dtype=np.int32)[np.newaxis]
        self._parents, self._path = uploaded(backend, chain - 1), uploaded(backend, chain)
        self._read = backend.host_memory(4 * self._sizes[-1] * vocabulary).view(np.float32)

    def blocks(self, slot: int, token_ids: Sequence[int], first: int) -> Iterator[np.ndarray]:
        """Blocks [n, V] float32 of the logits that the tokens from number `first` on are drawn from, in their order.

        A block is written over by the next. The slot must be idle; its KV rows are then those of the text. Raises
        EngineError for a text that the context does not hold, a `first` that is no later token of it, and ids that the
        model has not.
        """
        ids, base = np.asarray(token_ids, np.int64), self._base
        if not 0 < first < len(ids) <= base.limits.kv_capacity:
            raise EngineError(
                f"logits of the tokens from {first} on of {len(ids)} were asked for: expected a later token than the "
                f"first, and at most {base.limits.kv_capacity} tokens"
            )
        ids = base.checked_ids(ids)
        base.fill(slot, ids[: first - 1])
        ends = range(first - 1, len(ids) - 1)
        position = ends.start
        while position < ends.stop:
            size = self._size(ends.stop - position)
            count = min(size, ends.stop - position)
            yield self._step(slot, ids[position : position + count], position, size)
            position += count

    def _size(self, count: int) -> int:
        """How many tokens the step has that takes the first of `count` tokens."""
        if not self._base.backend.fixed_shapes:
            return min(count, self._sizes[-1])
        return self._sizes[-1] if count >= self._sizes[-1] else self._sizes[0]

    def _shape(self, tokens: int) -> EngineShape:
        """The engine without adapters, of the largest key range."""
        limits = self._base.limits
        phase = "decode" if tokens == 1 else "verify"
        return limits.base_shape(phase, 1, tokens, limits.key_ranges[-1], tokens)

    def _shapes(self, tokens: int) -> list[EngineShape]:
        """The shapes of the largest key range: the engine without adapters and, where the runner has such, that with
        them."""
        plain = self._shape(tokens)
        return [plain, self._base.limits.with_adapters(plain)] if self._base.adapters is not None else [plain]

    def _step(self, slot: int, ids: np.ndarray, start: int, size: int) -> np.ndarray:
        """The logits [n, V] behind `ids` [n], which are written to the rows from `start` on."""
        base, buffers, one = self._base, self._buffers, slice(slot, slot + 1)
        backend, vocabulary = base.backend, base.config.vocab_size
        token_ids = buffers.upload_prompt(ids, start, size, base.token_rows)
        widest = base.engine_shape(self._shape(size), one)
        shape = replace(widest, key_range=self._engines.key_range(widest, start + len(ids)))
        inputs = buffers.inputs(shape, buffers.prefill_start)
        logits = leading(self._logits, (1, size, vocabulary))

        def bindings() -> dict[str, Array]:
            bound = base.engine_weights() | bound_inputs(inputs) | buffers.outputs(shape) | {"logits": logits}
            bound |= base.token_rows.bound(shape) | base.silence(shape)
            if base.states.is_recurrent and size > 1:
                bound["node_parents"] = leading(self._parents.reshape(-1), (1, size))
            return bound | base.states.bound(one, self._kept.of(1, size)) | base.adapter_inputs(shape, one)

        engine = self._engines.bound(shape, one, bindings)
        backend.kernels.prepare_step(base.tables(one), token_ids, inputs)
        engine.enqueue()
        if base.states.is_recurrent:
            backend.upload(buffers.state_tokens, np.asarray([len(ids)], np.int32))
            path = leading(self._path.reshape(-1), (1, size))
            base.states.replay(one, self._kept.of(1, size), path, buffers.state_tokens)()
        values = self._read[: size * vocabulary].reshape(1, size, vocabulary)
        backend.download_rows(logits, values, len(ids)).wait()
        return values[0, : len(ids)]
