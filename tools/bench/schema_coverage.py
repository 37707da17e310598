"""How many of a folder's JSON schemas are taken, what refuses the others, and whether answers under masks are valid.

    python tools/bench/schema_coverage.py FOLDER [--walks 18000] [--most-seconds 20] [--output RESULTS.md]

FOLDER holds schemas as files `*.json` in any depth, such as `data` of jsonschemabench. What refuses a schema is taken
out of it and it is tried again, so that a schema has all its reasons; one that has a single reason would be taken
without it. A walk draws bytes among those that masks allow until the answer ends, and jsonschema judges it by the draft
that `$schema` names, formats included: install `jsonschema[format]`. Each schema is tried in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))
sys.path.insert(0, str(Path(__file__).parent))
from provenance import provenance
from random_answers import random_answer

from edgellm.errors import RequestError
from edgellm.structure.description import Structure
from edgellm.structure.schema_keywords import ANNOTATIONS, ENFORCED, NOT_ENFORCED

MOST_MEMORY = 6 * 2**30
_PLACE = re.compile(r"the JSON schema, at (#.*?), (?:is|has|leads|names|requires)\b", re.DOTALL)
_KEYWORD = re.compile(r"has the keyword '(.*?)', which would")
_NUMBERS = re.compile(r"-?\d[\d.e+]*|'.*?'|\"[^\"]*\"")


def reasons(schema: Any) -> list[str]:
    """What refuses a schema: each construct that had to be taken out until the rest was taken."""
    found: list[str] = []
    schema = json.loads(json.dumps(schema))
    for _ in range(200):
        try:
            Structure(json=schema)
        except RequestError as error:
            found.append(_taken_out(schema, str(error)))
            if not found[-1].startswith("* "):
                break
        else:
            break
    return sorted({each.removeprefix("* ") for each in found})


def _taken_out(schema: Any, error: str) -> str:
    """A short name of what an error is about; with "* " before it where it was taken out of the schema."""
    place, keyword = _PLACE.search(error), _KEYWORD.search(error)
    if place is None:
        return _NUMBERS.sub("N", error.split(": ", 1)[0])[:100]
    path = [part.replace("~1", "/").replace("~0", "~") for part in place[1].split("/")[1:]]
    if keyword is not None:
        path.append(keyword[1])
    there = schema
    for name in path[:-1]:
        try:
            there = there[int(name)] if isinstance(there, list) else there[name]
        except (KeyError, IndexError, ValueError, TypeError):
            return f"{path[-1]}, elsewhere"
    name = path[-1] if path else ""
    if not isinstance(there, dict) or name not in there or name not in ENFORCED | ANNOTATIONS | set(NOT_ENFORCED):
        said = _NUMBERS.sub("N", error[place.end(1) + 2 :].split(": ", 1)[0])[:70]
        if not isinstance(there, dict) or name not in there or keyword is None:
            return said
    value = there.pop(name)
    return f"* {name}: {value}" if name == "format" else f"* {name}"


def judge(schema: Any) -> Callable[[Any], str | None]:
    """What finds an answer's first error, by the schema's own draft; 2019-09 where it names none and has tuples."""
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    if kind is jsonschema.Draft202012Validator and '"items": [' in json.dumps(schema):
        kind = jsonschema.Draft201909Validator
    kind.check_schema(schema)
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)

    def error(value: Any) -> str | None:
        found = next(validator.iter_errors(value), None)
        return None if found is None else f"{found.message[:200]} at {'/'.join(map(str, found.absolute_schema_path))}"

    return error


def tried(path: Path, walks: int) -> dict[str, Any]:
    """What became of one schema: its reasons, or how many of its walks ended, and which answers were not valid."""
    schema = json.loads(path.read_text(encoding="utf-8"))
    try:
        structure = Structure(json=schema)
    except RequestError as error:
        return {"refused": str(error), "reasons": reasons(schema)}
    found: dict[str, Any] = {"taken": True, "walks": 0, "whole": 0, "wrong": [], "died": []}
    if not walks:
        return found
    try:
        error_of = judge(schema)
    except (jsonschema.SchemaError, RecursionError) as error:
        return found | {"unjudged": f"its draft does not allow it: {str(error).splitlines()[0][:100]}"}
    generator = random.Random(path.name)
    for _ in range(walks):
        found["walks"] += 1
        try:
            text = random_answer(structure.grammar_text, generator, 3000)
        except Exception as error:
            found["died"].append(str(error))
            continue
        if text is None:
            continue
        found["whole"] += 1
        try:
            wrong = error_of(json.loads(text))
        except Exception as error:  # such as 1e400, or a reference that jsonschema does not find
            found["unjudged"] = f"{type(error).__name__}: {str(error)[:100]}"
            continue
        if wrong:
            found["wrong"].append([text, wrong])
    return found


def alone(path: Path, walks: int, seconds: int) -> dict[str, Any]:
    """`tried` in a process of its own, which is ended after so many seconds."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
        signal.alarm(seconds)
        text = json.dumps(tried(path, walks))
        with os.fdopen(writing, "w") as pipe:
            pipe.write(text)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return (
        json.loads(text) if text else {"refused": f"its process ended with {status}", "reasons": [f"ended: {status}"]}
    )


def summary(found: dict[str, dict[str, Any]]) -> str:
    """The results as Markdown."""
    taken = {name: each for name, each in found.items() if "taken" in each}
    refused = [each["reasons"] for each in found.values() if "taken" not in each]
    lines = [f"{len(found)} schemas, {len(taken)} taken, {len(refused)} refused.", ""]
    counts = Counter(reason for each in refused for reason in each)
    single = Counter(each[0] for each in refused if len(each) == 1)
    pairs = Counter(" and ".join(each) for each in refused if len(each) == 2)
    lines += ["| Refused by | schemas | alone |", "|---|---|---|"]
    lines += [f"| `{name}` | {count} | {single[name]} |" for name, count in counts.most_common(40)]
    lines += ["", "| Refused by two | schemas |", "|---|---|"]
    lines += [f"| `{name}` | {count} |" for name, count in pairs.most_common(12)]
    walks, whole = (sum(each[key] for each in taken.values()) for key in ("walks", "whole"))
    wrong = [(name, *each) for name, found in taken.items() for each in found["wrong"]]
    died = [(name, each) for name, found in taken.items() for each in found["died"]]
    lines += ["", f"{walks} walks, {whole} ended in whole answers, {len(wrong)} of them not valid, {len(died)} failed."]
    lines += [f"- {name}: {error}: `{text[:300]}`" for name, text, error in wrong[:50]]
    lines += [f"- {name}: {error}" for name, error in died[:30]]
    unjudged = Counter(each["unjudged"].split(":", 1)[0] for each in taken.values() if "unjudged" in each)
    lines += [f"- not judged, {kind}: {count} schemas" for kind, count in unjudged.most_common()]
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--walks", type=int, default=0)
    parser.add_argument("--most-seconds", type=int, default=20)
    parser.add_argument("--every", type=int, default=1, help="try one of so many schemas")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--details", type=Path)
    arguments = parser.parse_args()
    paths = sorted(arguments.folder.rglob("*.json"))[:: arguments.every]
    each = -(-arguments.walks // max(1, len(paths)))
    Structure(json={"format": "date"})  # so that each process begins with it
    began, found = time.monotonic(), {}
    for number, path in enumerate(paths, 1):
        if number % 500 == 0:
            print(f"{number} of {len(paths)}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        found[str(path.relative_to(arguments.folder))] = alone(path, each, arguments.most_seconds)
    made = provenance()
    took = f"{made['date']}, {made['machine']}, {time.monotonic() - began:.0f} s: `{made['command']}`"
    text = f"{took}\n\n{summary(found)}\n"
    print(text)
    if arguments.output:
        arguments.output.write_text(f"# JSON schemas that are taken\n\n{text}", encoding="utf-8")
    if arguments.details:
        arguments.details.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
