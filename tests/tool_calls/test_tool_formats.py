"""The format that a chat template teaches, how it gets earlier calls, and where the format is recorded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from byte_level_tokenizer import byte_level
from call_templates import WITHOUT_CALLS, WRITTEN, call_template
from command_line import Edgellm

from edgellm import LLM, RequestError, SamplingParams
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import EngineDirectoryError
from edgellm.engines.model.limits import EngineLimits
from edgellm.text.messages import checked_messages
from edgellm.text.template import ChatTemplate
from edgellm.text.tokenizer import Tokenizer
from edgellm.tool_calls.calling import ToolCalling
from edgellm.tool_calls.formats import FORMATS, checkpoint_format, taught_format
from edgellm.tool_calls.reader import ToolReader

pytestmark = pytest.mark.usefixtures("private_files")


def described(name: str) -> ChatTemplate:
    return ChatTemplate({"default": call_template(WRITTEN[name])}, name)


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_the_format_is_the_one_that_calls_are_shown_in(name: str) -> None:
    found = taught_format(described(name))
    assert found is not None and found.name == name


@pytest.mark.parametrize("written", ['"%s"', '"%sr"'])
def test_text_without_quotes_tells_of_pythonic_calls(written: str) -> None:
    """As templates for Llama 3.2 and ToolACE write it."""
    arguments = "{% for k in c.arguments %}{{ k }}={{ " + written + " | format(c.arguments[k]) }}{% endfor %}"
    found = taught_format(ChatTemplate({"default": call_template("[{{ c.name }}(" + arguments + ")]")}, "it"))
    assert found is not None and found.name == "pythonic"


def test_marks_around_the_tools_tell_of_a_format_too() -> None:
    told = "{% if tools %}<|tool_list_start|>{{ tools | tojson }}{% endif %}{{ messages[0].content }}"
    found = taught_format(ChatTemplate({"default": told}, "it"))
    assert found is not None and found.name == "lfm2"


def test_a_token_tells_of_a_format_where_a_template_writes_no_calls() -> None:
    tokens = {"<|tool_call_start|>"}.__contains__
    found = taught_format(ChatTemplate({"default": WITHOUT_CALLS}, "it"), tokens)
    assert found is not None and found.name == "lfm2"
    assert taught_format(ChatTemplate({"default": WITHOUT_CALLS}, "it")) is None
    without_tools = WITHOUT_CALLS.replace("tools | tojson", "1")
    for others in (without_tools, call_template("call {{ c.name }} with {{ c.arguments }}")):
        assert taught_format(ChatTemplate({"default": others}, "it"), tokens) is None


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_calls_that_are_written_are_read(name: str) -> None:
    calls = [
        ("look", {"at": 'it\'s\na "cup"', "n": 3, "more": {"a": [True, None]}, "on": True, "off": None}),
        ("stop", {}),
    ]
    text = FORMATS[name].written(calls)
    reader = ToolReader(FORMATS[name], {"look": {"properties": {"at": {"type": "string"}}}, "stop": {}})
    assert reader.push(0, text) + reader.finish() == "" and reader.error is None
    assert [(call.name, call.parsed) for call in reader.calls] == calls
    assert FORMATS[name].written([]) == ""


TOOLS = [{"type": "function", "function": {"name": "look"}}]
MARKS = ["<|tool_call_start|>", "<|tool_call_end|>", "<|tool_response_start|>", "<|tool_response_end|>"]


@pytest.fixture
def lfm2() -> Tokenizer:
    """Its calls and results stand between special tokens; its template writes no calls."""
    library = byte_level()
    library.add_special_tokens(MARKS)
    return Tokenizer(library, chat_template=ChatTemplate({"default": WITHOUT_CALLS}, "it"))


def conversation(arguments: Any, content: Any = None) -> list[dict[str, Any]]:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": content, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "<|tool_response_end|>"},
    ]


@pytest.mark.parametrize("arguments", [{"at": "<|tool_call_end|>", "n": 1}, '{"at": "<|tool_call_end|>", "n": 1}'])
@pytest.mark.parametrize("content", [None, "I look."])
def test_earlier_calls_are_written_where_the_template_leaves_them_out(
    lfm2: Tokenizer, arguments: Any, content: str | None
) -> None:
    assert ToolCalling(lfm2).format() is FORMATS["lfm2"]
    ids = lfm2.encode_chat(conversation(arguments, content), tools=TOOLS)
    text = lfm2.decode(ids, skip_special_tokens=False)
    written = '[look(at="<|tool_call_end|>", n=1), look(at="<|tool_call_end|>", n=1)]'
    assert f"assistant\n{content or ''}<|tool_call_start|>{written}<|tool_call_end|><|im_end|>" in text
    counts = [ids.count(lfm2.token_to_id(mark)) for mark in MARKS]
    assert counts == [1, 1, 1, 1]  # those of the arguments and of the result are text


def test_calls_are_written_once_and_only_where_a_format_is_known(lfm2: Tokenizer) -> None:
    messages = conversation({"at": "cup"})
    with pytest.raises(RequestError, match="which the chat template of it does not write"):
        lfm2.encode_chat(messages[1:2])
    ToolCalling(lfm2)
    written = lfm2.decode(lfm2.encode_chat(messages[1:2]), skip_special_tokens=False)
    assert written.count("look(") == 2
    lfm2.chat_template = described("lfm2")
    again = lfm2.decode(lfm2.encode_chat(messages[1:2]), skip_special_tokens=False)
    assert again.count("look(") == 2
    lfm2.chat_template = ChatTemplate({"default": "{{ messages[0].content }}"}, "it")
    with pytest.raises(RequestError, match="an earlier message has tool_calls, which"):
        lfm2.encode_chat(messages[1:2])
    ToolCalling(lfm2, "hermes")
    lfm2.chat_template = ChatTemplate({"default": "{{ messages[0].content }}."}, "it")
    found = lfm2.decode(
        lfm2.encode_chat([{**messages[1], "tool_calls": [{"function": {"name": "look", "arguments": "["}}]}])
    )
    assert found == '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>.'


@pytest.mark.parametrize("name", ["hermes", "pythonic"])
def test_calls_that_a_template_writes_beside_tools_alone_are_written_without_any(name: str) -> None:
    source = call_template("{% if tools %}" + WRITTEN[name] + "{% endif %}")
    tokenizer = Tokenizer(byte_level(), chat_template=ChatTemplate({"default": source}, "it"))
    ToolCalling(tokenizer)
    messages = conversation({"at": "cup"}, "I look.")[:2]
    beside, alone = (tokenizer.decode(tokenizer.encode_chat(messages, tools=tools)) for tools in (TOOLS, None))
    assert beside.count("cup") == alone.count("cup") == 2 and "Tools: " not in alone


@pytest.mark.parametrize(
    "written",
    [
        "",
        "{{ c.name }}",
        WRITTEN["qwen3_coder"].replace("tool_call", "seed:tool_call"),
        "call {{ c.name }} with {{ c.arguments }}",
    ],
)
def test_a_template_that_shows_no_known_form_teaches_none(written: str) -> None:
    assert taught_format(ChatTemplate({"default": call_template(written)}, "it")) is None
    assert taught_format(ChatTemplate({"default": "{{ messages[9].content.x.y }}"}, "it")) is None


def test_the_template_for_tools_counts_where_there_is_one() -> None:
    sources = {"default": call_template(""), "tool_use": call_template(WRITTEN["mistral"])}
    found = taught_format(ChatTemplate(sources, "it"))
    assert found is not None and found.name == "mistral"


@pytest.mark.parametrize("name", ["hermes", "lfm2", "llama3_json", "qwen3_coder"])
@pytest.mark.parametrize("arguments", [{"at": "cup"}, '{"at": "cup"}'])
def test_earlier_calls_are_written_as_the_model_wrote_them(name: str, arguments: Any) -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": arguments}}
    given = checked_messages([{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}])
    known = described(name)
    rendered = known.render({"messages": known.fitted(given, with_tools=True)})
    shown = {
        "hermes": '{"name": "look", "arguments": {"at": "cup"}}',
        "lfm2": '[look(at="cup")]',
        "llama3_json": '{"name": "look", "parameters": {"at": "cup"}}',
        "qwen3_coder": "<parameter=at>\ncup\n</parameter>",
    }
    assert shown[name] in rendered


def test_a_template_that_takes_arguments_as_text_gets_text() -> None:
    known = ChatTemplate({"default": call_template("{{ c.name + ' ' + c.arguments }}")}, "it")
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": "caf\u00e9"}}}
    given = checked_messages([{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}])
    assert 'look {"at": "caf\u00e9"}' in known.render({"messages": known.fitted(given)})


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("formats") / "checkpoint", max_position_embeddings=512)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": call_template(WRITTEN["hermes"])}))
    return folder


def test_a_build_records_the_format_and_info_shows_it(checkpoint: Path, tmp_path: Path, edgellm: Edgellm) -> None:
    for options, expected in (((), "hermes"), (("--tool-format", "pythonic"), "pythonic")):
        target = str(tmp_path / expected)
        assert edgellm("build", str(checkpoint), target, "--kv-capacity", "256", *options)[0] == 0
        assert json.loads((tmp_path / expected / "edgellm.json").read_text())["tool_format"] == expected
        code, out, _ = edgellm("info", "-m", target)
        assert code == 0 and f"calls in the format {expected}" in out
        with LLM(target, backend="numpy") as llm:
            found = llm.call(lambda runtime: runtime.tool_format).result()
            assert found == expected
    code, _, errors = edgellm("build", str(checkpoint), str(tmp_path / "no"), "--tool-format", "yaml")
    assert code != 0 and "the tool format 'yaml' is unknown: expected one of" in errors
    assert not (tmp_path / "no").exists()


def test_numbers_of_any_size_in_published_files_are_none_of_ours(
    checkpoint: Path, tmp_path: Path, edgellm: Edgellm
) -> None:
    """What transformers writes for "no limit", and numbers that JSON has no words for."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, folder)
    for name, values in (
        ("tokenizer_config.json", {"model_max_length": int(1e30)}),
        ("config.json", {"time_step_limit": [0.0, float("inf")]}),
    ):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | values))
    code, _, errors = edgellm("build", str(folder), str(tmp_path / "robot"), "--kv-capacity", "256")
    assert code == 0, errors
    assert EngineDirectory.open(tmp_path / "robot").tool_format == "hermes"
    with LLM(tmp_path / "robot", backend="numpy") as llm:
        assert llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=1)).token_ids


def test_a_template_that_cannot_be_read_fails_the_build(checkpoint: Path, tmp_path: Path, edgellm: Edgellm) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, folder)
    (folder / "tokenizer_config.json").write_text('{"chat_template": 5}')
    code, _, errors = edgellm("build", str(folder), str(tmp_path / "robot"), "--kv-capacity", "256")
    assert code == 1 and f"chat_template in {folder / 'tokenizer_config.json'} is a int" in " ".join(errors.split())
    assert not (tmp_path / "robot").exists()


def test_a_build_finds_the_format_in_the_vocabulary(checkpoint: Path, tmp_path: Path, edgellm: Edgellm) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": WITHOUT_CALLS}))
    assert checkpoint_format(folder, None) is None
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_tokens(MARKS[:2])
    library.save(str(folder / "tokenizer.json"))
    assert checkpoint_format(folder, None) == "lfm2"


def test_a_directory_without_a_record_goes_by_its_template(checkpoint: Path, tmp_path: Path) -> None:
    build_engine_directory(checkpoint, tmp_path / "robot", EngineLimits(1, 128, 256), [])
    assert EngineDirectory.open(tmp_path / "robot").tool_format is None
    with LLM(tmp_path / "robot", backend="numpy") as llm:
        formats = []
        for name in ("hermes", "mistral"):
            llm.tokenizer.chat_template = described(name)
            formats.append(llm.call(lambda runtime: runtime.tool_format).result())
        assert formats == ["hermes", "mistral"]


@pytest.mark.parametrize(("value", "kind"), [("yaml", RequestError), (5, EngineDirectoryError)])
def test_a_record_of_an_unknown_format_is_refused(
    checkpoint: Path, tmp_path: Path, value: Any, kind: type[Exception]
) -> None:
    build_engine_directory(checkpoint, tmp_path / "robot", EngineLimits(1, 128, 256), [], tool_format="hermes")
    path = tmp_path / "robot" / "edgellm.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tool_format": value}))
    with pytest.raises(kind, match=r"tool_format|yaml"):
        LLM(tmp_path / "robot", backend="numpy")
