"""Write MODEL_CARD.md of a model directory from the results of training and evaluation.

Usage: python -m tools.demo_model.model_card --model DIR
"""

import argparse
import json
from pathlib import Path

from tools.demo_model.system_prompt import DEFAULT_SYSTEM_PROMPT

RESULTS = Path(__file__).parent / "results"
SOURCES = (
    (
        "Self-dialogue Corpus (University of Edinburgh)",
        "BSD-3-Clause",
        "two people talking, as plain text; open questions",
    ),
    ("Taskmaster-4 (Google)", "CC BY 4.0", "short orders, as plain text"),
    ("FairytaleQA stories (stories from Project Gutenberg)", "Apache-2.0", "stories"),
    ("Pratham Books StoryWeaver", "CC BY, one book public domain", "children's stories"),
    ("African Storybook", "CC BY", "children's stories"),
    ("Novels out of copyright", "public domain", "prose; rare words for the open word pool"),
    ("ChatterBot corpus", "BSD-3-Clause", "short questions and answers"),
    ("Instruction data by Sebastian Raschka", "Apache-2.0", "short questions and answers"),
)


def stage_text(stages: list[dict]) -> str:
    """One line per training stage."""
    return "\n".join(
        f"- {stage['name']}: {stage['tokens'] / 1e6:,.1f} M tokens in {stage['steps']:,} steps of {stage['rows']} rows of 2,048 "
        f"tokens, {stage['minutes']} minutes on {stage['device']}, highest learning rate {stage['peak']}."
        for stage in stages
    )


def score_table(scores: dict[str, float]) -> str:
    """Skills and exact match, two skills a row."""
    cells = [f"{skill} | {value:.1f}" for skill, value in sorted(scores.items())]
    cells += [" | "] * (len(cells) % 2)
    rows = [f"| {cells[i]} | {cells[i + 1]} |" for i in range(0, len(cells), 2)]
    return "\n".join(["| skill | % | skill | % |", "| --- | --- | --- | --- |", *rows])


def card(training: dict, evaluation: dict, checks: dict) -> str:
    """The text of the card."""
    sources = "\n".join(f"| {name} | {licence} | {use} |" for name, licence, use in SOURCES)
    return f"""# EdgeLLM's demonstration model

A language model of 10.8 million parameters (21.6 MB in fp16) that speaks for a small tabletop robot. It ships with EdgeLLM
so that the chat prompt, the Python API and the tests have a model that works at once and everywhere. It is a
demonstration: it knows its table, its commands and some small talk, and nothing else. Do not let it move anything that
could do harm.

## What it does

Given a system prompt that tells its name, place, battery and the objects around it, it
- answers questions: its name, place and battery; which objects there are; colour, place and number of objects; what is at
  a place, left of, right of, in front of or behind an object, on a side of the table; comparisons of two objects;
- turns a command into one sentence and one JSON action on the next line, and remembers what it did in the dialogue;
- asks which object is meant where several fit, says so where an object is not there, its hand is full, a place is taken,
  the battery is too low for the rule in the system prompt, or the command is nothing that it can do;
- makes small talk, and says "I do not know that" to most other questions.

Actions: `pick`, `give`, `look`, `point`, `go`, `release` (`object`); `place` (`object`, `relation`: on, in, next to, left of,
right of, in front of, behind; `target`); `move` (`object`, `position`); `push` (`object`, `direction`); `turn` (`direction`,
`degrees`); `wait` (`seconds`); `wave`, `nod`, `stop`, `home`, `charge`, `open_gripper`, `close_gripper`, `dance`.
Example: `{{"action": "place", "object": "red cup", "relation": "in", "target": "white bowl"}}`

## The system prompt

The one that ships with it (`system_prompt.txt`):

```
{DEFAULT_SYSTEM_PROMPT}
```

Other layouts work too: sentences ("A red cup is at the front left."), `key: value` lines, JSON with `name`, `place`,
`battery` and `objects` (`colour` or `color`, `kind`, `position`). Up to eight objects, each with one colour (or other
adjective) and one kind. Positions are free phrases ("beside the lamp") or the names of a grid of three rows and three
columns: front, middle, back and left, centre (or center), right, the middle of all being "centre". On the grid, and only there,
left and right compare columns, in front of and behind compare rows, whatever the other coordinate. The battery rule is
optional.

## Layout

Qwen3 architecture: 8 layers, hidden size 320, 6 query and 2 key/value heads of 64, feed-forward size 896, vocabulary 4,096
(byte-level BPE, single digits, 48 special tokens of which 41 are reserved), tied embeddings. Context: 2,048 tokens; most
training dialogues were shorter than 1,000. Chat format: `<|im_start|>role`, line break, content, `<|im_end|>`, line break.
Greatest activation seen: {checks["greatest activation"]:.0f} (fp16 ends at 65,504); greatest difference of a logit between fp16 and fp32:
{checks["greatest difference of fp16 to fp32"]:.2f}.

## Training

Dialogues from a seeded generator (`tools/demo_model/`), with open text mixed in (about a tenth of the documents at first,
then a thirtieth); the loss counts answers fully, open text by 0.3 and the rest by 0.03.

{stage_text(training["stages"])}

| open source | licence | use |
| --- | --- | --- |
{sources}

Lines with rude words and some sensitive subjects were left out by a word list.

## Evaluation

Exact match of the whole answer under greedy decoding, {evaluation["items_per_skill"]} items a skill, seed {evaluation["seed"]}; average {evaluation["all"]:.1f} %.
Names, places, most colours and kinds and half of the numbers of these items never occur in training scenes; all phrasings
are held out (new ways to say things in words that training has); a tenth of the lines has a typing error. Half of the items
come after earlier turns. Small talk counts any of the accepted answers of its intent.

{score_table(evaluation["exact_match_percent"])}

## Limits

English only. One short sentence with unfamiliar key words can be taken for something else; a one-word command with a typing
error often is. It counts and compares reliably up to eight objects only. It cannot do arithmetic beyond sums of numbers up
to ten. It does not know the world, and the small talk is a fixed set of answers. It can be led to say false things.

## Licence

The weights are under the licence of EdgeLLM; the sources above keep theirs.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    arguments = parser.parse_args()
    parts = [json.loads((RESULTS / f"{name}.json").read_text()) for name in ("training", "evaluation", "checks")]
    (arguments.model / "MODEL_CARD.md").write_text(card(*parts))


if __name__ == "__main__":
    main()
