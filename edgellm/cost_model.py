"""What rounds cost now: costs measured once, corrected by finished rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from edgellm.drafting.costs import RoundCosts

#: Standard deviations of logarithms: how far the load of the machine and a measured cost may be from what was measured,
LOAD_DOUBT = 1.0
COST_DOUBT = 0.3
#: how far they move from one round to the next,
LOAD_DRIFT = 0.1
COST_DRIFT = 0.01
#: and how much rounds alike differ.
ROUND_NOISE = 0.15
#: No round counts as slower or faster than expected by more than this factor: it was interrupted.
LARGEST_SURPRISE = 2.0
#: A measured cost is wrong by far where its ratio to the first one turns out to be another by this factor, once the
#: doubt about that is down to `SURE`.
WRONG_COST = 1.5
SURE = 0.15


class CostModel:
    """Seconds of a round of each configuration in `names`.

    The logarithm of what a round takes over what was measured is the sum of the load of the machine (other work,
    clocks, length of the context), which all configurations share and which changes quickly, and of the
    configuration's own correction. Both follow finished rounds by a Kalman filter: what a round takes longer than
    expected counts as load until rounds of other configurations say otherwise.
    """

    def __init__(self, costs: RoundCosts, names: Sequence[str]) -> None:
        self._costs = costs
        self._index = {name: index for index, name in enumerate(names, 1)}
        # State 0 is the load, the others are the configurations' own corrections.
        self._logs = np.zeros(1 + len(names))
        self._covariance = np.diag([LOAD_DOUBT**2, *[COST_DOUBT**2] * len(names)])
        self._drift = np.diag([LOAD_DRIFT**2, *[COST_DRIFT**2] * len(names)])

    def seconds(self, name: str, batch: int) -> float:
        """The expected time of a round."""
        return self._costs.seconds(name, batch) * math.exp(self._logs[0] + self._logs[self._index[name]])

    def record(self, name: str, batch: int, seconds: float) -> None:
        """Take notice of a finished round."""
        surprise = math.log(max(seconds, 1e-9) / self.seconds(name, batch))
        limit = math.log(LARGEST_SURPRISE)
        self._covariance += self._drift
        shared = self._covariance[0] + self._covariance[self._index[name]]
        gain = shared / (shared[0] + shared[self._index[name]] + ROUND_NOISE**2)
        self._logs += gain * max(-limit, min(limit, surprise))
        self._covariance -= np.outer(gain, shared)

    @property
    def contradicted(self) -> bool:
        """Whether rounds have shown a measured cost to be wrong by far, relative to that of the first of `names`."""
        own, covariance = self._logs[1:], self._covariance[1:, 1:]
        doubt = np.diag(covariance) + covariance[0, 0] - 2.0 * covariance[0]
        return bool(np.any((np.abs(own - own[0]) > math.log(WRONG_COST)) & (doubt < SURE**2)))
