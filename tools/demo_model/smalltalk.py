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
OPEN_QUESTIONS = """
who (wrote|invented|discovered|painted|founded|won) {x}
who (is|was) (the king of|the president of|the author of|the inventor of|the mayor of|) {x}
what is the (capital|population|history|price|meaning|origin|age|height|opposite) of {x}
what is {x} (made of|good for|about|called in french|famous for)
what does {x} (mean|do|cost|look like)
(when|why|how) was {x} (built|invented|so important|found|made)
(when|why|how) (did|does) {x} (work|happen|start|end|grow|move)
(how far|how old|how tall|how big|how fast|how heavy|how deep) (is|was) {x}
how (do i|can i|does one|do you) (make|learn|grow|repair|use|sell) {x}
(explain|define|describe|summarize) {x}
(do you know|can you explain|can you tell me) (how {x} works|why {x} is famous|who made {x}|the meaning of {x})
which (country|language|year|animal|planet|river) (is|has|was) {x}
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
    """A line of the open dialogues, or a question about a random word that is nothing of the table.

    Questions are answered with "I do not know", statements with polite interest.
    """
    if not utterances:
        return None
    c.world.focus = None
    if c.rng.random() < 0.4:
        word = c.words.draw("kind")
        if any(set(word.split()) & set(thing.name.split()) for thing in c.world.things):
            return None
        name = c.rng.choice((word, word, f"the {word}", word.capitalize()))
        line = c.phrase(OPEN_QUESTIONS, x=name)
        line = line[0].upper() + line[1:] if c.rng.random() < 0.5 else line
        return Turn(line + c.rng.choice(("?", "?", "")), UNKNOWN, "unknown", literal=True)
    line = c.rng.choice(utterances)
    return Turn(line, UNKNOWN if "?" in line else INTERESTING, "unknown", literal=True)
