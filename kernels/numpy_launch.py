"""What launches of all kinds have in common, and those of NumPy, so that what drives the kernels drives what computes
the same on the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from inspect import signature
from typing import ParamSpec

from edgellm.kernels.contracts import Contracts


class Enqueued:
    """What is enqueued each time that it is called. By itself it waits for what stands before it, and lets nothing of
    what stands behind it start before it has ended."""

    def __call__(self) -> None:
        raise NotImplementedError

    def overlap_previous(self) -> None:
        """Let it start before its predecessor has finished, where it can; it must wait itself."""

    def hold_next(self) -> bool:
        """Let what overlaps it start only once it has waited for its own predecessor. Whether it can."""
        return False

    def run_beside(self, before: Enqueued) -> None:
        """Let it run beside the one before it, of which it takes nothing, where the kernels of both can: it starts when
        that one has waited for its own predecessor, and waits in the end. Not beside what itself runs so, nor beside
        what adds to a residual stream, which everyone may take."""


class NumpyLaunch(Enqueued):
    """What a twin computes each time that it is called."""

    def __init__(self, compute: Callable[[], None]) -> None:
        self._compute = compute

    def __call__(self) -> None:
        self._compute()


_Parameters = ParamSpec("_Parameters")


def checked_launch(check: Contracts) -> Callable[[Callable[_Parameters, None]], Callable[_Parameters, NumpyLaunch]]:
    """A method that gives a launch of what its body computes; its arguments are checked before as the contract of the
    kernel of its name says."""

    def checked(compute: Callable[_Parameters, None]) -> Callable[_Parameters, NumpyLaunch]:
        called = signature(compute)

        @wraps(compute)
        def prepare(*given: _Parameters.args, **named: _Parameters.kwargs) -> NumpyLaunch:
            bound = called.bind(*given, **named)
            bound.apply_defaults()
            check(compute.__name__, *bound.args[1:])
            return NumpyLaunch(partial(compute, *bound.args))

        return prepare

    return checked
