"""How people type: lower case, missing punctuation, contractions, a typing error now and then."""

import random

from tools.demo_model.scene import World
from tools.demo_model.turns import Turn

_SHORT = (
    ("what is", "whats"),
    ("where is", "wheres"),
    ("please", "pls"),
    ("you", "u"),
    ("are you", "r u"),
    ("i am", "im"),
    ("cannot", "cant"),
    ("do not", "dont"),
    ("that is", "thats"),
    ("how is", "hows"),
)
_SMALL = frozenset(
    [
        "the",
        "a",
        "is",
        "are",
        "do",
        "does",
        "you",
        "can",
        "could",
        "to",
        "of",
        "that",
        "there",
        "me",
        "will",
        "would",
        "please",
    ]
)
_FILLERS = (
    "just",
    "please",
    "maybe",
    "then",
    "um",
    "well",
    "so",
    "quickly",
    "really",
    "actually",
    "again",
    "er",
    "dear robot",
    "if possible",
    "kindly",
    "my friend",
    "right",
    "ok",
    "hm",
    "slowly",
    "carefully",
    "gently",
    "this time",
    "once more",
    "now",
    "for a moment",
    "perhaps",
    "after that",
    "in fact",
    "you know",
    "simply",
    "also",
    "still",
    "today",
)
_ASKING = (
    "what",
    "where",
    "who",
    "how",
    "which",
    "is ",
    "are ",
    "do ",
    "does",
    "can ",
    "could",
    "would",
    "will",
    "have",
    "has",
    "may",
    "must",
    "should",
    "shall",
    "when",
    "why",
    "any",
)


def typing_error(rng: random.Random, word: str) -> str:
    """The word with two letters swapped, one left out or one doubled; the first letter stays."""
    position = rng.randrange(1, len(word) - 1)
    form = rng.random()
    if form < 0.4:
        return word[:position] + word[position + 1] + word[position] + word[position + 2 :]
    if form < 0.75:
        return word[:position] + word[position + 1 :]
    return word[: position + 1] + word[position:]


def _loosened(text: str, rng: random.Random) -> str:
    """For training: a small word left out, or a filler put in somewhere."""
    words = text.split(" ")
    small = [i for i, word in enumerate(words) if word in _SMALL]
    if small and len(words) > 3 and rng.random() < 0.6:
        del words[rng.choice(small)]
    else:
        words.insert(
            rng.randrange(len(words)) if rng.random() < 0.3 else rng.choice((0, len(words))), rng.choice(_FILLERS)
        )
    return " ".join(words)


def typed(turn: Turn, world: World, rng: random.Random, training: bool) -> str:
    """The user's line as typed. Words that the answer copies from the user, and words of the scene, stay correct."""
    text = turn.user
    if turn.label == "unknown":
        return text
    question = text.startswith(_ASKING)
    if rng.random() < 0.08:
        for full, short in rng.sample(_SHORT, len(_SHORT)):
            if f" {full} " in f" {text} ":
                text = f" {text} ".replace(f" {full} ", f" {short} ").strip()
                break
    if training and rng.random() < 0.2 and not turn.literal and turn.label != "small_talk":
        text = _loosened(text, rng)
    if rng.random() < (0.2 if training else 0.1) and not turn.literal:
        protected = (
            {word for t in world.things for word in [*t.name.split(), *t.location().split()]} if world.things else set()
        )
        words = text.split(" ")
        places = [
            i
            for i, word in enumerate(words)
            if len(word) >= 4 and word.isalpha() and word not in protected and word not in (world.name or "").split()
        ]
        if places:
            place = rng.choice(places)
            words[place] = typing_error(rng, words[place])
            text = " ".join(words)
    style = rng.random()
    if style < 0.5:  # a proper sentence
        text = text[0].upper() + text[1:]
        text = text.replace(" i ", " I ").replace(" i'", " I'")
    elif style > 0.95 and turn.label != "user_name" and not turn.literal:
        text = text.lower()
    if rng.random() < 0.55:
        text += "?" if question else rng.choice((".", ".", "!"))
    return text
