"""What an evaluation is given: windows over a text, and prompts with the answers that are expected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm.engines.errors import at_place
from edgellm.engines.formats.small_files import PROMPT_BYTES, read_text
from edgellm.engines.formats.strict_formats import parse_json
from edgellm.errors import RequestError
from edgellm.kernels.user_paths import user_path
from edgellm.text.messages import checked_messages

if TYPE_CHECKING:
    from edgellm.defaults import ModelDefaults
    from edgellm.text.tokenizer import Tokenizer

#: Names of the expected text beside a "prompt".
ANSWER_KEYS = ("answer", "completion", "summary")


@dataclass(frozen=True)
class Window:
    """Tokens that a model reads at once: those from number `first` (1 or more) on count, the others are context."""

    token_ids: tuple[int, ...]
    first: int

    @property
    def counted(self) -> tuple[int, ...]:
        """The tokens that count."""
        return self.token_ids[self.first :]


def text_windows(token_ids: Sequence[int], window: int, stride: int, bos: int | None = None) -> list[Window]:
    """Windows of up to `window` tokens over a text, each beginning `stride` tokens after the one before: every token
    counts once, but for the very first, which nothing precedes.

    A token counts in the first window that holds it, so all but those of the first window have `window` - `stride`
    tokens of context or more. With `bos` each window begins with that token, which is one of its tokens and does not
    count; the text's first token then does. Raises RequestError for a text of fewer than two tokens (`bos` included),
    and a stride that leaves no context.
    """
    if not 1 <= stride < window:
        raise RequestError(
            f"the stride is {stride} and the window {window}: expected a stride of 1 to {window - 1} tokens, less than "
            "the window, so that every token has one before it"
        )
    before = () if bos is None else (bos,)
    body, count = window - len(before), len(token_ids)
    if len(before) + count < 2 or not count:
        raise RequestError(f"the text has {count} tokens: expected two or more, each counts by the tokens before it")
    windows, counted = [], 0 if before else 1
    for begin in range(0, count, stride):
        end = min(begin + body, count)
        windows.append(Window((*before, *token_ids[begin:end]), len(before) + counted - begin))
        counted = end
        if end == count:
            break
    return windows


def bos_token(tokenizer: Tokenizer, wanted: bool | None = None) -> int | None:
    """The id of the token that texts begin with; None: they begin with none. By default (None) it is there where the
    tokenizer puts it. Raises RequestError where one is `wanted` and the model's files name none."""
    token = tokenizer.special_tokens.get("bos_token")
    token_id = None if token is None else tokenizer.token_to_id(token)
    if wanted is None:
        return token_id if token_id is not None and tokenizer.encode("")[:1] == [token_id] else None
    if wanted and token_id is None:
        raise RequestError("a BOS token was asked for, but the model's tokenizer_config.json names none (bos_token)")
    return token_id if wanted else None


@dataclass(frozen=True)
class Example:
    """A conversation (messages), the `answer` that is expected, and where it stands ("FILE, line 3")."""

    messages: tuple[dict[str, Any], ...]
    answer: str
    place: str = "the example"


def load_examples(path: str | Path, most: int | None = None) -> list[Example]:
    """The (first `most`) examples of a JSONL file: an object a line; empty lines are left out.

    A line has "prompt" (text) and one of `ANSWER_KEYS`, or "messages" that end with the assistant's answer. Raises
    RequestError that names file and line.
    """
    lines = read_text(user_path(Path(path)), PROMPT_BYTES, RequestError, "the examples", takes_pipes=True).splitlines()
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise RequestError(f"the examples {path} are empty: expected a JSON object on each line")
    return [_example(line, f"{path}, line {number}") for number, line in numbered[:most]]


def _example(line: str, place: str) -> Example:
    values = parse_json(line, place, RequestError)
    keys = values.keys() if isinstance(values, dict) else ()
    named = [key for key in ANSWER_KEYS if key in keys]
    if ("prompt" in keys) == ("messages" in keys) or len(named) != (1 if "prompt" in keys else 0):
        raise RequestError(
            f"{place}: found {', '.join(keys) or 'no object'}; expected the key prompt and one of "
            f"{', '.join(ANSWER_KEYS)}, or the key messages"
        )
    if "prompt" in keys:
        messages = [{"role": "user", "content": values["prompt"]}, {"role": "assistant", "content": values[named[0]]}]
    else:
        messages = values["messages"]
    with at_place(place, RequestError):
        *asked, last = checked_messages(messages)
    if last["role"] != "assistant" or not isinstance(last["content"], str) or not last["content"].strip():
        raise RequestError(f"{place}: the expected answer is {last['content']!r:.60}: expected text, the assistant's")
    if not asked:
        raise RequestError(f"{place}: nothing is asked: expected a message before the answer")
    return Example(tuple(asked), last["content"], place)


def answer_windows(
    examples: Sequence[Example], tokenizer: Tokenizer, defaults: ModelDefaults, context_length: int
) -> list[Window]:
    """A window for each example: the conversation as the chat template renders it is context, the expected answer
    counts. Raises RequestError for one of more than `context_length` tokens."""
    windows = []
    for example in examples:
        prompt_ids = tokenizer.encode_chat(defaults.with_system_prompt(example.messages))
        answer_ids = tokenizer.encode(example.answer, add_special_tokens=False)
        if not answer_ids or len(prompt_ids) + len(answer_ids) > context_length:
            raise RequestError(
                f"{example.place}: prompt and answer have {len(prompt_ids)} and {len(answer_ids)} tokens: expected an "
                f"answer, and up to {context_length} in all; shorten them, or build with a larger --kv-capacity"
            )
        windows.append(Window((*prompt_ids, *answer_ids), len(prompt_ids)))
    return windows
