"""Qwen3.5, with images, LFM2.5 and Gemma 4, as far as templates and tokens go: they think, then answer, call a tool, or
keep to a form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from call_templates import THINKING, WITHOUT_CALLS, WRITTEN, call_template
from synthetic_images import synthetic_image
from tiny_multimodal import FAMILIES as SEEING
from tiny_multimodal import MARKERS
from tokenizers import Tokenizer

from edgellm import LLM, SamplingParams
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import EngineLimits
from edgellm.structure.description import Structure
from edgellm.structure.reasoning import reasoning_marks, reasoning_state
from edgellm.tool_calls.formats import FORMATS

pytestmark = pytest.mark.usefixtures("private_files")

HELLO = [{"role": "user", "content": "hello"}]
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["cup", "table"]}, "note": {"type": "string", "maxLength": 5}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}
_SEEN = "".join(MARKERS)
#: Its messages may have images among their parts.
LOOKING = THINKING.replace(
    "{{ m.content or '' }}",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content or [] %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}" + _SEEN + "{% endif %}{% endfor %}{% endif %}",
)
#: Each family's template, and the tokens that it adds to the vocabulary, special or not as published.
FAMILIES: dict[str, tuple[str, list[str], list[str], str]] = {
    "qwen3_5": (LOOKING, ["<think>", "</think>", "<tool_call>", "</tool_call>"], [], "qwen3_coder"),
    "lfm2_5": (WITHOUT_CALLS, ["<think>", "</think>"], ["<|tool_call_start|>", "<|tool_call_end|>"], "lfm2"),
    "gemma4": (
        call_template(WRITTEN["gemma4"]) + "{% if enable_thinking %}<|channel>thought\n{% endif %}",
        [],
        ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'],
        "gemma4",
    ),
}


def marks_of(llm: LLM) -> tuple[str, str]:
    """What is written around what a model thinks."""
    return ("<|channel>", "<channel|>") if llm.family == "gemma4" else ("<think>", "</think>")  # type: ignore[attr-defined]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def llm(
    request: pytest.FixtureRequest, make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLM]:
    """A tiny Qwen3.5 with its encoder, and a tiny model of another family, with the template and the tokens of each."""
    template, added, special, _ = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    changes = SEEING.get(request.param, {}) | {"max_position_embeddings": 2048}
    checkpoint = make_checkpoint(folder / "checkpoint", **changes)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokenizer.add_tokens(added)
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    path = checkpoint / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    rows = (64,) if "vision_config" in changes else ()
    build_engine_directory(checkpoint, folder / "robot", EngineLimits(1, 128, 1500, image_rows=rows), [])
    with LLM(folder / "robot", backend="numpy") as opened:
        opened.family = request.param  # type: ignore[attr-defined]
        yield opened


def state_of(llm: LLM, **variables: Any) -> str:
    marks = reasoning_marks(llm.tokenizer)
    assert marks is not None
    return reasoning_state(llm.tokenizer, marks, llm.tokenizer.encode_chat(HELLO, **variables))


def biased(llm: LLM, *tokens: str, **more: Any) -> SamplingParams:
    """Parameters under which these tokens come as soon as they may."""
    ids = [llm.tokenizer.token_to_id(token) for token in tokens]
    return SamplingParams(logit_bias={each: 100.0 for each in ids if each is not None}, **more)


def test_the_template_says_how_an_answer_begins(llm: LLM) -> None:
    of_qwen = llm.family == "qwen3_5"  # type: ignore[attr-defined]
    assert state_of(llm) == ("open" if of_qwen else "undecided")
    assert state_of(llm, enable_thinking=False) == ("closed" if of_qwen else "undecided")
    of_lfm = llm.family == "lfm2_5"  # type: ignore[attr-defined]
    assert state_of(llm, enable_thinking=True) == ("undecided" if of_lfm else "open")


def test_the_format_is_found_without_being_named(llm: LLM) -> None:
    expected = FAMILIES[llm.family][3]  # type: ignore[attr-defined]
    assert llm.call(lambda runtime: runtime.tool_format).result() == expected


def thoughts(llm: LLM, params: SamplingParams, **more: Any) -> tuple[int, Any]:
    """How many tokens of an answer are reasoning, and the answer."""
    found = llm.chat(HELLO, params, **more)
    marks = reasoning_marks(llm.tokenizer)
    assert marks is not None
    ids = list(found.token_ids)
    return (ids.index(marks.end) + 1 if marks.end in ids else 0), found


@pytest.mark.parametrize("seed", range(3))
def test_a_model_thinks_before_a_call_that_is_enforced(llm: LLM, seed: int) -> None:
    first, end = marks_of(llm)
    begin = () if llm.family == "qwen3_5" else (first,)  # type: ignore[attr-defined]
    params = biased(llm, *begin, end, max_tokens=200, temperature=1.3, seed=seed)
    for choice in ("required", "look"):
        count, found = thoughts(llm, params, tools=[LOOK], tool_choice=choice, parallel_tool_calls=False)
        (call,) = found.tool_calls
        assert count > len(begin) and call.complete and call.parsed["at"] in ("cup", "table")
        assert found.finish_reason == "tool_calls" and len(call.parsed.get("note", "")) <= 5
        assert "look" not in found.text


def test_a_picture_is_thought_about_before_a_call(llm: LLM) -> None:
    if not llm.has_vision_model:
        pytest.skip("it sees nothing")
    params = biased(llm, "</think>", max_tokens=200, temperature=1.3, seed=5, logprobs=0)
    seen: list[list[float]] = []
    for pixels in (synthetic_image(24, 20), 255 - synthetic_image(24, 20)):
        shown = [{"type": "image", "image": pixels}, {"type": "text", "text": "Where is the cup?"}]
        asked = [{"role": "user", "content": shown}]
        found = llm.chat(asked, params, tools=[LOOK], tool_choice="required", parallel_tool_calls=False)
        (call,) = found.tool_calls
        assert call.complete and call.parsed["at"] in ("cup", "table") and found.finish_reason == "tool_calls"
        marks = reasoning_marks(llm.tokenizer)
        assert marks is not None and list(found.token_ids).count(marks.end) == 1
        seen.append([each.logprob for each in found.logprobs or ()])
        called = {
            "role": "assistant",
            "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": "{}"}}],
        }
        answered = llm.chat([*asked, called, {"role": "tool", "content": "on the table"}], params, tools=[LOOK])
        assert answered.usage.prompt_tokens > found.usage.prompt_tokens
    assert max(abs(first - second) for first, second in zip(*seen, strict=False)) > 1e-3


def test_calls_while_a_model_thinks_are_thoughts(llm: LLM) -> None:
    mark = FORMATS[FAMILIES[llm.family][3]].begin  # type: ignore[attr-defined]
    begins = llm.family == "qwen3_5"  # type: ignore[attr-defined]
    asked = HELLO if begins else [*HELLO, {"role": "assistant", "content": marks_of(llm)[0]}]
    found = llm.chat(asked, biased(llm, mark, max_tokens=8), tools=[LOOK], continue_final_message=not begins)
    assert found.tool_calls == () and found.tool_call_error is None
    assert list(found.token_ids) == [llm.tokenizer.token_to_id(mark)] * 8  # and no rules keep it


def test_thinking_that_is_switched_off_leaves_the_answer_alone(llm: LLM) -> None:
    form = Structure(choice=["yes", "no"])
    if llm.family == "qwen3_5":  # type: ignore[attr-defined]
        found = llm.chat(HELLO, biased(llm, "</think>"), structure=form, template_variables={"enable_thinking": False})
        assert found.text in ("yes", "no")
    count, found = thoughts(llm, biased(llm, *marks_of(llm), max_tokens=20), structure=form)
    assert found.parsed in ("yes", "no") and count >= 1
    assert found.text.endswith(found.parsed)
