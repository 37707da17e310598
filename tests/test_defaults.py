"""The system prompt and the sampling that a model is published with: the same from Python and on the command line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import Edgellm
from synthetic_images import synthetic_image

from edgellm import LLM, Request, RequestError, SamplingParams
from edgellm.benchmark.comparing import BenchPrompt
from edgellm.commands.bench import with_system_prompt
from edgellm.defaults import ModelDefaults
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import EngineLimits
from edgellm.errors import EngineDirectoryError
from edgellm.text.template import ChatTemplate

pytestmark = pytest.mark.usefixtures("private_files")

QUESTION = "Where is the red cup?"
ANSWER = "The red cup is at the front left."
SHORT = SamplingParams(max_tokens=6, ignore_eos=True)
SYSTEM, IMAGE_SYSTEM = "You are Pip.", "Look."


def user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}


def system(content: object) -> dict[str, object]:
    return {"role": "system", "content": content}


@pytest.fixture(scope="module")
def shipped() -> Iterator[LLM]:
    with LLM(backend="numpy") as opened:
        yield opened


@pytest.fixture(scope="module")
def engines(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a system prompt of its own."""
    folder = tmp_path_factory.mktemp("defaults")
    checkpoint = shutil.copytree(tiny_checkpoint, folder / "checkpoint")
    (checkpoint / "system_prompt.txt").write_bytes(f"{SYSTEM}\r\n\n".encode())  # as some editors end lines
    build_engine_directory(checkpoint, folder / "robot", EngineLimits(2, 16, 240), [])
    return folder / "robot"


@pytest.fixture(scope="module")
def llm(engines: Path) -> Iterator[LLM]:
    with LLM(engines, backend="numpy") as opened:
        yield opened


def test_python_answers_as_the_command_line_does(shipped: LLM, edgellm: Edgellm) -> None:
    assert shipped.chat([user(QUESTION)]).text == ANSWER
    assert "".join(chunk.text for chunk in shipped.stream_chat([user(QUESTION)])) == ANSWER
    assert [each.text for each in shipped.handle([Request(messages=[user(QUESTION)])])] == [ANSWER]
    assert shipped.create_session().send(QUESTION).text == ANSWER
    options = ("--backend", "numpy", "--temperature", 0)
    assert edgellm("generate", QUESTION, *options) == (0, ANSWER + "\n", "")
    assert edgellm("chat", *options, stdin=QUESTION) == (0, ANSWER + "\n", "")


def test_an_empty_system_message_leaves_the_default_prompt_out(llm: LLM) -> None:
    def prompt(*messages: dict[str, object]) -> str:
        turns = [f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in messages]
        return "".join(turns) + "<|im_start|>assistant\n"

    def tokens(*messages: dict[str, object]) -> tuple[int, ...]:
        response = llm.chat(messages, SHORT)
        assert response.token_ids == llm.handle([Request(messages=messages, params=SHORT)])[0].token_ids
        return (response.usage.prompt_tokens, *response.token_ids)

    def expected(*messages: dict[str, object]) -> tuple[int, ...]:
        response = llm.generate(prompt(*messages), SHORT)
        return (response.usage.prompt_tokens, *response.token_ids)

    assert tokens(user("hi")) == expected(system(SYSTEM), user("hi"))
    for nothing in ("", [], [{"type": "text", "text": ""}]):
        assert tokens(system(nothing), user("hi")) == expected(user("hi"))
    assert tokens(system("Be."), user("hi")) == expected(system("Be."), user("hi"))
    instructed = {"role": "developer", "content": "Be."}
    assert tokens(instructed, user("hi")) == expected(instructed, user("hi"))
    with pytest.raises(RequestError, match="there are no messages"):
        llm.chat([system("")])


#: As Qwen2.5's.
OWN_PROMPT = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nQ<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
REFUSING = "{% for m in messages %}{{ m.content if m.role != 'system' else raise_exception('no system') }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "begin"), [(OWN_PROMPT, "<|im_start|>system\n<|im_end|>\n<|im_start|>user"), (REFUSING, "hi")]
)
def test_an_empty_system_message_leaves_the_template_s_own_prompt_out(engines: Path, source: str, begin: str) -> None:
    messages = [system(""), user("hi")]
    with LLM(engines, backend="numpy") as llm:
        llm.tokenizer.chat_template = ChatTemplate({"default": source}, "it")
        ids = llm.tokenizer.encode_chat(messages)
        assert llm.tokenizer.decode(ids, skip_special_tokens=False).startswith(begin)
        first = llm.generate(ids, SHORT)
        session = llm.create_session("", SHORT)
        for answer in (llm.chat(messages, SHORT), session.send("hi")):
            assert (answer.usage.prompt_tokens, answer.token_ids) == (len(ids), first.token_ids)


def test_prompts_as_text_or_ids_have_no_system_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hi")
    assert llm.generate("hi", SHORT).usage.prompt_tokens == len(ids)
    assert llm.generate(ids, SHORT).usage.prompt_tokens == len(ids)


def test_sessions(llm: LLM) -> None:
    for asked, first in ((None, []), ("", [system("")]), ("Be.", [system("Be.")])):
        session = llm.create_session(asked, SHORT)
        answer = session.send("hi")
        assert answer.usage.prompt_tokens == llm.chat([*first, user("hi")], SHORT).usage.prompt_tokens
        said = [*first, user("hi"), {"role": "assistant", "content": answer.text}]
        assert session.messages == said
        again = session.send("why?")
        assert again.token_ids == llm.chat([*said, user("why?")], SHORT).token_ids


def test_the_default_prompt_can_be_computed_ahead_of_time(engines: Path) -> None:
    with LLM(engines, backend="numpy") as llm:
        kept = llm.cache_system_prompt(llm.default_system_prompt)
        assert llm.chat([user("hi")], SHORT).usage.reused_tokens == kept.tokens
        assert llm.chat([system(""), user("hi")], SHORT).usage.reused_tokens < kept.tokens


def test_errors_number_the_messages_as_they_were_given(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"message 1 \(user\) is empty"):
        llm.chat([user(" ")])
    with pytest.raises(RequestError, match="message 2 has the role 'judge'"):
        llm.chat([user("a"), {"role": "judge", "content": "b"}])


def test_a_conversation_that_shows_images_has_the_prompt_for_images(shipped: LLM) -> None:
    shown = [{"type": "image", "image": synthetic_image(24, 20)}, {"type": "text", "text": "What do you see?"}]
    assert shipped.default_image_system_prompt != shipped.default_system_prompt
    prompt = system(shipped.default_image_system_prompt)
    later = [user("Hello!"), {"role": "assistant", "content": "Hello."}, user(shown)]
    for messages in ([user(shown)], later):
        found, expected = (shipped.chat(each, SHORT) for each in (messages, [prompt, *messages]))
        assert (found.usage.prompt_tokens, found.token_ids) == (expected.usage.prompt_tokens, expected.token_ids)
    with_own = [system(SYSTEM), user(shown)]
    assert shipped.chat(with_own, SHORT).usage.prompt_tokens < shipped.chat([user(shown)], SHORT).usage.prompt_tokens


@pytest.mark.parametrize(
    ("files", "text", "images"),
    [
        ({}, "", ""),
        ({"system_prompt.txt": SYSTEM}, SYSTEM, SYSTEM),
        ({"system_prompt_image.txt": IMAGE_SYSTEM}, "", IMAGE_SYSTEM),
        ({"system_prompt.txt": SYSTEM + "\n", "system_prompt_image.txt": "\n"}, SYSTEM, ""),
    ],
)
def test_prompts_of_a_directory(tmp_path: Path, files: dict[str, str], text: str, images: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    defaults = ModelDefaults(tmp_path)
    assert (defaults.system_prompt, defaults.image_system_prompt) == (text, images)


def test_a_prompt_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "system_prompt.txt").write_bytes(b"ab\xff")
    with pytest.raises(EngineDirectoryError, match=r"system_prompt\.txt is not UTF-8 text"):
        ModelDefaults(tmp_path)


def test_recommended_sampling_is_there_to_be_asked_for(shipped: LLM, llm: LLM) -> None:
    assert shipped.default_params == SamplingParams(temperature=0.3, top_k=20, top_p=0.95)
    assert llm.default_params == SamplingParams()
    params = replace(shipped.default_params, seed=3, max_tokens=12)
    session = shipped.create_session(params=params)
    assert session.send("Tell me a story.").token_ids == shipped.chat([user("Tell me a story.")], params).token_ids


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        ({"do_sample": True}, SamplingParams(temperature=1.0)),
        ({"do_sample": True, "temperature": 1e-6, "repetition_penalty": 1.05}, SamplingParams(repetition_penalty=1.05)),
        ({"do_sample": True, "temperature": None, "min_p": 0.1}, SamplingParams(temperature=1.0, min_p=0.1)),
        ({"do_sample": False, "temperature": 0.7}, SamplingParams()),
        ({"temperature": 0.7, "repetition_penalty": 1.1}, SamplingParams(repetition_penalty=1.1)),
        ({"temperature": 0.7}, SamplingParams()),
    ],
)
def test_sampling_of_a_directory(tmp_path: Path, published: dict[str, object], expected: SamplingParams) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(published))
    assert ModelDefaults(tmp_path).params == expected


@pytest.mark.parametrize(
    "wrong",
    [{"suppress_tokens": 5}, {"suppress_tokens": ["<audio|>"]}, {"bad_words_ids": [True]}, {"bad_words_ids": 1}],
)
def test_wrong_suppressed_tokens_are_named(tmp_path: Path, wrong: dict[str, object]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(wrong))
    with pytest.raises(
        EngineDirectoryError, match=rf"generation_config\.json: {next(iter(wrong))} is .* list of token ids"
    ):
        _ = ModelDefaults(tmp_path).suppressed_tokens


def test_suppressed_tokens_are_in_no_answer(llm: LLM, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Gemma 4 12B says tokens of images and sounds among words where these are not kept out."""
    usual = [llm.generate(QUESTION, SHORT, seed=seed, temperature=seed / 4).token_ids for seed in range(6)]
    never = sorted({token for answer in usual for token in answer[::2]})
    (end, *_), (first, *others) = llm.directory.config.eos_token_ids, never
    published = {"suppress_tokens": [-1, end, *others, 1 << 31], "bad_words_ids": [[first], [end], [7, 8]]}
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    (checkpoint / "generation_config.json").write_text(json.dumps(published))
    build_engine_directory(checkpoint, tmp_path / "robot", EngineLimits(2, 16, 240), [])
    expected = llm.generate(QUESTION, SHORT, bad_words=[[each] for each in never])
    with LLM(tmp_path / "robot", backend="numpy") as other:
        assert other.generate(QUESTION, SHORT).token_ids == expected.token_ids
        for seed in range(1, 6):
            answer = other.generate(QUESTION, SHORT, seed=seed, temperature=seed / 4, logit_bias={never[0]: 100})
            assert not set(never) & set(answer.token_ids)
        assert set(other.generate(QUESTION, SHORT, allowed_token_ids=[first]).token_ids) == {first}
        assert other.generate(QUESTION, max_tokens=9, logit_bias={end: 100}).usage.completion_tokens == 1


def test_wrong_recommendations_are_named_when_they_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "top_p": 7}')
    defaults = ModelDefaults(tmp_path)
    with pytest.raises(EngineDirectoryError, match=r"generation_config\.json: top_p is 7: expected a number above 0"):
        _ = defaults.params


def test_the_chat_command_can_do_without_a_system_prompt(edgellm: Edgellm, engines: Path, llm: LLM) -> None:
    def answer(*messages: dict[str, object]) -> str:
        return llm.chat(messages, SamplingParams(max_tokens=8)).text + "\n"

    options = ("chat", engines, "--backend", "numpy", "--max-tokens", 8)
    assert edgellm(*options, stdin="hi\n")[1] == answer(system(SYSTEM), user("hi"))
    assert edgellm(*options, "--system", "", stdin="hi\n")[1] == answer(system(""), user("hi"))
    assert edgellm(*options, stdin='/system ""\nhi\n')[1] == answer(system(""), user("hi"))
    assert edgellm(*options, stdin="/system\n")[2] == SYSTEM + "\n"
    assert answer(system(SYSTEM), user("hi")) != answer(system(""), user("hi"))


def test_the_prompts_of_a_benchmark() -> None:
    prompts = [BenchPrompt((user("a"),)), BenchPrompt((system("s"), user("b")))]

    def asked(text: str | None) -> list[list[dict[str, object]]]:
        return [list(prompt.messages) for prompt in with_system_prompt(prompts, text)]

    assert asked(None) == [[user("a")], [system("s"), user("b")]]  # the model's own comes with the question
    assert asked("") == [[system(""), user("a")], [system("s"), user("b")]]


def test_the_image_prompt_comes_along_when_a_model_is_built(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    for name, text in (("system_prompt.txt", SYSTEM), ("system_prompt_image.txt", IMAGE_SYSTEM)):
        (checkpoint / name).write_text(text)
    build_engine_directory(checkpoint, tmp_path / "robot", EngineLimits(1, 16, 64), [])
    defaults = ModelDefaults(tmp_path / "robot")
    assert (defaults.system_prompt, defaults.image_system_prompt) == (SYSTEM, IMAGE_SYSTEM)
