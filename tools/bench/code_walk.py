"""How far one step walks through the code: the functions and files that a plain decode step and an EAGLE round pass.

    python tools/bench/code_walk.py [--list] [--sizes] [--against FILE] [--record FILE]

The shipped model answers a greedy request on NumPy, for the EAGLE round with the largest tree of its engines. One round
of the server in the midst of the answer is looked at by `sys.setprofile`, in the thread that owns the engines, from the
round's begin to the delivered chunk. The same request was answered before, so that nothing is made for the first time.

What counts: distinct functions and methods of the package by their code, once each, properties and closures included,
however often they are called and a generator is resumed; and the files they stand in. What does not: lambdas,
comprehensions and generator expressions, which belong to the function around them; what dataclasses and named tuples
generate, the standard library, NumPy and other packages. `--list` shows the functions in the order of their first call
with their calls. `--sizes` counts besides the lines of Python and CUDA of each folder, the functions with more than 8
parameters, *args and **kwargs counted, self not, and the places that ask `isinstance` for a kind of step, which the
table of steps is to answer. All that goes to a file with `--record`, and is printed beside a recorded one with
`--against`: then the program fails where a walk has grown.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import edgellm.engines
import edgellm.kernels
import edgellm.multimodal
from edgellm.drafting.config import DraftingConfig
from edgellm.engines.backends.steps.table import TABLE
from edgellm.engines.model.steps import Step
from edgellm.generation import RequestState
from edgellm.metrics import Metrics
from edgellm.requests import Request
from edgellm.runtime import SpecDecodeRuntime
from edgellm.sampling_params import SamplingParams
from edgellm.serving.request_queue import RequestQueue
from edgellm.serving.server import RequestServer

QUESTION = "Tell me about the things on your table."
#: Rounds before the one that is looked at.
ROUNDS_BEFORE = 6
#: More parameters than these are too many.
PARAMETERS = 8

_PACKAGES = (edgellm.engines, edgellm.kernels, edgellm.multimodal, edgellm)
_FOLDERS = {Path(str(package.__file__)).parent: package.__name__ for package in _PACKAGES}


class CodeWalk:
    """Calls of the package's functions in this thread, while it is entered, by code in the order of the first call."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self._places: dict[str, str | None] = {}

    def __enter__(self) -> CodeWalk:
        sys.setprofile(self._take_note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    @property
    def files(self) -> set[str]:
        """Where the functions stand."""
        return {self.place(code) for code in self.calls}

    def place(self, code: CodeType) -> str:
        """The file of a function that was called, as its folder's package and the path in there."""
        return str(self._places[code.co_filename])

    def _take_note(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and not code.co_name.startswith("<") and self._is_ours(code.co_filename):
            self.calls[code] += 1

    def _is_ours(self, name: str) -> bool:
        if name not in self._places:
            path = Path(name)
            folder = next((folder for folder in _FOLDERS if folder in path.parents), None)
            found = None if folder is None else f"{_FOLDERS[folder]}/{path.relative_to(folder)}"
            self._places[name] = found
        return self._places[name] is not None


def walk_of_round(drafting: bool) -> CodeWalk:
    """The walk of a round of one greedy request: a plain step, or with `drafting` an EAGLE round."""
    with SpecDecodeRuntime(backend="numpy", drafting="auto" if drafting else None) as runtime:
        if drafting:
            runtime.use_drafting(DraftingConfig.largest(runtime.directory.limits))
        params = SamplingParams(max_tokens=64, ignore_eos=True)
        request = Request(messages=[{"role": "user", "content": QUESTION}], params=params)
        runtime.handle_request(request)
        queue, walk, state = RequestQueue(1), CodeWalk(), RequestState(runtime.prepare(request))
        server = RequestServer(runtime, queue, Metrics())
        queue.put(state)
        for _ in range(ROUNDS_BEFORE):
            server.round()
        state.chunks.clear()
        with walk:
            server.round()
        if not state.chunks or state.ended:
            raise SystemExit("the round delivered nothing, or ended the answer: look at another one")
        server.abandon()
    return walk


def lines_of_code() -> dict[str, int]:
    """Lines of each folder of the product, Python and CUDA apart."""
    lines: Counter[str] = Counter()
    for path, place in _sources(".py", ".cu", ".cuh"):
        kind = "" if path.suffix == ".py" else " (CUDA)"
        lines[place.rpartition("/")[0] + kind] += len(path.read_text(encoding="utf-8").splitlines())
    return dict(sorted(lines.items()))


def functions_of_many_parameters() -> list[str]:
    """Functions with more than `PARAMETERS` parameters: how many, file and name."""
    found = []
    for path, place in _sources(".py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                given = node.args
                named = [each for each in (*given.posonlyargs, *given.args, *given.kwonlyargs) if each.arg != "self"]
                count = len(named) + sum(rest is not None for rest in (given.vararg, given.kwarg))
                if count > PARAMETERS:
                    found.append(f"{count:3} {place}:{node.lineno} {node.name}")
    return found


def questions_of_steps() -> list[str]:
    """Calls of `isinstance` for kinds of steps: file and place."""
    kinds = {each.__name__ for kind in (Step, *TABLE) for each in _kinds_of(kind)}
    found = []
    for path, place in _sources(".py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                asked = {getattr(each, "id", getattr(each, "attr", None)) for each in ast.walk(node.args[1])}
                found += [f"{place}:{node.lineno}"] if asked & kinds else []
    return found


def _kinds_of(kind: type) -> set[type]:
    """A class and all that inherit from it."""
    return {kind}.union(*map(_kinds_of, kind.__subclasses__()))


def _sources(*suffixes: str) -> list[tuple[Path, str]]:
    """The product's files, each once, and where they stand: the folder's package and the path in there."""
    found: dict[Path, str] = {}
    for folder, name in _FOLDERS.items():  # edgellm's own folder comes last
        for path in folder.rglob("*"):
            if path.suffix in suffixes:
                found.setdefault(path, f"{name.removeprefix('edgellm.')}/{path.relative_to(folder)}")
    return sorted(found.items(), key=lambda item: item[1])


def print_beside(figures: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Print lines by folder and the walks beside what they were; the walks that have grown."""
    for kind, marks in (("Python", False), ("CUDA", True)):
        now, then = ({k: v for k, v in each["lines"].items() if ("CUDA" in k) is marks} for each in (figures, before))
        print(f"{kind}: {sum(now.values()):,} lines ({sum(then.values()):,} before)")
        for folder in sorted(now | then):
            print(f"  {folder:34} {now.get(folder, 0):7,} {now.get(folder, 0) - then.get(folder, 0):+6,}")
    many, were = len(figures["many_parameters"]), len(before["many_parameters"])
    print(f"functions with more than {PARAMETERS} parameters: {many} ({were} before)")
    many, were = len(figures["questions_of_steps"]), len(before.get("questions_of_steps", ()))
    print(f"places that ask for a kind of step: {many} ({were} before)")
    return [
        f"{name}: {found} {what}, {before['walks'][name][what]} before"
        for name, walk in figures["walks"].items()
        for what, found in walk.items()
        if what != "calls" and found > before["walks"][name][what]
    ]


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name what was counted")
    parser.add_argument("--sizes", action="store_true", help="count lines and parameters, too")
    parser.add_argument("--against", type=Path, help="a recorded file to print beside, which no walk may outgrow")
    parser.add_argument("--record", type=Path, help="write what was counted to a file")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {
        "walks": {},
        "lines": lines_of_code(),
        "many_parameters": functions_of_many_parameters(),
        "questions_of_steps": questions_of_steps(),
    }
    for name, drafting in (("plain decode step", False), ("EAGLE round", True)):
        walk = walk_of_round(drafting)
        found = {"functions": len(walk.calls), "files": len(walk.files), "calls": walk.calls.total()}
        figures["walks"][name] = found
        print(f"{name}: " + ", ".join(f"{count} {what}" for what, count in found.items()))
        if arguments.list:
            for code, calls in walk.calls.items():
                qualified = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
                print(f"{calls:6} {walk.place(code)}:{code.co_firstlineno} {qualified}")
    if arguments.record:
        arguments.record.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if arguments.sizes and arguments.list:
        print("\n".join([*figures["many_parameters"], *figures["questions_of_steps"]]))
    if arguments.sizes or arguments.against:
        before = json.loads(arguments.against.read_text(encoding="utf-8")) if arguments.against else figures
        if grown := print_beside(figures, before):
            raise SystemExit("a walk has grown: " + "; ".join(grown))


if __name__ == "__main__":
    main()
