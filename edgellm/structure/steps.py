"""Bounds on what a request sent: steps that walks may take together, one pass over things that refer to one another,
and what tries a grammar elsewhere before it is compiled."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

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
    value: Callable[[Node, Callable[[Node], Value]], Value],
    recurring: Value,
    key: Callable[[Node], Hashable] = id,
) -> list[Value]:
    """The value of each node, from those of the nodes that follow it, each computed once, without recursion. `value`
    gets a node and what says the value of one that follows: `recurring` where that leads back to the node."""
    nodes = list(nodes)
    known: dict[Hashable, Value] = {}
    for first in nodes:
        waiting = [(first, False)]
        while waiting:
            node, is_last = waiting.pop()
            if is_last:
                known[key(node)] = value(node, lambda other: known[key(other)])
            elif key(node) not in known:
                known[key(node)] = recurring
                waiting += [(node, True), *((each, False) for each in following(node))]
    return [known[key(node)] for node in nodes]


def check_path(links: int, what: str) -> None:
    """RequestError for a path of more than `LONGEST_PATH` links."""
    if links > LONGEST_PATH:
        raise RequestError(
            f"{what} refers from one place to the next more than {LONGEST_PATH} times in a row: say less in it"
        )


#: Raises RequestError for a grammar that does not compile or takes too much.
GrammarCheck = Callable[[Any, str, str], None]
_check: GrammarCheck | None = None


def try_apart(check: GrammarCheck | None) -> None:
    """Try the grammars of this Python process with `check` from now on, before they are compiled, or no longer."""
    global _check
    _check = check


def check_grammar(definition: Any, grammar: str, what: str) -> None:
    """Try a grammar where there is something to try it: see `edgellm.structure.trial.TrialProcess.check`."""
    if _check is not None:
        _check(definition, grammar, what)
