"""Rules on tokens for tests: random ones that depend on a path, wrong ones, and sequences that obey them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm.engines.errors import ConstraintError
from edgellm.engines.speculation.constraints import TokenConstraint, packed_mask


class RandomRules:
    """After each pair of tokens a random share of the `vocab_size` tokens is allowed; see `TokenConstraint`.

    `free` of 7 pairs leave all tokens free, `dead` of them have no way on. A wrong rule is `late` by so many tokens.
    """

    def __init__(
        self, vocab_size: int, seed: int = 0, share: float = 0.5, free: int = 0, dead: int = 0, late: int = 0
    ) -> None:
        self.vocab_size, self._seed, self._share = vocab_size, seed, share
        self._free, self._dead, self._late = free, dead, late
        self.path: list[int] = []

    def allowed(self) -> np.ndarray:
        """[V] bool: the tokens that may come next."""
        known = self.path[: len(self.path) - self._late] if self._late else self.path
        pair = (-1, -1, *known)[-2:]
        kind = (3 * pair[0] + 5 * pair[1] + self._seed) % 7
        if kind < self._free:
            return np.ones(self.vocab_size, np.bool_)
        if kind >= 7 - self._dead and known:
            return np.zeros(self.vocab_size, np.bool_)
        random = np.random.default_rng((self._seed, pair[0] + 1, pair[1] + 1))
        return random.random(self.vocab_size) < self._share

    def fill_mask(self, row: np.ndarray) -> None:
        """See `TokenConstraint`."""
        allowed = self.allowed()
        if not allowed.any():
            raise ConstraintError("there is no way on")
        row.view(np.uint32)[:] = packed_mask(allowed)

    def try_advance(self, token: int) -> bool:
        """See `TokenConstraint`."""
        if not (0 <= token < self.vocab_size and self.allowed()[token]):
            return False
        self.path.append(token)
        return True

    def rollback(self, count: int) -> None:
        """See `TokenConstraint`."""
        del self.path[len(self.path) - count :]

    def forced(self, most: int) -> list[int]:
        """Nothing is."""
        return []

    def is_free(self) -> bool:
        """See `TokenConstraint`."""
        return bool(self.allowed().all())

    def is_complete(self) -> bool:
        """Nothing is asked for."""
        return True

    def is_stopped(self) -> bool:
        """Nothing ends the answer."""
        return False


class RuledSequence:
    """What `StepMasks` reads of a sequence."""

    def __init__(self, constraint: TokenConstraint | None) -> None:
        self.constraint, self.failure, self.is_over = constraint, None, False

    @property
    def finished(self) -> bool:
        """Whether it has failed."""
        return self.failure is not None

    def know(self, tokens: Sequence[int]) -> None:
        """Take notice of tokens, each of which the rules allow."""
        if self.constraint is not None:
            for token in tokens:
                assert self.constraint.try_advance(token), f"token {token} was drawn against the rules"
