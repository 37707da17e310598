"""A made byte-level vocabulary of a published model's size, and the actions of a robot as it would spell them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from edgellm.text.tokenizer import Tokenizer

#: Special tokens at the vocabulary's end, the first of them the end of sequence.
SPECIALS = 256
_OBJECTS = ("cup", "ball", "block", "bottle", "spoon", "box", "banana", "apple", "plate", "marker")
_COLOURS = ("red", "green", "blue", "small", "large", "yellow", "left", "far")
_ACTIONS = ["move_to", "pick_up", "put_down", "push", "wave", "say", "wait"]
#: What an answer has to be: an action with bounded numbers, lists of fixed length and a short text.
ROBOT_ACTION: dict[str, Any] = {
    "type": "object",
    "properties": {
        "action": {"enum": _ACTIONS},
        "object": {"type": "string", "maxLength": 24},
        "pose": {
            "type": "array",
            "items": {"type": "number", "minimum": -2, "maximum": 2},
            "minItems": 3,
            "maxItems": 3,
        },
        "gripper": {"type": "integer", "minimum": 0, "maximum": 100},
        "arm": {"oneOf": [{"const": "left"}, {"const": "right"}, {"type": "null"}]},
    },
    "required": ["action", "object", "pose", "gripper", "arm"],
    "additionalProperties": False,
}
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


def robot_action(generator: random.Random) -> str:
    """An answer as `json.dumps` writes it."""
    value = {
        "action": generator.choice(_ACTIONS),
        "object": f"{generator.choice(_COLOURS)} {generator.choice(_OBJECTS)} {generator.randrange(90)}",
        "pose": [round(generator.uniform(-2, 2), generator.randint(1, 4)) + 0.0 for _ in range(3)],  # -0.0 is none
        "gripper": generator.randint(0, 100),
        "arm": generator.choice(["left", "right", None]),
    }
    return json.dumps(value)


class MadeVocabulary:
    """`size` tokens: the bytes, what leads to numbers, punctuation as JSON has it and words, each with all that it
    begins with, and special ones."""

    def __init__(self, size: int) -> None:
        """`size` at least 1000."""
        generator, self._visible = random.Random(0), _visible_bytes()
        self._ids = {symbol: index for index, symbol in enumerate(self._visible)}
        merges: list[tuple[str, str]] = []
        words = _known_texts()
        while len(self._ids) < size - SPECIALS:
            word = next(words, None)
            if word is None:
                letters = "".join(generator.choices(_LETTERS, range(26, 0, -1), k=generator.randint(2, 8)))
                word = generator.choice(("", " ", " ")) + generator.choice((letters, letters.capitalize()))
            symbols = "".join(self._visible[byte] for byte in word.encode())
            for end in range(2, len(symbols) + 1):
                if symbols[:end] not in self._ids and len(self._ids) < size - SPECIALS:
                    self._ids[symbols[:end]] = len(self._ids)
                    merges.append((symbols[: end - 1], symbols[end - 1]))
        library = tokenizers.Tokenizer(models.BPE(self._ids, merges))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.decoder = decoders.ByteLevel()
        library.add_special_tokens([f"<|special {number}|>" for number in range(SPECIALS)])
        self.tokenizer = Tokenizer(library)
        self.eos_token_id = size - SPECIALS


def _known_texts() -> Iterator[str]:
    """What answers of robots have in them."""
    yield from ('": "', '", "', '": [', '": ', '{"', ", ", "], ", '"}', "null}", " -")
    for word in (*_OBJECTS, *_COLOURS, *ROBOT_ACTION["properties"], *_ACTIONS, "right"):
        yield from (word, f" {word}")
    yield from map(str, range(100, 1000))


def _visible_bytes() -> list[str]:
    """The symbol that stands for each byte in byte-level vocabularies."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in printed else chr(next(hidden)) for byte in range(256)]
