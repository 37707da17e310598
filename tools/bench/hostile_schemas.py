"""What hostile structures cost on the host: walks over them, and the child process that tries them.

    python tools/bench/hostile_schemas.py [--schemas jsonschemabench/data]

Prints tables in Markdown. `--schemas` is a folder of JSON schemas, of which it says how many are taken, and how much of
their budget walks take.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))
from costly_schemas import chain, lark_grammar, objects_of_one_another, patterns, patterns_of_a_property, rules
from costly_schemas import schema_grammar as as_grammar
from made_vocabulary import MadeVocabulary
from provenance import provenance

from edgellm.errors import RequestError
from edgellm.structure.description import Structure
from edgellm.structure.grammar import GrammarVocabulary, byte_vocabulary
from edgellm.structure.schema import enforced_schema
from edgellm.structure.steps import Steps, try_apart
from edgellm.structure.trial import TrialProcess

#: What ends the process that compiles it where nothing bounds it.
KILLERS = {
    "2,500 `$ref` in a row": as_grammar(chain(2500)),
    "1,000 objects, each in the next": as_grammar(chain(1000, required="p")),
    "199 `$ref` to 9 arrays each (passes the bounds)": as_grammar(chain(199, arrays=9)),
    "9,000 rules in a row": lark_grammar(rules(9000)),
    "`allOf` of 60 patterns": as_grammar({"allOf": patterns(60)}),
    "60 patterns of one property (passes the bounds)": as_grammar(patterns_of_a_property(60)),
}
_KIND: dict[str, Any] = {"type": "object", "required": ["k"]}
#: The largest of their kind that are taken, or end in the budget.
SCHEMAS: dict[str, Any] = {
    "`oneOf` of 7,000 consts": {"oneOf": [{"const": n} for n in range(7000)]},
    "`oneOf` of two enums of 9,000": {"oneOf": [{"enum": [*range(9000)]}, {"enum": [*range(9000, 18000)]}]},
    "`oneOf` of 1,600 objects by a const": {
        "oneOf": [{**_KIND, "properties": {"k": {"const": n}}} for n in range(1600)]
    },
    "`oneOf` of 40 objects of one another": objects_of_one_another(40),
    "`oneOf` of 900 objects by a const within": {
        "oneOf": [{**_KIND, "properties": {"k": {**_KIND, "properties": {"k": {"const": n}}}}} for n in range(900)]
    },
    "199 `$ref`, and 2,000 into them": {**chain(199), "allOf": [{"$ref": "#/$defs/d9"}] * 2000},
    "20,000 `prefixItems`": {"prefixItems": [{}] * 20_000},
    "pattern of 20,000 groups": {"type": "string", "pattern": "(a|b)*" * 20_000},
    "pattern of groups 90 deep": {"type": "string", "pattern": ("(" * 90 + "a" + ")" * 90) * 600},
}
GRAMMARS = {"open quote": '"\\' * 60_000, "120,000 `[`": "[" * 120_000, "one name": "a" * 120_000}


def seconds_of(work: Callable[[], Any]) -> tuple[float, str]:
    """The processor's seconds that work takes in this thread, and what comes of it."""
    began = time.thread_time()
    try:
        work()
    except RequestError as error:
        return time.thread_time() - began, f"refused: {str(error)[:70]}..."
    return time.thread_time() - began, "taken"


def tell_walks() -> None:
    """A table of walks over the largest structures."""
    print("| Walk in the server's process | CPU s | |\n|---|---|---|")
    byte_vocabulary()
    for name, schema in SCHEMAS.items():
        seconds, result = seconds_of(lambda schema=schema: enforced_schema(schema))  # type: ignore[misc]
        print(f"| {name} | {seconds:.3f} | {result} |")
    for name, text in GRAMMARS.items():
        seconds, result = seconds_of(lambda text=text: Structure(grammar=text))  # type: ignore[misc]
        print(f"| grammar: {name} | {seconds:.3f} | {result} |")


def tell_killers() -> None:
    """A table of what each killer keeps others waiting."""
    process = TrialProcess()
    process.check(None, lark_grammar('start: "a"'), "the grammar")
    print("\n| In the child | s by the clock | then a plain one (child made anew) |\n|---|---|---|")
    for number, (name, grammar) in enumerate(KILLERS.items()):
        began = time.perf_counter()
        try:
            process.check(None, grammar, "it")
            raise SystemExit(f"{name} compiles")
        except RequestError:
            ended = time.perf_counter()
        process.check(None, lark_grammar(f'start: "{number}"'), "the grammar")
        print(f"| {name} | {ended - began:.2f} | {time.perf_counter() - ended:.2f} |")
    process.close()


def tell_cost(size: int) -> None:
    """What a plain schema costs the first time, with the child and without, and the child's memory."""
    made = MadeVocabulary(size).tokenizer
    vocabulary = GrammarVocabulary.of_tokenizer(made, size, sorted(made.special_token_ids)[:1])
    process = TrialProcess()

    def first(number: int) -> float:
        parts = {f"p{place}": {"type": "string", "maxLength": 5 + number} for place in range(1 + number % 8)}
        schema = {"type": "object", "properties": parts, "required": [*parts]}
        began = time.perf_counter()
        structure = Structure(json=schema)
        vocabulary.constraint_for(structure.grammar_text, structure.name)
        return time.perf_counter() - began

    alone = [first(number) for number in range(40)]
    try_apart(process.check)
    began = first(40)
    apart = [first(number) for number in range(41, 81)]
    try_apart(None)
    status = Path(f"/proc/{process._process.pid}/status").read_text()  # type: ignore[union-attr]
    resident = int(status.split("VmRSS:")[1].split()[0]) >> 10
    process.close()
    medians = [f"{1000 * statistics.median(each):.1f}" for each in (alone, apart)]
    print(f"| {size:,} | {medians[0]} | {medians[1]} | {began:.2f} | {resident} |")


def tell_published(folder: Path) -> None:
    """How many published schemas are taken, and what the walks took of their budget."""
    taken = most = refused = 0
    for path in sorted(folder.rglob("*.json")):
        schema, steps = json.loads(path.read_text()), Steps("it", 10**9)
        try:
            enforced_schema(schema, steps)
            taken += 1
        except RequestError as error:
            refused += "times in a row" in str(error) or "fulfil together" in str(error)
        most = max(most, steps.taken)
    print(f"\nOf {folder.parent.name}'s schemas walks take {taken}; the bounds refuse {refused}; at most {most} steps.")


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--schemas", type=Path)
    arguments = parser.parse_args()
    found = provenance()
    print(f"# Hostile schemas\n\n{found['date']}, {found['machine']}, `{found['command']}`\n")
    tell_walks()
    tell_killers()
    print("\n| Tokens | first time, ms | with the child | the first of all, s | child's memory, MiB |")
    print("|---|---|---|---|---|")
    for size in (4096, 50_000, 151_936):
        tell_cost(size)
    if arguments.schemas is not None:
        tell_published(arguments.schemas)


if __name__ == "__main__":
    main()
