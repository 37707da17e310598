"""The masks of a step: the rules of the sequences that take part in it, as the runner asks for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm.decoding.sequence import DecodingSequence
from edgellm.engines.errors import ConstraintError
from edgellm.engines.speculation.constraints import fill_tree_masks


class StepMasks:
    """See `edgellm.engines.runners.sampling_state.StepRules`: the masks of `sequences`, slot by slot.

    A sequence whose rules have no way on is `stuck` alone; what is drawn for it is dropped.
    """

    def __init__(self, sequences: Sequence[DecodingSequence]) -> None:
        self._sequences = sequences

    def fill(self, trees: tuple[np.ndarray, np.ndarray] | None, rows: np.ndarray, masks: np.ndarray) -> int:
        """Masks of the leading slots, those of idle ones left out; see `StepRules`."""
        rows.fill(-1)
        used = 0
        for slot, sequence in enumerate(self._sequences):
            constraint = sequence.constraint
            if constraint is None or sequence.finished or sequence.is_over:
                continue
            try:
                if trees is not None:
                    tokens, parents = trees
                    nodes = tokens.shape[1]
                    found = fill_tree_masks(constraint, tokens[slot].tolist(), parents[slot].tolist(), masks[used:])
                    rows[slot * nodes : (slot + 1) * nodes] = np.where(found >= 0, found + used, -1)
                    used += int(found.max()) + 1
                elif not constraint.is_free():
                    constraint.fill_mask(masks[used])
                    rows[slot], used = used, used + 1
            except ConstraintError as error:
                sequence.stuck(error)
        return used
