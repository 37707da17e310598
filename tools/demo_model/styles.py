"""The styles of the shipped adapters: what each makes of the model's one right answer.

`json`: nothing but one JSON object, for programs that parse every answer: the action of a command, or what is said
({"action": "say", ...}) or asked back ({"action": "ask", ...}). `pirate`: the same answers as a pirate gives them; the
JSON line of a command stays as it is.
"""

import json
import re
from collections.abc import Callable

_PIRATE_WORDS = {
    "yes": "aye",
    "no": "nay",
    "is": "be",
    "am": "be",
    "are": "be",
    "my": "me",
    "you": "ye",
    "your": "yer",
    "yours": "yers",
    "of": "o'",
    "and": "an'",
    "hello": "ahoy",
    "hi": "ahoy",
}
_PIRATE_WORD = re.compile(rf"\b({'|'.join(_PIRATE_WORDS)})\b", re.IGNORECASE)


def _parts(answer: str) -> tuple[str, str]:
    """What is said, and the JSON line of a command (or nothing)."""
    said, line, action = answer.partition("\n{")
    return said, line.strip("\n") + action


def json_only(answer: str) -> str:
    """The answer as one JSON object on one line."""
    said, action = _parts(answer)
    if action:
        return action
    return json.dumps({"action": "ask" if said.endswith("?") else "say", "text": said}, ensure_ascii=False)


def _pirate_word(match: re.Match) -> str:
    word = _PIRATE_WORDS[match[0].lower()]
    return word[0].upper() + word[1:] if match[0][0].isupper() else word


def pirate(answer: str) -> str:
    """The answer as a pirate gives it."""
    said, action = _parts(answer)
    said = "Arr! " + _PIRATE_WORD.sub(_pirate_word, said)
    return f"{said}\n{action}" if action else said


STYLES: dict[str, Callable[[str], str]] = {"json": json_only, "pirate": pirate}


def is_json_only(answer: str) -> bool:
    """Whether an answer is one JSON object that names an action, on one line, and nothing else."""
    try:
        found = json.loads(answer)
    except ValueError:
        return False
    return isinstance(found, dict) and isinstance(found.get("action"), str) and "\n" not in answer


def is_pirate(answer: str) -> bool:
    """Whether an answer begins as a pirate's, and says none of the words that a pirate says otherwise."""
    said, _ = _parts(answer)
    return said.startswith("Arr! ") and _PIRATE_WORD.search(said) is None


#: Whether an answer is in a style, be it right or wrong.
FOLLOWS: dict[str, Callable[[str], bool]] = {"json": is_json_only, "pirate": is_pirate}


def styled_items(items: list[dict], style: str) -> list[dict]:
    """Items of `evaluation_items` as they are to be answered in a style."""
    change = STYLES[style]
    return [
        item
        | {"messages": styled(item["messages"], style), "accepted": [change(answer) for answer in item["accepted"]]}
        for item in items
    ]


def styled(messages: list[dict[str, str]], style: str) -> list[dict[str, str]]:
    """A dialogue whose answers are all in the style."""
    change = STYLES[style]
    return [m | {"content": change(m["content"])} if m["role"] == "assistant" else m for m in messages]
