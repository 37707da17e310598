"""Launches of NumPy, so that what drives the kernels drives what computes the same on the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from inspect import signature
from typing import ParamSpec

from edgellm.kernels.contracts import Contracts


class NumpyLaunch:
    """What a twin computes each time that it is called."""

    def __init__(self, compute: Callable[[], None]) -> None:
        self._compute = compute

    def __call__(self) -> None:
        self._compute()

    def overlap_previous(self) -> None:
        """There is nothing to overlap."""


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
