"""Bounds on what a request sent: steps that walks may take together, one pass over things that refer to one another,
and what tries a grammar elsewhere before it is compiled."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Protocol, TypeVar

from edgellm.errors import RequestError

#: Steps of all walks over one schema or grammar; a step takes microseconds.
MOST_STEPS = 200_000
#: Links on one way from a schema or a rule of a grammar to another that it refers to: compilers recurse along it.
LONGEST_PATH = 200
Node = TypeVar("Node")
Value = TypeVar("Value")


class Steps:
    """Counts the steps of walks over `what` a request sent, which errors call so."""

    def __init__(self, what: str, most: int = MOST_STEPS) -> None:
        self.what, self.most, self.taken = what, most, 0

    def take(self, count: int = 1) -> None:
        """Take more steps. Raises RequestError where there are none left."""
        self.taken += count
        if self.taken > self.most:
            raise RequestError(f"{self.what} takes too much work to check: say less in it, or name parts once")


def folded(
    nodes: Iterable[Node],
    following: Callable[[Node], Iterable[Node]],
    value: Callable[[Node, Callable[[Node], Value | None]], Value],
    key: Callable[[Node], Hashable] = id,
) -> list[Value]:
    """The value of each node, from those of the nodes that follow it, each computed once, without recursion.

    `value` gets a node and what says the value of another one: None where that leads back to the node.
    """
    nodes = list(nodes)
    known: dict[Hashable, Value | None] = {}
    for first in nodes:
        waiting = [(first, False)]
        while waiting:
            node, is_last = waiting.pop()
            if is_last:
                known[key(node)] = value(node, lambda other: known.get(key(other)))
            elif key(node) not in known:
                known[key(node)] = None
                waiting += [(node, True), *((each, False) for each in following(node))]
    return [found for node in nodes if (found := known[key(node)]) is not None]


def check_path(links: int, what: str) -> None:
    """RequestError for a path of more than `LONGEST_PATH` links."""
    if links > LONGEST_PATH:
        raise RequestError(
            f"{what} refers from one place to the next more than {LONGEST_PATH} times in a row: say less in it"
        )


class GrammarTrial(Protocol):
    """What tries grammars before this process compiles them: `edgellm.structure.trial.TrialProcess`."""

    def check(self, definition: Any, grammar: str, what: str) -> None:
        """Raise RequestError for a grammar, which errors call `what`, that does not compile for a vocabulary of this
        `edgellm.structure.grammar.Definition` (None: single bytes), or takes too much."""


_trial: GrammarTrial | None = None


def try_apart(trial: GrammarTrial | None) -> None:
    """Try the grammars of this Python process with `trial` from now on, or no longer (None)."""
    global _trial
    _trial = trial


def check_grammar(definition: Any, grammar: str, what: str) -> None:
    """Try a grammar where there is something to try it; see `GrammarTrial.check`."""
    if _trial is not None:
        _trial.check(definition, grammar, what)
