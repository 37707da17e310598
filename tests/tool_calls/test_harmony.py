"""gpt-oss's answers in channels: what it thinks, says and calls, wherever they are cut; calls and structures kept."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from golden_files import golden_folder
from tiny_families import MIXTURES
from tokenizers import Tokenizer as LibraryTokenizer

from edgellm import LLM, Request, SamplingParams
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.speculation.constraints import mask_words
from edgellm.errors import RequestError
from edgellm.http.answers import AnswerReader
from edgellm.requests import Chunk, TokenLogprobs
from edgellm.structure.answers import RuleMaker
from edgellm.structure.description import Structure
from edgellm.structure.grammar import GrammarVocabulary
from edgellm.structure.reasoning import CHANNEL_MARKS, harmony_ids
from edgellm.text.messages import checked_tools
from edgellm.text.output import OutputText
from edgellm.text.tokenizer import Tokenizer
from edgellm.tool_calls.calls import checked_choice
from edgellm.tool_calls.formats import checkpoint_format
from edgellm.tool_calls.harmony import HarmonyReader, harmony_constraint

IDS = {mark: 300 + number for number, mark in enumerate(CHANNEL_MARKS)}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks at a thing.",
            "parameters": {
                "type": "object",
                "properties": {"at": {"enum": ["cup", "plate"]}},
                "required": ["at"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "stop", "description": "Ends it.", "parameters": {"type": "object", "properties": {}}},
    },
]
THINKS = "<|channel|>analysis<|message|>We look, 1 < 2.<|end|><|start|>assistant"
CALLS = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "cup"}<|call|>'
#: Answers, and what is thought, said and called in them.
ANSWERS = {
    f"{THINKS}<|channel|>final<|message|>On the <table>.": ("We look, 1 < 2.", "On the <table>.", []),
    "<|channel|>final<|message|>Yes": ("", "Yes", []),
    f"{THINKS}{CALLS}": ("We look, 1 < 2.", "", [("look", '{"at": "cup"}', True)]),
    CALLS.removesuffix("<|call|>"): ("", "", [("look", '{"at": "cup"}', True)]),
    ' to=functions.look<|channel|>commentary json<|message|>{"at"': ("", "", [("look", '{"at"', False)]),
    f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALLS}": (
        "",
        "I look.",
        [("look", '{"at": "cup"}', True)],
    ),
    "<|channel|>commentary to=functions.fly<|message|>{}<|call|>": ("", "{}", []),
    "Just text <|": ("", "Just text <|", []),
    "as it is": ("", "as it is", []),
    "": ("", "", []),
    "<|channel|>analysis<|message|>cut sho": ("cut sho", "", []),
    # Cut within a header: the reader looked at it for ever.
    THINKS: ("We look, 1 < 2.", "", []),
    THINKS.removesuffix("assistant"): ("We look, 1 < 2.", "", []),
    "<|channel|>final<|message|>Yes<|start|>": ("", "Yes", []),
    "No header<|start|>assistant": ("", "No header", []),
    "No header <|message|>here": ("", "No header <|message|>here", []),
}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_is_read_wherever_it_is_cut(answer: str, size: int) -> None:
    thought, said, called = ANSWERS[answer]
    reader = HarmonyReader({"look": {}, "stop": {}}, IDS)
    pieces = [answer[start : start + size] for start in range(0, len(answer), size)]
    text = "".join(reader.push(0, piece) for piece in pieces) + reader.finish()
    assert ("".join(reader.thoughts), text) == (thought, said)
    assert [(call.name, call.arguments, call.complete) for call in reader.calls] == called
    deltas = reader.take_deltas()
    assert [(delta.name, delta.arguments) for delta in deltas] == [(name, arguments) for name, arguments, _ in called]
    assert (reader.error is not None) == ("fly" in answer)


PIECES = [
    *CHANNEL_MARKS,
    "assistant",
    "analysis",
    " to=functions.look",
    "to=functions.fly",
    "json",
    "{}",
    "text",
    "<|",
    " ",
    "as",
]


@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_any_marks_in_any_order_are_read_the_same_wherever_they_are_cut(first: int) -> None:
    def read(pieces: list[str]) -> tuple[Any, ...]:
        reader = HarmonyReader({"look": {}}, IDS)
        said = "".join(reader.push(0, piece) for piece in pieces) + reader.finish()
        calls = [(call.name, call.arguments, call.complete) for call in reader.calls]
        return said, "".join(reader.thoughts), calls, reader.error

    for seed in range(first, first + 250):
        generator = random.Random(seed)
        pieces = generator.choices(PIECES, k=generator.randrange(9))
        assert read(pieces) == read(["".join(pieces)]) == read([*"".join(pieces)]), pieces


@pytest.fixture(scope="module")
def directory(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny gpt-oss with its published template and tokens."""
    place = tmp_path_factory.mktemp("harmony")
    more = {"max_position_embeddings": 4096, "eos_token_id": [257, 264]}
    source = make_checkpoint(place / "model", 3, **MIXTURES["gpt_oss"] | more)
    tokenizer = LibraryTokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens([*CHANNEL_MARKS, "<|return|>"])
    tokenizer.save(str(source / "tokenizer.json"))
    golden = json.loads((golden_folder("published") / "harmony.json").read_text(encoding="utf-8"))
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": golden["template"]}))
    assert checkpoint_format(source, None) == "harmony"
    build_engine_directory(source, place / "engines", EngineLimits(2, 512, 2048), [])
    return place / "engines"


ASKED = [{"role": "user", "content": "Where is the cup?"}]


def test_calls_that_are_required_are_made(directory: Path) -> None:
    with LLM(directory, backend="numpy") as llm:
        ids = harmony_ids(llm.tokenizer)
        assert ids is not None
        params = SamplingParams(temperature=0.0, max_tokens=80, logit_bias={ids["<|end|>"]: 60.0})  # think briefly
        for choice in ("required", "look"):
            response = llm.chat(ASKED, params, tools=TOOLS, tool_choice=choice)
            (call,) = response.tool_calls
            assert call.complete and response.finish_reason == "tool_calls" and response.text == ""
            assert choice == "required" or call.name == "look"
            assert call.name == "stop" or call.parsed in ({"at": "cup"}, {"at": "plate"})
        with pytest.raises(RequestError, match="ask for a structure, or for tools"):
            llm.chat(ASKED, SamplingParams(structure=Structure(json_object=True)), tools=TOOLS)


def test_thoughts_are_apart_in_http_and_hidden_in_text(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    ids = harmony_ids(tokenizer)
    assert ids is not None
    channels = HarmonyReader({"look": {}}, ids)
    answer = OutputText(tokenizer.detokenizer(shown_ids=channels.shown_ids), ["stop <|"], (), [257, 264], 200, channels)
    sequence: Any = SimpleNamespace(calls=channels, answer=answer)
    reader = AnswerReader.of(tokenizer, sequence, Request(None, ASKED))
    pieces = []
    for token in [
        *tokenizer.encode(f"{THINKS}<|channel|>final<|message|>On the table.", add_special_tokens=False),
        257,
    ]:
        logprobs = (TokenLogprobs(token, -1.0, ()),)
        pieces.append(reader.read(Chunk(answer.push(token), (token,), (False,), logprobs, channels.take_deltas())))
    assert "".join(piece.reasoning for piece in pieces) == "We look, 1 < 2."
    assert "".join(piece.content for piece in pieces) == answer.text == "On the table."
    assert answer.finish_reason == "stop" and reader.reasoning_tokens > len("We look, 1 < 2.")
    assert sum(len(piece.logprobs) for piece in pieces) == len("On the table.")
    thinking = [place for place, piece in enumerate(pieces) if piece.reasoning]
    assert len(thinking) > 10 and max(thinking) < min(place for place, piece in enumerate(pieces) if piece.content)


@pytest.mark.parametrize("stops", [["table"], ["We look", "channel", "analysis", "table"], ["\n", "able."]])
def test_stop_strings_are_looked_for_in_what_is_said(directory: Path, stops: list[str]) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    channels = HarmonyReader({}, harmony_ids(tokenizer) or {})
    answer = OutputText(tokenizer.detokenizer(shown_ids=channels.shown_ids), stops, (), [257], 300, channels)
    for token in tokenizer.encode(
        f"{THINKS.replace('1', chr(10))}<|channel|>final<|message|>On the table.", add_special_tokens=False
    ):
        if answer.finish_reason is None:
            answer.push(token)
    assert answer.finish_reason == "stop_string" and answer.stop_match == stops[-1]
    assert answer.text == f"On the {'t' if stops[-1] == 'able.' else ''}"
    assert "".join(channels.thoughts) == "We look, \n < 2."


def test_rules_begin_in_headers_alone(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    ids = harmony_ids(tokenizer)
    assert ids is not None
    vocabulary = GrammarVocabulary.of_tokenizer(tokenizer, 320, [257, 264])
    choice = checked_choice(checked_tools(TOOLS), "auto")
    assert choice is not None

    def fed(text: str) -> tuple[Any, set[int]]:
        rules = harmony_constraint(choice, vocabulary, ids)
        for token in tokenizer.encode(text, add_special_tokens=False):
            assert rules.try_advance(token), text
        row = np.zeros(mask_words(320), np.int32)
        rules.fill_mask(row)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")[:320]
        return rules, set(np.flatnonzero(bits).tolist())

    first = {tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "ls"}
    for header in ("<|channel|>commentary to=functions.", f"{THINKS} to=functions.", " to=functions."):
        rules, allowed = fed(header)
        assert allowed == first and not rules.is_complete()
    for free in ("<|channel|>analysis<|message|>to=functions.", "<|channel|>final<|message|>", ""):
        rules, allowed = fed(free)
        assert len(allowed) == 320 and rules.is_complete()
    named = "<|channel|>commentary to=functions.look"
    behind = {tokenizer.encode(text, add_special_tokens=False)[0] for text in (" ", *CHANNEL_MARKS[2:5])}
    assert fed(named)[1] == behind  # no "json", with which the name would be another
    for more in (" <|constrain|>json", "<|constrain|>json", " json", "<|channel|>commentary json", ""):
        assert len(fed(f"{named}{more}<|message|>{{")[1]) == 1, more
    rules, allowed = fed('<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "')
    assert allowed == {tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "cp"}
    rules.rollback(len("at") + 6)
    rules.rollback(30)
    assert rules.is_complete()


def test_a_token_of_a_long_answer_takes_as_long_as_one_of_a_short_one(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    vocabulary = GrammarVocabulary.of_tokenizer(tokenizer, 320, [257, 264])
    choice = checked_choice(checked_tools(TOOLS), "auto")
    assert choice is not None

    class Counting(dict[str, int]):
        count = 0

        def __getitem__(self, mark: str) -> int:
            self.count += 1
            return super().__getitem__(mark)

    ids = Counting(harmony_ids(tokenizer) or {})
    rules = harmony_constraint(choice, vocabulary, ids)
    spent = []
    for token in tokenizer.encode(f"<|channel|>analysis<|message|>{'so ' * 300}", add_special_tokens=False):
        before = ids.count
        assert rules.try_advance(token)
        spent.append(ids.count - before)
    assert len(spent) > 800 and max(spent[400:]) <= max(spent[:200])


@pytest.mark.parametrize("form", ["", " <|constrain|>json", "<|constrain|>shopping_list"])
def test_a_structure_begins_in_the_final_channel(directory: Path, form: str) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    maker = RuleMaker(tokenizer, 320, [257, 264])
    prompt = tokenizer.encode_chat(ASKED)
    rules = maker.rules(SamplingParams(structure=Structure(json={"enum": ["ab"]})), prompt)
    assert rules is not None
    row = np.zeros(mask_words(320), np.int32)
    for token in tokenizer.encode(f"{THINKS}<|channel|>final{form}<|message|>", add_special_tokens=False):
        rules.constraint.fill_mask(row)
        assert (row == -1).all() and not rules.constraint.is_complete()
        assert rules.constraint.try_advance(token)
    for token in tokenizer.encode('"ab"', add_special_tokens=False):
        assert not rules.constraint.is_complete() and rules.constraint.try_advance(token)
    assert rules.constraint.is_complete() and rules.structured_from([]) == 0
