"""Twins whose methods give launches, as those of the kernels do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import ParamSpec

from edgellm.kernels.numpy_launch import NumpyLaunch

_Parameters = ParamSpec("_Parameters")


def launched(compute: Callable[_Parameters, None]) -> Callable[_Parameters, NumpyLaunch]:
    """A twin that gives a launch of what its body computes."""
    return wraps(compute)(lambda *given, **named: NumpyLaunch(partial(compute, *given, **named)))
