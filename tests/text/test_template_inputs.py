"""Tools and template variables on their way to the chat template, from requests, sessions and the command line."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from command_line import Edgellm

from edgellm import LLM, Request, RequestError, SamplingParams
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import EngineLimits
from edgellm.text.messages import checked_tools, checked_variables
from edgellm.text.template import ChatTemplate

pytestmark = pytest.mark.usefixtures("private_files")

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{{ mood or '' }}"
    "{% endif %}"
)
GRASP = {
    "type": "function",
    "function": {
        "name": "grasp",
        "description": "Take an object.",
        "parameters": {"type": "object", "properties": {"object": {"type": "string"}}, "required": ["object"]},
    },
}
HELLO = [{"role": "user", "content": "hello"}]
SHORT = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def engines(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose template knows tools, enable_thinking and a mood."""
    folder = tmp_path_factory.mktemp("tools")
    checkpoint = make_checkpoint(folder / "checkpoint", max_position_embeddings=2048)
    path = checkpoint / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    build_engine_directory(checkpoint, folder / "robot", EngineLimits(1, 128, 1500), [])
    return folder / "robot"


@pytest.fixture
def llm(engines: Path) -> Iterator[LLM]:
    with LLM(engines, backend="numpy") as opened:
        yield opened


@pytest.fixture
def tools_file(tmp_path: Path) -> Path:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([GRASP]))
    return path


def prompt(question: str = "hello", tools: list[dict[str, Any]] | None = None, behind: str = "") -> str:
    """What the template makes of a question."""
    described = f"<|im_start|>tools\n{json.dumps(tools)}<|im_end|>\n" if tools else ""
    return f"{described}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{behind}"


def test_they_reach_the_template_in_every_way_of_asking(llm: LLM) -> None:
    variables = {"enable_thinking": False, "mood": "calm"}
    given = {"tools": [GRASP], "template_variables": variables}
    text = prompt(tools=[GRASP], behind="<think></think>calm")
    expected = llm.generate(text, SHORT)
    request = Request(messages=HELLO, params=SHORT, **given)
    session = llm.create_session(params=SHORT, **given)
    with llm.stream_chat(HELLO, SHORT, **given) as stream:
        answers = [
            llm.chat(HELLO, SHORT, **given),
            llm.submit(request).result(),
            stream.result(),
            session.send("hello"),
        ]
    for answer in answers:
        assert (answer.token_ids, answer.usage.prompt_tokens) == (expected.token_ids, expected.usage.prompt_tokens)
    again = session.send("why?")
    assert (
        again.token_ids
        == llm.chat([*session.messages[:2], {"role": "user", "content": "why?"}], SHORT, **given).token_ids
    )
    assert llm.chat(HELLO, SHORT).usage.prompt_tokens == llm.generate(prompt(), SHORT).usage.prompt_tokens
    assert llm.chat(HELLO, SHORT, tools=[]).token_ids == llm.chat(HELLO, SHORT).token_ids


def test_what_a_session_was_given_may_change_afterwards(llm: LLM) -> None:
    tools, variables = [dict(GRASP)], {"mood": "calm"}
    session = llm.create_session(params=SHORT, tools=tools, template_variables=variables)
    tools.clear()
    variables["mood"] = "angry"
    expected = llm.generate(prompt(tools=[GRASP], behind="calm"), SHORT)
    assert session.send("hello").token_ids == expected.token_ids


def test_a_function_alone_is_put_into_the_form_of_tools() -> None:
    function = GRASP["function"]
    for given in (GRASP, function, {"function": function}, {"type": "function", **function}):
        assert checked_tools([given]) == [GRASP]
        assert list(checked_tools([given])[0]) == ["type", "function"]
    other_order = {"function": function, "type": "function"}
    assert list(checked_tools([other_order])[0]) == ["function", "type"]  # as templates print it
    dumped = {"type": "function", "function": {"name": "wave", "description": None, "strict": None}}
    assert checked_tools((dumped,)) == [{"type": "function", "function": {"name": "wave"}}]
    assert checked_tools([]) is None is checked_tools(None)


LOOP: list[Any] = []
LOOP.append(LOOP)
#: Forty lists, each of which stands twice in the next: a copy would have a billion values.
SHARED: list[Any] = []
for _ in range(40):
    SHARED = [SHARED, SHARED]


def all_of(*args: str) -> None:
    """Some of which have no name."""


class Colour(Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("grasp", "tools is a str: expected a list of tools"),
        (GRASP, "tools is a dict: expected a list of tools"),
        ([GRASP, "wave"], "tools[1] is a str: expected an object"),
        ([all_of], "tools[0]: the parameter args of the function all_of is variadic"),
        ([{}], "tools[0].name is missing: expected a function's name"),
        ([{"function": {"name": ""}}], "tools[0].function.name is empty"),
        ([{"function": "grasp"}], "tools[0].function is a str: expected an object with a name"),
        ([{"type": "web_search"}], "tools[0].type is 'web_search': expected 'function'"),
        ([{"name": 5}], "tools[0].name is a int: expected text"),
        ([{"name": "a", "description": ["b"]}], "tools[0].description is a list: expected text"),
        ([{"name": "a", "parameters": []}], "tools[0].parameters is a list: expected an object, a JSON schema"),
        (
            [{"name": "a", "parameters": {"enum": {1, 2}}}],
            "tools[0].parameters.enum is a set: expected a value as JSON",
        ),
        ([{"name": "a", "parameters": {3: 4}}], "tools[0].parameters has the key 3: expected text"),
        ([{"name": "a", "parameters": {"x": [float("nan")]}}], "tools[0].parameters.x[0] is nan: expected a finite"),
        ([{"name": "a", "parameters": {"x": 2**99}}], "tools[0].parameters.x is a whole number of 100 bits"),
        ([{"name": "a", "parameters": {"x": LOOP}}], "is nested more than 64 deep"),
        ([{"name": "a", "parameters": {"x": SHARED}}], "tools has more than 100,000 values"),
        ([GRASP] * 50_000, "tools has more than 100,000 values"),
    ],
)
def test_wrong_tools_are_refused_by_their_place(tools: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        Request(messages=HELLO, tools=tools)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (["enable_thinking"], "template_variables is a list: expected values by name, or None"),
        ({"enable thinking": 1}, "template_variables has the name 'enable thinking': expected letters, digits and _"),
        ({5: 1}, "template_variables has the name 5"),
        ({"messages": []}, "template_variables has the name 'messages', which every request sets itself"),
        ({"add_generation_prompt": False}, "template_variables has the name 'add_generation_prompt', which"),
        ({"self": 1}, "template_variables has the name 'self', which"),
        ({"mood": Colour.RED}, "the template variable mood is a Colour: expected a value as JSON has it"),
        ({"mood": {"a": [b"x"]}}, "the template variable mood.a[0] is a bytes"),
        ({"mood": SHARED}, "template_variables has more than 100,000 values"),
    ],
)
def test_wrong_variables_are_refused_by_name(variables: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        Request(messages=HELLO, template_variables=variables)
    assert message in str(caught.value)


def test_prompts_have_no_template(llm: LLM) -> None:
    with pytest.raises(RequestError, match="tools are for the chat template, which a prompt has none of"):
        Request("hello", tools=[GRASP])
    with pytest.raises(RequestError, match="template_variables are for the chat template"):
        Request([1, 2], template_variables={"enable_thinking": True})
    assert Request("hello", tools=[], template_variables={}).tools is None
    with pytest.raises(RequestError, match=r"tools\[0\] is a int"):
        llm.create_session(tools=[5])


def test_special_tokens_in_tools_stay_text(llm: LLM) -> None:
    plain, special = "a description of ten", "<|im_end|>"
    counts = [
        llm.chat(HELLO, SHORT, tools=[{"name": "a", "description": text}]).usage.prompt_tokens
        for text in (plain, plain + special)
    ]
    assert counts[1] - counts[0] == len(special)  # a token a byte


def test_a_variable_that_is_never_read_is_reported_once(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    variables = {"enable_thinking": True, "enable_thought": False, "mod": "calm"}
    with caplog.at_level(logging.WARNING, "edgellm"):
        for _ in range(2):
            llm.chat(HELLO, SHORT, template_variables=variables)
    found = [record.getMessage() for record in caplog.records if record.name == "edgellm.text"]
    assert len(found) == 2
    for name, message in zip(("enable_thought", "mod"), found, strict=True):
        assert f"never reads {name}: setting it changes nothing" in message
        assert str(llm.directory.path) in message


def test_tools_that_no_template_shows_are_refused_where_they_may_be_called(tiny_engines: Path) -> None:
    with LLM(tiny_engines, backend="numpy") as llm:
        none = llm.chat(HELLO, SHORT, tools=[GRASP], tool_choice="none")
        assert none.token_ids == llm.chat(HELLO, SHORT).token_ids
        for ask in (
            lambda: llm.chat(HELLO, SHORT, tools=[GRASP]),
            lambda: llm.create_session(tools=[GRASP]).send("hello"),
        ):
            with pytest.raises(RequestError, match=r"tools are given, but the chat template of .* never reads them"):
                ask()


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (TEMPLATE, {"messages", "tools", "add_generation_prompt", "enable_thinking", "mood"}),
        ("{% set on = on if on is defined else true %}{{ on }}", {"on"}),
        ("{% if not on is defined %}{% set on = 1 %}{% endif %}{{ on }}", {"on"}),
        ("{% macro f(a) %}{{ a }}{{ tools }}{% endmacro %}{{ f(1) }}", {"tools"}),
        (
            "{% set ns = namespace(a=mood) %}{{ ns.a }}{% generation %}{{ raise_exception('x') }}{% endgeneration %}",
            {"mood"},
        ),
        ("{% for m in messages %}{% break %}{{ m }}{{ loop.index }}{% endfor %}", {"messages"}),
        ("no variable", set()),
    ],
)
def test_names_that_a_template_reads(source: str, names: set[str]) -> None:
    assert ChatTemplate({"default": source}, "test").template_variables == names


def test_generate(edgellm: Edgellm, engines: Path, tools_file: Path, llm: LLM) -> None:
    options = ("generate", "hello", "-m", engines, "--backend", "numpy", "--max-tokens", 8)

    def raw(text: str) -> str:
        return llm.generate(text, SamplingParams(max_tokens=8)).text + "\n"

    no_thinking = "<think></think>"
    assert edgellm(*options, "--tools", tools_file) == (0, raw(prompt(tools=[GRASP])), "")
    assert edgellm(*options, "--no-thinking") == (0, raw(prompt(behind=no_thinking)), "")
    assert edgellm(*options, "--thinking") == (0, raw(prompt()), "")
    for value, mood in (("calm", "calm"), ('"calm"', "calm"), ("[1, 2]", "[1, 2]"), ("null", ""), ("a=b", "a=b")):
        assert edgellm(*options, "--template-variable", f"mood={value}") == (0, raw(prompt(behind=mood)), "")
    variables = ("--template-variable", "mood=NaN", "--template-variable", "enable_thinking=false")
    assert edgellm(*options, *variables, "--tools", tools_file) == (
        0,
        raw(prompt("hello", [GRASP], no_thinking + "NaN")),
        "",
    )


def test_chat_gives_them_with_every_question(edgellm: Edgellm, engines: Path, tools_file: Path, llm: LLM) -> None:
    given = {"tools": [GRASP], "template_variables": {"enable_thinking": False}}
    session = llm.create_session(params=SamplingParams(max_tokens=8), **given)
    expected = "".join(session.send(question).text + "\n" for question in ("hello", "why?"))
    options = ("--backend", "numpy", "--max-tokens", 8, "--tools", tools_file, "--no-thinking")
    assert edgellm("chat", engines, *options, stdin="hello\nwhy?\n") == (0, expected, "")


def test_the_command_line_says_what_changes_nothing(edgellm: Edgellm, tiny_engines: Path, tools_file: Path) -> None:
    options = ("--backend", "numpy", "--max-tokens", 3)
    for command in (("generate", "hello", "-m", tiny_engines), ("chat", tiny_engines)):
        code, out, err = edgellm(*command, *options, "--no-thinking", stdin="hello\nhi\n")
        assert code == 0 and out
        place = tiny_engines / "tokenizer_config.json"
        assert err == f"the chat template of {place} never reads enable_thinking: setting it changes nothing\n"
        code, out, err = edgellm(*command, *options, "--tools", tools_file, stdin="hello\nhi\n")
        assert (code, out) == (1, "")
        assert err.startswith("error: tools are given, but the chat template of ")
        assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--template-variable", "mood"], 2, "'mood': expected NAME=VALUE"),
        (["--template-variable", "=1"], 2, "has the name '': expected letters, digits and _"),
        (["--template-variable", "messages=1"], 2, "which every request sets itself"),
        (["--template-variable", "a=1", "--template-variable", "a=2"], 2, "a is given twice"),
        (["--thinking", "--template-variable", "enable_thinking=1"], 2, "enable_thinking is given twice"),
        (["--template-variable", "a=" + "[" * 70 + "]" * 70], 2, "is nested more than 64 deep"),
        (["--template-variable", "a=\udcff"], 1, "--template-variable is not UTF-8 text: invalid byte 0xff"),
        (["--tools", "/no/such/file"], 1, "--tools /no/such/file cannot be read: No such file or directory"),
        (["--raw", "--no-thinking"], 2, "has no chat template: leave tools and template variables out"),
    ],
)
def test_wrong_options(edgellm: Edgellm, options: list[str], code: int, message: str) -> None:
    found, out, err = edgellm("generate", "hello", *options)
    assert (found, out) == (code, "")
    assert message in " ".join(err.split())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("{}", "tools is a dict: expected a list of tools"),
        ('[{"name": "a"}, {"name": null}]', "tools[1].name is missing"),
        ('[{"name": "a", "parameters": {"x": NaN}}]', "NaN is not a JSON value"),
    ],
)
def test_wrong_files_of_tools(edgellm: Edgellm, tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "tools.json"
    path.write_text(content)
    for command in (("generate", "hello"), ("chat",)):
        code, out, err = edgellm(*command, "--tools", path, stdin="hello\n")
        assert (code, out) == (1, "")
        assert err.startswith(f"error: --tools {path}") and message in err and len(err.splitlines()) == 1


def test_variables_are_copied() -> None:
    given = {"a": [{"b": (1, 2.5, None, True)}]}
    copied = checked_variables(given)
    assert copied == {"a": [{"b": [1, 2.5, None, True]}]}
    given["a"].clear()
    assert copied["a"]
    assert checked_variables(None) == {}
