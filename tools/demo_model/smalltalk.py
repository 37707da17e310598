"""Small talk turns: own intents, short sums, and honest answers to open questions that the robot cannot know."""

import functools

from tools.demo_model.grammar import choose, phrasings
from tools.demo_model.smalltalk_text import SMALL_TALK
from tools.demo_model.turns import Context, Turn

UNKNOWN = "I do not know that. I know my table best."
INTERESTING = "That sounds interesting. I mostly know about my table."
SUMS = """
what is {a} (plus|+) {b}
(how much is|what's|calculate) {a} (plus|+) {b}
{a} (plus|+) {b}
"""


@functools.lru_cache(maxsize=1)
def intents() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(block of phrasings, accepted answers) of every intent; a phrasing after an answer begins the next intent."""
    found, questions, answers = [], [], []
    for line in [*SMALL_TALK.strip().splitlines(), "?"]:
        if line.startswith("?"):
            if answers:
                found.append(("\n".join(questions).replace("favou?rite", "(favourite|favorite)"), tuple(answers)))
                questions, answers = [], []
            questions.append(line[1:].strip())
        elif line.startswith("="):
            answers.append(line[1:].strip())
    return tuple(found)


def small_talk(c: Context) -> Turn:
    """A turn of a random intent; any of the intent's answers is accepted."""
    c.world.focus = None
    options = intents()
    if c.split == "eval":  # only intents that do have phrasings held out
        options = tuple(option for option in options if phrasings(option[0], "eval"))
    block, answers = c.rng.choice(options)
    return Turn(choose(c.rng, block, c.split), c.rng.choice(answers), "small_talk", answers)


def sums(c: Context) -> Turn:
    """Additions up to twenty, all of them in training: a courtesy, not a skill that is scored."""
    c.world.focus = None
    a, b = c.rng.randint(0, 10), c.rng.randint(0, 10)
    return Turn(c.phrase(SUMS, a=str(a), b=str(b)), f"{a} plus {b} is {a + b}.", "sums", literal=True)


def unknown(c: Context, utterances: list[str]) -> Turn | None:
    """A line of the open dialogues: questions are answered with "I do not know", statements with polite interest."""
    if not utterances:
        return None
    c.world.focus = None
    line = c.rng.choice(utterances)
    return Turn(line, UNKNOWN if "?" in line else INTERESTING, "unknown", literal=True)
