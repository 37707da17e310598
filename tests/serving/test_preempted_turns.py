"""Answers to pictures, with calls of tools, give way to urgent ones: all that a program sees of them is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from call_templates import WRITTEN

from edgellm import LLM, Chunk, DraftingConfig, Response, SamplingParams
from edgellm.opened_model import SHIPPED_MODEL
from edgellm.text.template import ChatTemplate
from edgellm.tool_calls.calls import joined_deltas

pytestmark = pytest.mark.usefixtures("private_files")

#: Pictures as the shipped model's own template has them, and calls as Hermes's.
TEMPLATE = (
    "{% for m in messages %}{% if m.content is iterable and m.content is not string %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|im_start|>system\n<|image|><|im_end|>\n{% endif %}{% endfor %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content or [] %}"
    "{{ part.text or '' }}{% endfor %}{% endif %}{% if loop.first and tools %} Tools: {{ tools | tojson }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{% set c = call.function %}" + WRITTEN["hermes"] + "{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MOVE: Any = {
    "name": "move",
    "description": "Move an object.",
    "parameters": {
        "type": "object",
        "properties": {
            "object": {"type": "string", "minLength": 12, "maxLength": 40},
            "to": {"enum": ["left", "right"]},
        },
        "required": ["object", "to"],
        "additionalProperties": False,
    },
}
SCENES = [str(SHIPPED_MODEL / "scenes" / f"{name}.png") for name in ("toys", "breakfast")]
URGENT = [
    [{"role": "user", "content": "Where is the red cup?"}],
    [
        {
            "role": "user",
            "content": [{"type": "image", "image": SCENES[1]}, {"type": "text", "text": "What do you see?"}],
        }
    ],
]
ASKED: list[Any] = [
    {"role": "user", "content": [{"type": "image", "image": SCENES[0]}, {"type": "text", "text": "What do you see?"}]}
]
DRAWN = SamplingParams(temperature=0.9, seed=5, max_tokens=60, repetition_penalty=1.1, logprobs=2)


@pytest.fixture(
    scope="module",
    params=[
        (False, 0),
        (True, 1 << 28),
        *(pytest.param(pair, marks=pytest.mark.slow) for pair in ((True, 0), (False, 1 << 28))),
    ],
    ids=str,
)
def llm(request: pytest.FixtureRequest, slowed: Callable[[LLM], None]) -> Iterator[LLM]:
    """The shipped model, which computes one answer at a time, slowly enough for others to come meanwhile."""
    drafts, budget = request.param
    drafting = DraftingConfig(kind="chain", draft_steps=3) if drafts else None
    with LLM(SHIPPED_MODEL, backend="numpy", drafting=drafting, preemption_budget=budget) as opened:
        opened.tokenizer.chat_template = ChatTemplate({"default": TEMPLATE}, "the test")
        opened.chat(ASKED, SamplingParams(max_tokens=1))  # opens what steps are made with
        slowed(opened)
        yield opened


def told(response: Response) -> tuple[Any, ...]:
    """All of an answer but what is drawn for each call, its id, and times."""
    calls = [(call.name, call.arguments, call.complete) for call in response.tool_calls]
    return response.token_ids, response.text, calls, response.finish_reason, response.tool_call_error


def streamed(chunks: list[Chunk]) -> tuple[str, list[tuple[str | None, str]]]:
    deltas = joined_deltas([delta for chunk in chunks for delta in chunk.tool_calls])
    return "".join(chunk.text for chunk in chunks), [(each.name, each.arguments) for each in deltas]


def disturbed(llm: LLM, pauses: tuple[int, ...], **more: Any) -> tuple[Response, list[Chunk]]:
    """The answer to the picture that gives way to urgent ones when so many of its chunks have come."""
    answers = [llm.chat(urgent, SamplingParams(max_tokens=12)).text for urgent in URGENT]
    chunks: list[Chunk] = []
    with llm.stream_chat(ASKED, DRAWN, **more) as stream:
        for chunk in stream:
            chunks.append(chunk)
            if len(chunks) in pauses:
                number = pauses.index(len(chunks))
                urgent = llm.chat(URGENT[number % 2], SamplingParams(max_tokens=12), priority=9)
                assert urgent.text == answers[number % 2] and urgent.timings.preemptions == 0
        return stream.result(), chunks


@pytest.mark.parametrize(("pauses", "choice"), [((1, 4), "required"), ((2, 3, 9), "none")], ids=str)
def test_an_answer_to_a_picture_with_tools_is_what_it_is_undisturbed(
    llm: LLM, pauses: tuple[int, ...], choice: str
) -> None:
    more: dict[str, Any] = {"tools": [MOVE], "tool_choice": choice, "parallel_tool_calls": False}
    undisturbed = llm.chat(ASKED, DRAWN, **more)
    kept, again = (llm.metrics()["preemptions"][each] for each in ("kept", "recomputed"))
    found, chunks = disturbed(llm, pauses, **more)
    assert told(found) == told(undisturbed) and bool(found.tool_calls) == (choice == "required")
    assert [each.logprob for each in found.logprobs or ()] == pytest.approx(
        [each.logprob for each in undisturbed.logprobs or ()], abs=1e-4
    )
    assert streamed(chunks) == (found.text, [(call.name, call.arguments) for call in found.tool_calls])
    assert 1 <= found.timings.preemptions <= len(pauses)
    counts, count = llm.metrics()["preemptions"], found.timings.preemptions
    budget = llm.call(lambda runtime: runtime._keeper.budget).result()
    assert (counts["kept"] - kept, counts["recomputed"] - again) == ((count, 0) if budget else (0, count))
    assert all(call.complete and call.parsed["to"] in ("left", "right") for call in found.tool_calls)
