"""What a request costs, continuing a message, deadlines that have passed, and what is refused, counted and shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from served_answers import LONG, SHORT, Pause, answer

import edgellm
from edgellm import LLM, Request, RequestError, Response, SamplingParams, SpecDecodeRuntime
from edgellm.text.output import FinishReason
from edgellm.text.template import ChatTemplate

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}]
BEGUN = [*MESSAGES, {"role": "assistant", "content": "Sure, "}]


@pytest.fixture(scope="module")
def shipped() -> Iterator[LLM]:
    with LLM(backend="numpy", drafting=None) as opened:
        yield opened


def test_tokens_are_counted_as_they_will_cost(served: LLM) -> None:
    for prompt in ("hello", [1, 2, 3], np.array([1, 2]), MESSAGES):
        asked = Request(messages=prompt) if prompt is MESSAGES else Request(prompt)
        params = SamplingParams(max_tokens=1)
        cost = served.submit(Request(asked.prompt, asked.messages, params)).result().usage.prompt_tokens
        assert served.count_tokens(prompt) == cost
    cost = served.chat(BEGUN, SHORT, continue_final_message=True).usage.prompt_tokens
    assert served.count_tokens(BEGUN, continue_final_message=True) == cost < served.count_tokens(BEGUN)
    assert served.count_tokens("x" * 500) == 500  # more than the context: it is not asked
    assert served.count_tokens("") == served.count_tokens([]) == 0
    accepted = served.metrics()["requests"]["accepted"]
    assert accepted == 5


def test_images_are_counted(shipped: LLM) -> None:
    attached_image = np.zeros((64, 64, 3), np.uint8)
    content = [{"type": "image", "image": attached_image}, {"type": "text", "text": "What is this?"}]
    messages = [{"role": "user", "content": content}]
    cost = shipped.chat(messages, SamplingParams(max_tokens=1)).usage.prompt_tokens
    assert shipped.count_tokens(messages) == cost
    assert cost > shipped.count_tokens([{"role": "user", "content": "What is this?"}]) + 1


def test_an_answer_is_continued(shipped: LLM) -> None:
    """What follows is what would have followed: the same tokens as for a prompt that ends there."""
    whole = shipped.chat(MESSAGES)
    words = whole.text.split()
    begun = " ".join(words[: len(words) // 2])
    messages = [*MESSAGES, {"role": "assistant", "content": begun}]
    rest = shipped.chat(messages, continue_final_message=True)
    assert begun + rest.text == whole.text
    prompt = shipped.tokenizer.encode_chat(messages, continue_final_message=True)
    assert shipped.generate(prompt).token_ids == rest.token_ids
    assert shipped.chat(messages).text != rest.text  # it is answered anew without


def test_what_cannot_be_continued(served: LLM) -> None:
    with pytest.raises(RequestError, match="last message is of the role 'user'"):
        served.chat(MESSAGES, continue_final_message=True)
    with pytest.raises(RequestError, match="continue_final_message is of use to messages"):
        served.submit(Request("x", continue_final_message=True))
    with pytest.raises(RequestError, match="continue_final_message is 1: expected true or false"):
        served.chat(BEGUN, continue_final_message=1)
    served.tokenizer.media = ("image",)
    shown = {"role": "assistant", "content": [{"type": "image", "image": "x.png"}]}
    with pytest.raises(RequestError, match="no text to go on with"):
        served.tokenizer.encode_chat([*MESSAGES, shown], continue_final_message=True)


OPENING = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
CLOSING = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    ("body", "text", "ending"),
    [
        ("{{ m.content }}", "Sure, ", "Sure, "),
        ("{{ m.content }}", "", "assistant\n"),
        ("{{ m.content | trim }}", " Sure, \n", "assistant\nSure,"),  # as the template trims it
        ("{{ m.content | trim }}", "", "assistant\n"),
        ("{{ m.content.split('</think>')[-1] }}", "<think>a</think>Yes", None),  # its beginning is gone
        ("{{ m.content }} ({{ m.content | length }})", "Sure", "Sure"),
        ("{{ m.content | replace('Sure', 'No') }}", "Sure", None),
        ("{{ m.content | tojson }}", "Sure", "Sure"),
        ("{% if m.role == 'user' %}{{ m.content }}{% endif %}", "Sure", None),  # not written at all
        ("{{ m.content }}", "a <|im_end|> b", "a <|im_end|> b"),  # a special token's text, which is text
        ("{{ m.content[:3] }}", "Sure", None),
        ("{% if m.role == 'user' %}{{ m.content }}{% else %}{{ messages[0].content }}{% endif %}", "hi", None),
    ],
)
def test_where_templates_end(served: LLM, body: str, text: str, ending: str | None) -> None:
    tokenizer = served.tokenizer
    tokenizer.chat_template = ChatTemplate({"default": OPENING + body + CLOSING}, "a test")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]
    if ending is None:
        with pytest.raises(RequestError, match="does not end the conversation with the last message's text"):
            tokenizer.encode_chat(messages, continue_final_message=True)
        return
    ids = tokenizer.encode_chat(messages, continue_final_message=True)
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith(ending)
    if "trim" not in body and "tojson" not in body:
        assert tokenizer.encode_chat(messages)[: len(ids)] == ids


def test_a_deadline_that_has_passed_is_an_empty_answer(served: LLM, paused: Pause) -> None:
    for deadline in (0, -1.5, -1e308):
        response = served.generate("hello", LONG, deadline=deadline)
        assert (response.finish_reason, response.text, response.token_ids) == ("deadline", "", ())
        assert response.usage.completion_tokens == 0
    with paused(served):
        waiting = served.stream("hello", LONG, deadline=0)
    assert waiting.result().finish_reason == "deadline"
    with pytest.raises(RequestError, match="the prompt is empty"):
        served.generate("", deadline=-1)
    assert served.metrics()["requests"]["finished"] == {"deadline": 4}
    session = served.create_session(params=SHORT)
    assert session.send("late", deadline=0).finish_reason == "deadline"
    assert session.messages == []


def test_requests_that_are_refused_are_counted(served: LLM, paused: Pause) -> None:
    expected = 0
    for ask in (
        lambda: served.generate(""),
        lambda: served.generate(5),
        lambda: served.chat([]),
        lambda: served.stream("x", adapter="none"),
        lambda: served.submit("x"),
        lambda: served.create_session().send("  "),
    ):
        with pytest.raises(edgellm.EdgeLLMError):
            ask()
        expected += 1
        assert served.metrics()["requests"] == {"accepted": 0, "refused": expected, "failed": 0, "finished": {}}
    wrong, right = served.handle([Request(""), Request("hello", params=SHORT)])
    assert isinstance(wrong, RequestError) and isinstance(right, Response)
    assert served.metrics()["requests"]["refused"] == expected + 1
    served.handle([Request("hello", params=SHORT)] * 20)  # more than the queue holds: they wait, none is refused
    assert served.metrics()["requests"]["refused"] == expected + 1
    with paused(served):
        kept = [served.stream("x", SHORT) for _ in range(8)]
        with pytest.raises(edgellm.QueueFullError):
            served.stream("x", SHORT)
    assert [each.result().finish_reason for each in kept] == ["length"] * 8
    assert served.metrics()["requests"]["refused"] == expected + 2


def test_the_shipped_model_is_the_default() -> None:
    with SpecDecodeRuntime(backend="numpy") as runtime:
        assert runtime.directory.path == edgellm.SHIPPED_MODEL


def test_how_they_look(serving_engines: Path) -> None:
    llm = LLM(serving_engines, backend="numpy", drafting=None)
    assert repr(llm) == f"<LLM {serving_engines} on numpy (0 running, 0 waiting)>"
    session = llm.create_session("be kind", SHORT)
    assert repr(session) == "<Session: 1 message, idle>"
    with session.stream("hi", SamplingParams(max_tokens=40, ignore_eos=True)) as generation:
        if not generation.finished:
            assert repr(session) == "<Session: 1 message, being answered>"
    assert repr(session) == (
        "<Session: 3 messages, idle>" if generation.result().text else "<Session: 1 message, idle>"
    )
    llm.close()
    assert repr(llm) == f"<LLM {serving_engines} (closed)>"


def test_what_is_exported() -> None:
    """Each name is there, and type checkers see the same ones as Python."""
    source = Path(edgellm.__file__).read_text(encoding="utf-8")
    assert sorted(edgellm.__all__) == sorted(edgellm._MODULES)
    for name in edgellm.__all__:
        assert getattr(edgellm, name) is not None
        imported = source[: source.index("__all__")]
        assert f" {name}," in imported or f" {name}\n" in imported, name
    assert get_args(FinishReason) == get_args(edgellm.FinishReason)
    wanted = {"Usage", "Timings", "TokenLogprobs", "CachedPrompt", "EngineError", "AsyncSession", "AsyncGeneration"}
    assert wanted | {"SHIPPED_MODEL", "DraftingStatistics"} <= set(edgellm.__all__)


def test_answers_of_a_request_in_all_its_ways(served: LLM) -> None:
    """Positions that programs use stay what they are."""
    expected = answer(served.generate("hello", SHORT))
    assert answer(served.generate("hello", SHORT, None, deadline=60, images=())) == expected
    assert answer(served.submit(Request("hello", None, SHORT, None, 60, ())).result()) == expected
