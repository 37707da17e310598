"""Known answers for measuring speeds: whatever the weights, decoding draws the tokens that are expected.

The logits of the expected token are raised before tokens are chosen; all that computes and chooses runs as ever, plain
steps and rounds, on both backends, captured too. One sequence at a time, in slot 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tools.bench.simulated_acceptance import compiled

_SOURCE = r"""
extern "C" __global__ void expect(float* logits, const int* positions, const int* depths, const int* expected,
                                  int nodes, int vocabulary) {
  for (int node = threadIdx.x; node < nodes; node += blockDim.x) {
    const int token = expected[positions[0] + (depths == nullptr ? 0 : depths[node])];
    if (token >= 0) logits[(long long)node * vocabulary + token] = 1e30f;
  }
}
"""
_THREADS = 64


class KnownAnswers:
    """Lets a runner, before its first step, draw what `expect` says."""

    def __init__(self, runner: Any) -> None:
        backend = self._backend = runner.backend
        room = runner.limits.kv_rows + runner.verification.most_nodes + 1
        self._expected = backend.zeros((room,), "int32")
        self._function = None
        if backend.fixed_shapes:
            self._function = compiled(_SOURCE, b"expect.cu", backend.gpu.compute_capability).get_function("expect")
            self._function.prepare("PPPPii")
        base = runner.base
        state, select = base.sequences(slice(0, 1)), base.sampling.select

        def select_expected(slots: slice, logits: Any, *others: Any) -> None:
            self._raise(logits, state.positions, None)
            select(slots, logits, *others)

        base.sampling.select = select_expected
        runner.verification.before_acceptance = lambda tree: self._raise(
            tree.logits.logits.reshape(-1, tree.logits.logits.shape[2]), state.positions, tree.nodes.depths
        )

    def expect(self, prompt_tokens: int, answer: Sequence[int] | None) -> None:
        """From now on: the answer to a prompt of so many tokens; None leaves the choice to the model."""
        expected = np.full(self._expected.shape, -1, np.int32)
        if answer is not None:
            expected[prompt_tokens : prompt_tokens + len(answer)] = answer
        self._backend.upload(self._expected, expected)

    def _raise(self, logits: Any, positions: Any, depths: Any) -> None:
        nodes, vocabulary = 1 if depths is None else depths.shape[1], logits.shape[1]
        if self._function is None:
            below = np.zeros(nodes, np.int32) if depths is None else np.maximum(depths[0], 0)
            tokens = self._expected[positions[0] + below]
            known = np.flatnonzero(tokens >= 0)
            logits[known, tokens[known]] = 1e30
            return
        arrays = logits.pointer, positions.pointer, 0 if depths is None else depths.pointer, self._expected.pointer
        self._function.prepared_async_call(
            (1, 1), (_THREADS, 1, 1), self._backend.stream, *arrays, np.int32(nodes), np.int32(vocabulary)
        )
