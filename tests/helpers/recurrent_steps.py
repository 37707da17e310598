"""Golden models with recurrent layers as they are served: engines of prefill, decode and verify, and the commits
between, written out with the kernels' twin."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from golden_sequences import Sequences

from edgellm.engines.model.decoder import decoder_program
from edgellm.engines.model.program import Program
from edgellm.engines.model.states import decoder_states
from edgellm.kernels.recurrent.contract import AcceptedPath
from edgellm.kernels.recurrent.twin import NumpyRecurrent

#: Tokens of the context.
ROWS = 96


class RecurrentSteps(Sequences):
    """B sequences with their `lengths`, whose states change by `prefill`, `decode` and `accept` alone."""

    def __init__(self, directory: Path, batch: int = 1, kv_cache: str = "compute") -> None:
        super().__init__(directory, batch, ROWS, kv_cache)
        self.lengths = [0] * batch
        self._latest: tuple[Program, dict[str, np.ndarray]] | None = None

    @property
    def outputs(self) -> dict[str, np.ndarray]:
        """What the latest step was bound to, by name."""
        assert self._latest is not None
        return self._latest[1]

    def held(self, slot: int = 0) -> dict[str, np.ndarray]:
        """A copy of what a sequence's states hold: of KV rows those of its tokens."""
        states = {state.names: bool(state.kept(1, 1)) for state in decoder_states(self.config, self.kv_cache)}
        found = {}
        for names, is_recurrent in states.items():
            for name in names:
                whole = self.caches[name][slot]
                found[name] = (whole if is_recurrent else whole[:, : self.lengths[slot]]).copy()
        return found

    def copy(self) -> dict[str, np.ndarray]:
        """The states as they are now."""
        return {name: cache.copy() for name, cache in self.caches.items()}

    def restore(self, states: dict[str, np.ndarray], lengths: Sequence[int]) -> None:
        """Back to states that were copied at such lengths."""
        self.lengths = list(lengths)
        for name, cache in self.caches.items():
            cache[...] = states[name]

    def prefill(self, token_ids: Sequence[int], chunk: int = ROWS, padding: int = 0) -> np.ndarray:
        """One sequence goes on with token ids [N] in chunks, each padded by so many rows: logits [N, V]."""
        found = []
        for start in range(0, len(token_ids), chunk):
            ids = [*token_ids[start : start + chunk], *[-1] * padding]
            logits = self.logits(np.asarray([ids]), self.lengths)[0]
            count = len(ids) - padding
            self.lengths[0] += count
            found.append(logits[:count])
        return np.concatenate(found)

    def decode(self, token_ids: Sequence[int]) -> np.ndarray:
        """The logits [B, V] of a step of one token each, -1 an idle slot; nothing is committed."""
        ids = np.asarray(token_ids)[:, None]
        ancestors = np.ones((self.batch, 1, 1), np.bool_)
        return self._step("decode", ids, np.zeros_like(ids), ancestors)[:, 0]

    def verify(self, token_ids: np.ndarray, parents: np.ndarray) -> np.ndarray:
        """The logits [B, T, V] of trees of tokens [B, T], -1 padding, by their parents [B, T]; nothing is committed."""
        batch, tokens = token_ids.shape
        depths, ancestors = np.zeros_like(parents), np.zeros((batch, tokens, tokens), np.bool_)
        for b in range(batch):
            for t in range(tokens):
                parent = parents[b, t]
                ancestors[b, t, t] = True
                if parent >= 0:
                    depths[b, t] = depths[b, parent] + 1
                    ancestors[b, t] |= ancestors[b, parent]
        return self._step("verify", token_ids, depths, ancestors, parents.astype(np.int32))

    def accept(self, paths: Sequence[Sequence[int]]) -> None:
        """Take the nodes of a path of each sequence from the latest step into the states; none of an idle one."""
        assert self._latest is not None
        program, bindings = self._latest
        indices = np.zeros((self.batch, program.shape.tokens), np.int32)
        for b, path in enumerate(paths):
            indices[b, : len(path)] = path
        accepted = AcceptedPath(indices, np.asarray([len(path) for path in paths], np.int32))
        commits: dict[str, list] = {}
        for step in program.stateful:
            state = step.state(program.shape)
            if not state.kept(1, 1):  # KV rows move to consecutive places
                for name in state.names:
                    for b, path in enumerate(paths):
                        rows, start = self.caches[name][b], self.lengths[b]
                        rows[:, start : start + len(path)] = rows[:, [start + node for node in path]]
                continue
            arrays = (self.caches[state.names[0]], *(bindings[name] for name in state.kept_names))
            commits.setdefault(state.commit, []).append(state.committed(*arrays))
        for commit, layers in commits.items():
            getattr(NumpyRecurrent(), commit)(layers, accepted)()
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]

    def _step(
        self,
        phase: str,
        token_ids: np.ndarray,
        depths: np.ndarray,
        ancestors: np.ndarray,
        parents: np.ndarray | None = None,
    ) -> np.ndarray:
        batch, tokens = token_ids.shape
        mask = np.zeros((batch, 1, tokens, self.rows), np.bool_)
        for b, length in enumerate(self.lengths):
            mask[b, 0, :, :length] = True
            mask[b, 0, :, length : length + tokens] = ancestors[b]
        embeds = self.weights["model.embed_tokens.weight"][np.maximum(token_ids, 0)]
        bindings = {
            "inputs_embeds": np.where(token_ids[..., None] < 0, np.float32(0), embeds),
            "rope_rotary_cos_sin": self.table[np.asarray(self.lengths)[:, None] + depths],
            "attention_mask": mask,
            "kvcache_start_index": np.asarray(self.lengths, np.int32),
            **self.caches,
        }
        if parents is not None:
            bindings["node_parents"] = parents
        program = decoder_program(self.config, self.shape(phase, batch, tokens, self.rows))
        for name, (shape, _) in program.kept.items():
            bindings[name] = np.full(shape, np.nan, np.float32)
        self.compute(program, bindings)
        self._latest = program, bindings
        return bindings["logits"]
