"""What a model thinks is parted from what it says, wherever the pieces of its answer are cut."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from byte_level_tokenizer import byte_level
from http_server import response_events
from starlette.responses import JSONResponse

from edgellm.http.answers import AnswerReader, ChatWriter, Piece
from edgellm.http.fields import ParsedRequest
from edgellm.http.messages import MessageWriter
from edgellm.http.ollama import ChatLineWriter
from edgellm.http.responses import ResponseWriter, input_messages
from edgellm.requests import Chunk, Request, Response, Timings, TokenLogprobs, Usage
from edgellm.sampling_params import SamplingParams
from edgellm.structure.reasoning import ReasoningState, reasoning_marks
from edgellm.text.output import OutputText
from edgellm.text.tokenizer import Tokenizer
from edgellm.tool_calls.calls import ToolCall, all_deltas, joined_deltas
from edgellm.tool_calls.formats import tool_format
from edgellm.tool_calls.reader import ToolReader

MARKS = ["<think>", "</think>"]


@pytest.fixture(params=["shown", "special"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """One whose marks are text, and one whose marks are special tokens, of which no text is shown."""
    library = byte_level()
    if request.param == "shown":
        library.add_tokens(MARKS)
    else:
        library.add_special_tokens(MARKS)
    return Tokenizer(library)


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def chunks_of(tokenizer: Tokenizer, ids: list[int], size: int) -> list[Chunk]:
    """An answer in pieces of so many tokens, each with log-probabilities, and with a last one of text alone."""
    detokenizer, found = tokenizer.detokenizer(), []
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        logprobs = tuple(TokenLogprobs(each, -1.0) for each in part)
        found.append(Chunk("".join(map(detokenizer.push, part)), tuple(part), (), logprobs))
    return [*found, Chunk(detokenizer.finish(), ())]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("state", "text", "thought", "said"),
    [
        ("undecided", "<think>\nhello world\n\n</think>\n\nhow are you?", "hello world", "how are you?"),
        ("open", "\nhello  world</think>how are", "hello  world", "how are"),
        ("open", "hello wor", "hello wor", ""),
        ("open", "\n\n</think>\n\n how", "", "how"),
        ("undecided", "how <think> are </think> you", "", None),
        ("closed", "how <think> are", "", None),
        ("undecided", "<think></think>", "", ""),
        ("undecided", "", "", ""),
        ("open", "h\u00e9llo \U0001f916</think>\U0001f916 you", "h\u00e9llo \U0001f916", "\U0001f916 you"),
    ],
)
def test_parts_of_an_answer(
    tokenizer: Tokenizer, state: ReasoningState, text: str, thought: str, said: str | None, size: int
) -> None:
    ids = encoded(tokenizer, text)
    reader = AnswerReader(tokenizer, OutputText(tokenizer.detokenizer()), reasoning_marks(tokenizer), state)
    pieces = [reader.read(chunk) for chunk in chunks_of(tokenizer, ids, size)]
    assert "".join(piece.reasoning for piece in pieces) == thought
    assert "".join(piece.content for piece in pieces) == (tokenizer.decode(ids) if said is None else said)
    end = tokenizer.token_to_id("</think>")
    thinks = said is not None and bool(ids)
    expected = (ids.index(end) + 1 if end in ids else len(ids)) if thinks else 0
    assert reader.reasoning_tokens == expected
    assert [each.token_id for piece in pieces for each in piece.logprobs] == ids[expected:]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("prompt", "text", "thought"),
    [
        ("", "<|channel>thought\nthought is all<channel|>so", "thought is all"),
        ("", "<|channel>thought\n<channel|>so", ""),
        ("", "<|channel>thought<channel|>so", ""),
        ("", "<|channel>thoughts\n<channel|>so", "thoughts"),
        ("<|channel>", "thought\nwell<channel|>so", "well"),
        ("<|channel>thought\n", "thought\nwell<channel|>so", "thought\nwell"),
    ],
)
def test_the_name_of_a_channel_is_no_part_of_what_is_thought(prompt: str, text: str, thought: str, size: int) -> None:
    """Gemma 4's, where the model opens the channel, or the template and the model names it; of a stream, too."""
    library = byte_level()
    library.add_special_tokens(["<|channel>", "<channel|>"])
    tokenizer, messages = Tokenizer(library), [{"role": "user", "content": "x"}]
    sequence: Any = SimpleNamespace(calls=None, prompt_ids=encoded(tokenizer, f"x{prompt}"), answer=None)
    sequence.answer = OutputText(tokenizer.detokenizer())
    reader = AnswerReader.of(tokenizer, sequence, Request(messages=messages))
    pieces = [reader.read(chunk) for chunk in chunks_of(tokenizer, encoded(tokenizer, text), size)]
    assert "".join(piece.reasoning for piece in pieces) == thought
    assert "".join(piece.content for piece in pieces) == "so"


def test_writers_show_reasoning_beside_the_answer(tokenizer: Tokenizer) -> None:
    ids = encoded(tokenizer, "<think>hello</think>world")
    request = Request(messages=[{"role": "user", "content": "x"}], params=SamplingParams())
    usage, timings = Usage(1, 0, len(ids)), Timings(0, 0, 0, 0)
    response = Response(tokenizer.decode(ids), tuple(ids), "stop", usage, timings)

    def made(kind: Any, stream: bool) -> tuple[Any, AnswerReader]:
        reader = AnswerReader(tokenizer, OutputText(tokenizer.detokenizer()), reasoning_marks(tokenizer), "undecided")
        return kind(ParsedRequest((request,), "m", stream), tokenizer, [reader], []), reader

    writer, reader = made(ChatWriter, False)
    found = writer.whole([reader.read(Chunk(response.text, tuple(ids)))], [response])
    message = found["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hello", "world")
    assert (
        found["usage"]["completion_tokens_details"]["reasoning_tokens"]
        == ids.index(encoded(tokenizer, "</think>")[0]) + 1
    )
    writer, _ = made(ChatWriter, True)
    assert b'"delta":{"reasoning_content":"so"}' in b"".join(writer.piece(0, Piece("so")))
    writer, _ = made(ChatLineWriter, True)
    assert b'"message":{"role":"assistant","content":"","thinking":"so"}' in b"".join(writer.piece(0, Piece("so")))
    writer, reader = made(ResponseWriter, False)
    found = writer.whole([reader.read(Chunk(response.text, tuple(ids)))], [response])
    assert [item["type"] for item in found["output"]] == ["reasoning", "message"]
    assert found["output"][0]["content"] == [{"type": "reasoning_text", "text": "hello"}]
    writer, reader = made(MessageWriter, False)
    found = writer.whole([reader.read(Chunk(response.text, tuple(ids)))], [response])
    assert found["content"][0] == {"type": "thinking", "thinking": "hello", "signature": ""}
    assert found["content"][1:] == [{"type": "text", "text": "world", "citations": None}]


@pytest.mark.parametrize("size", [1, 2, 5, 40, 100])
def test_reasoning_text_and_calls_in_this_order(size: int) -> None:
    """Also where the model thinks of calls, whose marks are special tokens that are shown."""
    library = byte_level()
    library.add_special_tokens([*MARKS, "<tool_call>", "</tool_call>"])
    tokenizer = Tokenizer(library)
    call = '<tool_call>{"name": "stop", "arguments": {"at": "once"}}</tool_call>'
    ids = encoded(tokenizer, f"<think>how? {call}</think>hello {call}\n{call} world")
    marks = reasoning_marks(tokenizer)
    shown = [mark for mark in map(tokenizer.token_to_id, ("<tool_call>", "</tool_call>")) if mark is not None]
    calls = ToolReader(tool_format("hermes"), {"stop": {}}, marks, "undecided", shown)
    answer = OutputText(tokenizer.detokenizer(shown_ids=shown), calls=calls)
    reader = AnswerReader(tokenizer, answer, marks, "undecided", shown)
    request = Request(messages=[{"role": "user", "content": "x"}], params=SamplingParams())
    writer = ResponseWriter(ParsedRequest((request,), "m", True, shows_reasoning=True), tokenizer, [reader], [])
    pieces, events = [], b"".join(writer.begin())
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        text = "".join(map(answer.push, part))
        pieces.append(reader.read(Chunk(text, tuple(part), tool_calls=calls.take_deltas())))
        events += b"".join(writer.piece(0, pieces[-1]))
    rest = answer.finish("stop")
    pieces.append(reader.read(Chunk(rest, (), tool_calls=calls.take_deltas())))
    assert "".join(piece.reasoning for piece in pieces) == f"how? {call}"
    assert "".join(piece.content for piece in pieces) == "hello world"
    deltas = joined_deltas([delta for piece in pieces for delta in piece.calls])
    assert [(each.name, each.arguments) for each in deltas] == [("stop", '{"at": "once"}')] * 2
    response = Response(answer.text, tuple(ids), "tool_calls", Usage(1, 0, len(ids)), Timings(0, 0, 0, 0))
    events += b"".join([*writer.piece(0, pieces[-1]), *writer.ended(0, response)])
    blocks = blocks_of(tokenizer, request, reader, pieces, response)
    assert [kind for kind, _ in blocks][:3] == ["thinking", "text", "tool_use"]
    assert [text for kind, text in blocks if kind == "tool_use"] == ['{"at": "once"}'] * 2
    assert "".join(text for kind, text in blocks if kind == "text") == "hello world"
    lines = [line.removeprefix(b"data: ") for line in events.split(b"\n") if line.startswith(b"data: ")]
    checked = response_events(lines)
    assert [each.sequence_number for each in checked] == list(range(len(lines)))
    output = json.loads(lines[-1])["response"]["output"]
    handed_back = [{key: output[0][key] for key in ("type", "encrypted_content")}, output[1]]
    assert input_messages(handed_back, None)[0]["reasoning_content"] == f"how? {call}"
    assert [item["type"] for item in output[:3]] == ["reasoning", "message", "function_call"]
    assert {item["status"] for item in output} == {"completed"}
    called = [item["arguments"] for item in output if item["type"] == "function_call"]
    said = [item["content"][0]["text"] for item in output if item["type"] == "message"]
    assert called == ['{"at": "once"}'] * 2 and "".join(said) == "hello world"


@pytest.mark.parametrize("text", ["\U0001f916 you\u00e9", "how \U0001f916"])
def test_log_probabilities_of_tokens_without_text_are_streamed(tokenizer: Tokenizer, text: str) -> None:
    """Those of a character's first bytes come with its last one, and those behind the last character at the end."""
    ids = encoded(tokenizer, text)[:-1]  # the last character is cut
    request = Request(messages=[{"role": "user", "content": "x"}], params=SamplingParams(logprobs=0))
    response = Response(tokenizer.decode(ids), tuple(ids), "length", Usage(1, 0, len(ids)), Timings(0, 0, 0, 0))

    def made(stream: bool) -> tuple[ResponseWriter, AnswerReader]:
        reader = AnswerReader(tokenizer, OutputText(tokenizer.detokenizer()), None, "closed")
        return ResponseWriter(ParsedRequest((request,), "m", stream), tokenizer, [reader], []), reader

    def listed(output: Any) -> list[Any]:
        return output[0]["content"][0]["logprobs"]

    chunks = chunks_of(tokenizer, ids, 1)
    writer, reader = made(False)
    logprobs = tuple(each for chunk in chunks for each in chunk.logprobs)
    whole = writer.whole([reader.read(Chunk(response.text, tuple(ids), (), logprobs))], [response])
    writer, reader = made(True)
    events = b"".join(event for chunk in chunks for event in writer.piece(0, reader.read(chunk)))
    events += b"".join(writer.ended(0, response))
    found = [json.loads(line[6:]) for line in events.split(b"\n") if line.startswith(b"data: ")]
    deltas = [each for event in found for each in event.get("logprobs", ()) if event["type"].endswith(".delta")]
    assert len(deltas) == len(ids) and deltas == listed(whole["output"]) == listed(found[-1]["response"]["output"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"x": 1e999, "y": [-2E400]}', {"x": sys.float_info.max, "y": [-sys.float_info.max]}),
        (r'{"at": "\ud83e\udd16 \ud83e"}', {"at": "\U0001f916 \ufffd"}),
    ],
)
def test_arguments_that_json_cannot_hold_are_sent_as_what_is_nearest(
    tokenizer: Tokenizer, arguments: str, told: dict[str, Any]
) -> None:
    call = ToolCall("1", "look", arguments)
    request = Request(messages=[{"role": "user", "content": "x"}])
    response = Response("", (1,), "tool_calls", Usage(1, 0, 1), Timings(0, 0, 0, 0), tool_calls=(call,))
    reader = AnswerReader(tokenizer, OutputText(tokenizer.detokenizer()), None, "closed")
    piece = Piece(calls=all_deltas(response.tool_calls))
    for kind in (MessageWriter, ChatLineWriter):
        writer = kind(ParsedRequest((request,), "m"), tokenizer, [reader], [])
        sent = json.loads(JSONResponse(writer.whole([piece], [response])).body)
        assert json.dumps(told) in json.dumps(sent) and call.parsed == told


def blocks_of(
    tokenizer: Tokenizer, request: Request, reader: AnswerReader, pieces: list[Piece], response: Response
) -> list[tuple[str, str]]:
    """The blocks of a stream of `/v1/messages`: each begins, has deltas of its own kind, and ends before the next."""
    writer = MessageWriter(ParsedRequest((request,), "m", True), tokenizer, [reader], [])
    parts = [*(each for piece in pieces for each in writer.piece(0, piece)), *writer.ended(0, response)]
    blocks: list[tuple[str, str]] = []
    is_open = False
    for event in (json.loads(part.partition(b"data: ")[2]) for part in parts):
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            blocks.append((event["content_block"]["type"], ""))
        elif event["type"] == "content_block_delta":
            kind = {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "tool_use"}
            assert is_open and kind[event["delta"].pop("type")] == blocks[-1][0]
            blocks[-1] = (blocks[-1][0], blocks[-1][1] + "".join(event["delta"].values()))
        is_open = event["type"] == "content_block_start" or (is_open and event["type"] != "content_block_stop")
    assert not is_open
    return blocks
