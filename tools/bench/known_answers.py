"""Known answers for measuring speeds: whatever the weights, decoding draws the tokens that are expected.

The logits of the expected token are raised before tokens are chosen; of what a draft model proposes a path, as long as
is said, becomes what is expected. All that computes and chooses runs as ever, plain steps and rounds, on both backends,
captured too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tools.bench.simulated_acceptance import compiled

_SOURCE = r"""
extern "C" __global__ void expect(float* logits, int* tokens, const int* parents, const int* depths,
                                  const int* positions, const int* owners, const int* expected, const int* reach,
                                  int nodes, int vocabulary, int rows) {
  const long long slot = blockIdx.x, place = owners[slot] * rows + positions[slot];
  logits += slot * nodes * vocabulary;
  tokens += slot * nodes;
  parents += slot * nodes;
  depths += slot * nodes;
  const int* due = expected + place;
  __shared__ int deepest;
  if (threadIdx.x == 0) deepest = 0;
  __syncthreads();
  for (int node = threadIdx.x; node < nodes; node += blockDim.x) {
    const int depth = nodes == 1 ? 0 : depths[node];
    if (depth < 0 || due[depth] < 0) continue;
    logits[(long long)node * vocabulary + due[depth]] = 1e30f;
    if (reach != nullptr && tokens[node] >= 0 && depth <= reach[place]) atomicMax(&deepest, depth * 1024 + 1023 - node);
  }
  __syncthreads();
  if (threadIdx.x != 0 || deepest == 0) return;
  for (int node = 1023 - deepest % 1024; node > 0; node = parents[node]) tokens[node] = due[depths[node] - 1];
}
"""
_THREADS = 64


class KnownAnswers:
    """Lets a runner, before its first step, draw what `expect` says; rounds of `plans`, by name, as far as it says."""

    def __init__(self, runner: Any, plans: Sequence[str] = ()) -> None:
        backend = self._backend = runner.backend
        self._shape = runner.limits.max_batch, runner.limits.kv_rows + runner.verification.most_nodes + 1
        self._expected, self._owners = backend.zeros(self._shape, "int32"), backend.zeros(self._shape[:1], "int32")
        self._reach = {plan: backend.zeros(self._shape, "int32") for plan in plans}
        self._function = None
        if backend.fixed_shapes:
            self._function = compiled(_SOURCE, b"expect.cu", backend.gpu.compute_capability).get_function("expect")
            self._function.prepare("PPPPPPPPiii")
        self._base = runner.base
        select, move = runner.base.sampling.select, runner.move

        def select_expected(slots: slice, logits: Any, *others: Any) -> None:
            self._raise(logits, slots, None, None)
            select(slots, logits, *others)

        def move_owner(source: int, target: int) -> None:
            move(source, target)
            self._order[source], self._order[target] = self._order[target], self._order[source]
            backend.upload(self._owners, np.array(self._order, np.int32))

        runner.base.sampling.select, runner.move = select_expected, move_owner
        runner.verification.before_acceptance = lambda tree: self._raise(
            tree.logits.logits, slice(0, tree.nodes.tokens.shape[0]), tree.nodes, self._reach.get(tree.plan.name)
        )

    def expect(
        self, answers: Sequence[tuple[int, Sequence[int] | None]], reached: Mapping[str, Sequence[Sequence[int]]] = {}
    ) -> None:
        """From now on: slot by slot the answers to prompts of so many tokens; None leaves the choice to the model. How
        many drafted tokens a round gets, by plan, is what is `reached` at the place of the answer where it begins."""
        self._order = list(range(self._shape[0]))
        self._backend.upload(self._owners, np.array(self._order, np.int32))
        self._upload(self._expected, -1, [(begin, answer) for begin, answer in answers if answer is not None])
        for plan, counts in reached.items():
            self._upload(self._reach[plan], 0, [(a[0], own) for a, own in zip(answers, counts, strict=True)])

    def _upload(self, array: Any, other: int, rows: Sequence[tuple[int, Sequence[int]]]) -> None:
        values = np.full(self._shape, other, np.int32)
        for slot, (begin, row) in enumerate(rows):
            values[slot, begin : begin + len(row)] = row
        self._backend.upload(array, values)

    def _raise(self, logits: Any, slots: slice, nodes: Any, reach: Any) -> None:
        """Of logits [B, V] or, of trees, [B, T, V]."""
        positions, owners = self._base.sequences(slots).positions, self._owners[slots]
        count, vocabulary = 1 if nodes is None else nodes.tokens.shape[1], logits.shape[-1]
        if self._function is None:
            for slot, place in enumerate(positions[: slots.stop - slots.start]):
                tree = None if nodes is None else (nodes.tokens[slot], nodes.parents[slot], nodes.depths[slot])
                due = self._expected[owners[slot], place:]
                most = None if reach is None else reach[owners[slot], place]
                _raise_on_host(logits[slot].reshape(count, vocabulary), due, tree, most)
            return
        tree = (0, 0, 0) if nodes is None else (nodes.tokens.pointer, nodes.parents.pointer, nodes.depths.pointer)
        arrays = positions.pointer, owners.pointer, self._expected.pointer, 0 if reach is None else reach.pointer
        sizes = np.int32(count), np.int32(vocabulary), np.int32(self._shape[1])
        given = logits.pointer, *tree, *arrays, *sizes
        self._function.prepared_async_call(
            (slots.stop - slots.start, 1), (_THREADS, 1, 1), self._backend.stream, *given
        )


def _raise_on_host(logits: np.ndarray, due: np.ndarray, tree: Any, most: int | None) -> None:
    """As the kernel does, of one slot."""
    tokens, parents, depths = tree or (np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32))
    wanted = due[np.maximum(depths, 0)]
    known = np.flatnonzero((depths >= 0) & (wanted >= 0))
    logits[known, wanted[known]] = 1e30
    if most is None:
        return
    reached = [node for node in known.tolist() if tokens[node] >= 0 and depths[node] <= most]
    node = max(reached, key=lambda each: (depths[each], -each), default=0)
    while node > 0:
        tokens[node] = due[depths[node] - 1]
        node = parents[node]
