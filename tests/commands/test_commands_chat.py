"""`edgellm chat` by pipe, on a real model with random weights and the NumPy backend."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path

import pytest
from command_line import CONTEXT

from edgellm.commands.chat_input import PipedLines, read_message
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import EngineLimits
from edgellm.errors import RequestError
from edgellm.llm import LLM
from edgellm.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("private_files")


@pytest.fixture
def chat(chat_engines, edgellm):
    """Pipes lines into `edgellm chat` in this process; returns exit code, standard output and standard error."""

    def call(lines: str | bytes, *options: object, model: Path = chat_engines) -> tuple[int, str, str]:
        return edgellm("chat", model, *options, stdin=lines)

    return call


def conversation(chat_engines, questions: list[str], system: str | None = None, **params) -> list[dict[str, str]]:
    """What the API answers to the same questions."""
    messages = [{"role": "system", "content": system}] if system else []
    with LLM(chat_engines, backend="numpy") as llm:
        for question in questions:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": llm.chat(messages, SamplingParams(**params)).text})
    return messages


def answers(messages: list[dict[str, str]]) -> str:
    return "".join(message["content"] + "\n" for message in messages if message["role"] == "assistant")


def test_every_piped_line_is_a_question_of_one_conversation(chat, chat_engines):
    code, out, err = chat("hello\n\n  \nwhy?\nüber 你好\n", "--max-tokens", 8)
    assert (code, err) == (0, "")
    assert out == answers(conversation(chat_engines, ["hello", "why?", "über 你好"], max_tokens=8))


def test_messages_of_several_lines(chat, chat_engines):
    code, out, _ = chat('first\\\nsecond\n"""\nthird\n\n fourth\n"""\n"""one line"""\n', "--max-tokens", 8)
    questions = ["first\nsecond", "third\n\n fourth", "one line"]
    assert (code, out) == (0, answers(conversation(chat_engines, questions, max_tokens=8)))


def test_commands_change_the_conversation(chat, chat_engines):
    changes = "/set max_tokens 4\n/set temperature 0.9\n/set seed 5\n"
    lines = f"/system Be kind.\nhello\n/reset\n{changes}hello\n//slash\n/bye\nnever\n"
    code, out, err = chat(lines, "--max-tokens", 8)
    first = conversation(chat_engines, ["hello"], "Be kind.", max_tokens=8)
    second = conversation(chat_engines, ["hello", "/slash"], "Be kind.", max_tokens=4, temperature=0.9, seed=5)
    assert (code, out) == (0, answers(first) + answers(second))
    assert err.splitlines() == [
        "The system prompt is set; the conversation goes on. /reset starts a new one.",
        "The conversation is forgotten.",
        "max_tokens 4",
        "temperature 0.9",
        "seed 5",
    ]


def test_system_prompt_is_shown_and_removed(chat):
    _, _, err = chat('/system\n/system ""\n/system\n', "--system", "You are Pip.")
    assert err.splitlines()[0] == "You are Pip."
    assert err.splitlines()[-1] == "There is no system prompt."


def test_help_and_settings_are_listed(chat):
    code, _, err = chat("/help\n/?\n/set\n/set top_p\n")
    assert code == 0
    assert err.count("/save FILE") == 2
    settings = dict(line.split(" ", 1) for line in err.splitlines() if re.match(r"[a-z_]+ \S+$", line))
    assert settings["temperature"] == "0" and settings["stop"] == "none" and settings["top_p"] == "1"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/hepl", "/hepl is no command: did you mean /help?; /help lists them"),
        ("/frobnicate now", "/frobnicate is no command; /help lists them"),
        ("/set temprature 1", "there is no setting 'temprature': did you mean temperature?"),
        ("/set top_p 7", "top_p is 7: expected a number above 0 and up to 1"),
        ("/set seed many", "seed is 'many': expected a whole number from -"),
        ("/save", "/save needs the name of a file: /save FILE"),
        ('/save ""', "/save needs the name of a file: /save FILE"),
        ("/save '/no/such/fol der/file'", "/no/such/fol der/file cannot be written: No such file or directory"),
        ("/save!", "/save! needs the name of a file: /save! FILE"),
        ("/load /no/such/file", "/no/such/file cannot be read: No such file or directory"),
        ("/save /no/such/folder/file", "/no/such/folder/file cannot be written: No such file or directory"),
    ],
)
def test_wrong_commands_give_a_hint_and_the_chat_goes_on(chat, chat_engines, line, message):
    code, out, err = chat(f"{line}\nhello\n", "--max-tokens", 4)
    assert err.startswith(f"error: {message}")
    assert (code, out) == (1, answers(conversation(chat_engines, ["hello"], max_tokens=4)))


def test_settings_take_what_people_write(chat):
    lines = (
        '/set stop END\n/set stop ["a", "b"]\n/set stop 3\n/set stop none\n/set max_tokens none\n/set ignore_eos true\n'
    )
    assert chat(lines)[2].splitlines() == [
        "stop ['END']",
        "stop ['a', 'b']",
        "stop ['3']",
        "stop none",
        "max_tokens none",
        "ignore_eos true",
    ]


def test_saved_conversation_goes_on_where_it_was(chat, chat_engines, tmp_path):
    path = tmp_path / "talk.json"
    code, _, err = chat(f"hello\n/save {path}\n", "--max-tokens", 8, "--system", "Be kind.")
    assert (code, err) == (0, f"Saved 2 messages to {path}.\n")
    saved = json.loads(path.read_text())
    assert (saved["system"], saved["model"], saved["settings"]["max_tokens"]) == ("Be kind.", "robot", 8)
    assert [file.name for file in tmp_path.iterdir() if "talk" in file.name] == ["talk.json"]
    code, out, err = chat(f"/load {path}\nand?\n")
    expected = conversation(chat_engines, ["hello", "and?"], "Be kind.", max_tokens=8)
    assert saved["messages"] == expected[1:3]
    assert (code, out) == (0, expected[-1]["content"] + "\n")
    assert err == f"Loaded 2 messages from {path}.\n"


@pytest.mark.parametrize(
    "content", ["precious", "", "[1]", '{"format": 5}', '{"format": "edgellm"}', "\0", "[" * 100000]
)
def test_save_overwrites_no_file_but_conversations(chat, tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_text(content)
    code, _, err = chat(f"/save {path}\n")
    assert code == 1
    assert err == (
        f"error: {path} is there and no conversation: choose another name, or overwrite it with /save! FILE\n"
    )
    assert path.read_text() == content
    code, _, err = chat(f"/save! {path}\n/save {path}\n", "--system", "Be kind.")
    assert (code, err) == (0, f"Saved 0 messages to {path}.\n" * 2)
    assert json.loads(path.read_text())["system"] == "Be kind."
    assert [file.name for file in tmp_path.iterdir() if "notes" in file.name] == ["notes.txt"]


def test_save_overwrites_a_conversation_of_another_release(chat, tmp_path):
    (tmp_path / "talk.json").write_text('{"format": "edgellm conversation 7"}')
    code, _, _ = chat(f"/save {tmp_path / 'talk.json'}\n")
    assert (code, json.loads((tmp_path / "talk.json").read_text())["format"]) == (0, "edgellm conversation 1")


def test_a_failed_save_leaves_the_file_as_it_was(chat, tmp_path, monkeypatch):
    path = tmp_path / "talk.json"
    assert chat(f"/save {path}\n")[0] == 0
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for command in ("/save", "/save!"):
        code, _, err = chat(f"{command} {path}\n", "--system", "Other.")
        assert (code, err) == (1, f"error: {path} cannot be written: No space left on device\n")
        assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir() if "talk" in file.name] == ["talk.json"]


def test_a_conversation_is_saved_where_a_link_leads_to(chat, tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "talk.json")
    (tmp_path / "notes.txt").write_text("precious")
    (tmp_path / "linked notes").symlink_to(tmp_path / "notes.txt")
    lines = f"/save {tmp_path / 'link.json'}\n/save {tmp_path / 'linked notes'}\n"
    code, _, err = chat(lines)
    assert code == 1 and err.count("Saved 0 messages") == 1
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "talk.json").is_file()
    assert (tmp_path / "notes.txt").read_text() == "precious"


def test_what_is_no_ordinary_file_takes_no_conversation_and_gives_none(chat, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, words, kind in (("pipe", "is no ordinary file", "a pipe"), ("folder", "is a directory", "a directory")):
        for command in ("/save", "/save!"):
            code, _, err = chat(f"{command} {tmp_path / name}\n")
            assert code == 1 and err.startswith(f"error: {tmp_path / name} {words}: expected the name of a file")
        code, _, err = chat(f"/load {tmp_path / name}\n")
        assert code == 1 and err.startswith(f"error: {tmp_path / name} cannot be read: it is {kind}, expected")
    assert "/dev/zero cannot be read: it is" in chat("/load /dev/zero\n")[2]


USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
GOOD_FILE = {
    "format": "edgellm conversation 1",
    "model": "x",
    "system": None,
    "messages": [USER, ASSISTANT],
    "settings": {},
}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100000, "is not valid JSON"),
        ([], "no conversation that /save wrote"),
        (GOOD_FILE | {"format": "other"}, "no conversation that /save wrote"),
        (GOOD_FILE | {"mesages": []}, "unknown key 'mesages': did you mean messages?"),
        (GOOD_FILE | {"system": 5}, "system is a int: expected text or null"),
        (GOOD_FILE | {"messages": "hi"}, "messages is a str"),
        (GOOD_FILE | {"messages": [USER]}, "has no answer"),
        (GOOD_FILE | {"messages": [ASSISTANT, USER]}, "message 1 is of assistant"),
        (GOOD_FILE | {"messages": [{"role": "robot", "content": ""}]}, "has the role 'robot'"),
        (GOOD_FILE | {"settings": []}, "settings is a list"),
        (GOOD_FILE | {"settings": {"top_q": 1}}, "unknown key 'top_q': did you mean top_p?"),
        (GOOD_FILE | {"settings": {"top_p": 5}}, "top_p is 5: expected"),
    ],
)
def test_files_that_are_no_conversation_change_nothing(chat, chat_engines, tmp_path, content, message):
    path = tmp_path / "bad.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    code, out, err = chat(f"hello\n/load {path}\nand?\n", "--max-tokens", 4)
    assert message in err and str(path) in err
    assert (code, out) == (1, answers(conversation(chat_engines, ["hello", "and?"], max_tokens=4)))


def test_stats(chat, chat_engines):
    code, _, err = chat(
        "/stats\nhello\nwhy?\n/stats\n", "--max-tokens", 6, "--temperature", 0.8, "--seed", 3, "--stats"
    )
    assert code == 0
    assert "no answer yet" in err
    with LLM(chat_engines, backend="numpy") as llm:
        first = llm.tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    short = re.findall(r"^\[6 tokens, [\d.]+ tokens/s \| context (\d+)/(\d+) \| ended by length\]$", err, re.MULTILINE)
    assert [int(length) for _, length in short] == [CONTEXT, CONTEXT]
    assert int(short[0][0]) == len(first) + 6
    prompt, reused, computed = map(
        int,
        re.search(r"^prompt: (\d+) tokens \((\d+) reused\), (\d+) computed in [\d.]+ s, ", err, re.MULTILINE).groups(),
    )
    assert (prompt + 6, reused + computed) == (int(short[1][0]), prompt) and reused >= len(first)
    assert re.search(r"^prompt: .*, first token after [\d.]+ s$", err, re.MULTILINE)
    assert "seed 3" in err and "session: 2 answers, 12 tokens" in err
    assert "robot (qwen3), numpy backend" in err


def test_sampling_defaults_come_from_the_model(chat, chat_engines, tmp_path):
    """Where generation_config.json asks for sampling; a settings file and the command line go before it."""
    model = tmp_path / "sampling"
    checkpoint = chat_engines.parent / "checkpoint"
    copied = tmp_path / "checkpoint"
    copied.mkdir()
    for file in checkpoint.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    published = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (copied / "generation_config.json").write_text(json.dumps(published))
    build_engine_directory(copied, model, EngineLimits(max_batch=1, prefill_chunk=16, kv_capacity=64), [])
    (tmp_path / "settings.yaml").write_text("sampling: {top_k: 30, top_p: 0.9}\n")
    _, _, err = chat("/set\n", "--config", tmp_path / "settings.yaml", "--top-p", 0.8, model=model)
    assert {"temperature 0.6", "top_k 30", "top_p 0.8", "min_p 0"} <= set(err.splitlines())
    assert "temperature 0" in chat("/set\n")[2].splitlines()


def test_a_full_context_is_said_and_the_chat_goes_on(chat, chat_engines):
    more = "more\n" * 2  # at least 25 tokens each
    code, out, err = chat(f"{'x' * 540}\n{more}/reset\n/set max_tokens 4\nhello\n")
    cut = f"The context is full ({CONTEXT} tokens), the answer was cut: /set max_tokens N keeps room for N."
    left = f"The oldest question and its answer left the conversation, to make room in the context ({CONTEXT} tokens)."
    lines = err.splitlines()
    assert lines[0] == cut
    assert left in lines and "error" not in err
    assert lines[-2:] == ["The conversation is forgotten.", "max_tokens 4"]
    assert code == 0
    assert out.endswith(answers(conversation(chat_engines, ["hello"], max_tokens=4)))


def test_a_chat_goes_on_for_ever(chat, chat_engines):
    asked = [f"{number} {'x' * 80}" for number in range(30)]
    code, out, err = chat("\n".join(asked) + "\n/stats\n", "--max-tokens", 4, "--system", "Be kind.")
    assert code == 0
    with LLM(chat_engines, backend="numpy") as llm:
        session = llm.create_session("Be kind.", SamplingParams(max_tokens=4))
        responses = [session.send(question) for question in asked]
    assert out == "".join(f"{response.text}\n" for response in responses)
    dropped = [response.dropped_turns for response in responses if response.dropped_turns]
    assert [int(count) for count in re.findall(r"The oldest (\d+) questions and their answers left", err)] == dropped
    assert sum(dropped) >= 20
    assert "session: 30 answers" in err


def test_a_context_that_is_nearly_full_is_noted(chat):
    err = chat(f"{'x' * 490}\n", "--max-tokens", 60, "--stats")[2]
    statistics, note = err.splitlines()
    used = int(re.search(rf"context (\d+)/{CONTEXT}", statistics)[1])
    assert used > 0.9 * CONTEXT
    fills = f"fills {used} of the {CONTEXT} tokens of the context"
    assert note == f"Note: the conversation {fills}: its oldest turns leave soon."
    assert chat("hello\n", "--max-tokens", 60)[2] == ""


def test_a_question_is_taken_back(chat, chat_engines):
    lines = "hello\nwhy?\n/undo\nhow?\n/undo\n/undo\n/undo\n"
    code, out, err = chat(lines, "--max-tokens", 4)
    first = conversation(chat_engines, ["hello", "why?"], max_tokens=4)
    second = conversation(chat_engines, ["hello", "how?"], max_tokens=4)
    assert (code, out) == (1, answers(first) + answers(second[2:]))
    taken_back = ["Taken back: why?", "Taken back: how?", "Taken back: hello"]
    assert err.splitlines() == [*taken_back, "error: nothing was said yet: there is no turn to take back"]


def test_a_question_is_answered_again(chat, chat_engines):
    code, out, err = chat("/retry\nhello\n/retry\nwhy?\n", "--max-tokens", 4)
    messages = conversation(chat_engines, ["hello", "why?"], max_tokens=4)
    assert (code, out) == (1, answers(messages[:2]) + answers(messages))
    assert err.splitlines() == [
        "error: nothing was asked yet: there is no answer to give again",
        "Answers are not drawn, so the same one comes again: /set temperature 0.7 draws others.",
    ]


def test_a_question_is_answered_again_with_another_seed(chat, tmp_path):
    path = tmp_path / "talk.json"
    sampling = ("--max-tokens", 12, "--temperature", 1.2, "--seed", 5)
    lines = f"/set ignore_eos true\nhello\n/retry\n/retry\n/stats\n/save {path}\n/set seed\n"
    code, out, err = chat(lines, *sampling)
    assert code == 0
    messages = json.loads(path.read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert out.endswith(messages[1]["content"] + "\n")
    first = chat("/set ignore_eos true\nhello\n", *sampling)[1]
    assert out.startswith(first) and not out.endswith(first)
    assert re.search(r"^ *drawn: with seed \d\d+$", err, re.MULTILINE)
    assert err.splitlines()[-1] == "seed 5"  # the setting stays


def test_the_last_questions_are_kept(chat, chat_engines):
    lines = f"one\ntwo\nthree\n/trim 1\nfour\n/trim 7\n/trim\n/trim x\n/trim 1{'0' * 5000}\n"
    code, out, err = chat(lines, "--max-tokens", 4)
    everything = conversation(chat_engines, ["one", "two", "three"], max_tokens=4)
    with LLM(chat_engines, backend="numpy") as llm:
        fourth = llm.chat([*everything[4:], {"role": "user", "content": "four"}], SamplingParams(max_tokens=4)).text
    assert (code, out) == (1, answers(everything) + fourth + "\n")
    assert err.splitlines() == [
        "2 questions and their answers left the conversation.",
        "0 questions and their answers left the conversation.",
        "error: /trim takes how many questions to keep, not '': /trim N",
        "error: /trim takes how many questions to keep, not 'x': /trim N",
        "error: /trim takes how many questions to keep, not '10000000000000000000': /trim N",
    ]


def test_a_question_longer_than_the_context(chat, chat_engines):
    code, out, err = chat(f"{'x' * 700}\nhello\n", "--max-tokens", 4)
    assert "error: the prompt has" in err and f"the context {CONTEXT}" in err
    assert (code, out) == (1, answers(conversation(chat_engines, ["hello"], max_tokens=4)))


def test_invalid_utf8_is_named_by_its_offset(chat):
    code, _, err = chat(b"hello\nab\xe4c\n", "--max-tokens", 2)
    assert code == 1
    assert err == "error: standard input is not UTF-8 text: invalid byte 0xe4 at byte offset 8\n"


def test_reading_of_messages():
    def messages(text: str) -> list[str]:
        lines, found = PipedLines(io.BytesIO(text.encode())), []
        while True:
            try:
                found.append(read_message(lines))
            except EOFError:
                return found

    assert messages("\ufeffa\r\nb\n") == ["a", "b"]
    assert messages('"""a\nb"""\nc') == ["a\nb", "c"]
    assert messages('  """\n  a\n"""  \n') == ["  a"]
    assert messages("a\\\n\\\nb\\") == ["a\n\nb"]
    assert messages('"""never closed\nx') == ["never closed\nx"]
    assert messages('""""""\nx') == ["", "x"]
    with pytest.raises(RequestError, match="offset 2"):
        read_message(PipedLines(io.BytesIO(b"ab\xff")))


@pytest.mark.parametrize(
    ("message", "path"),
    [
        ("/tmp/not there/x.png", "/tmp/not there/x.png"),
        ("/nowhere/x.png what is it?", "/nowhere/x.png"),
        ("'/nowhere/my cup.jpg' what is it?", "/nowhere/my cup.jpg"),
        ("/nowhere/my\\ cup.jpg", "/nowhere/my cup.jpg"),
        ("./x.webp", "./x.webp"),
    ],
)
def test_an_image_that_is_not_there_is_named(chat, message, path):
    code, out, err = chat(f"{message}\n", "--max-tokens", 4)
    assert (code, out, err) == (1, "", f"error: there is no file {path}\n")


def test_what_only_looks_like_a_path_is_a_message(chat, chat_engines):
    questions = ["./configure fails", "where is x.png?", "~/.bashrc is empty"]
    code, out, err = chat("\n".join(questions), "--max-tokens", 4)
    assert (code, out, err) == (0, answers(conversation(chat_engines, questions, max_tokens=4)), "")
    assert "/nope is no command" in chat("/nope\n")[2]


@pytest.mark.parametrize("end", ["", "/exit\n"])
def test_errors_of_piped_lines_are_told_by_the_exit_code_however_it_ends(chat, end):
    assert chat(f"/nonsense\n{end}")[0] == 1
    assert chat(f"/help\n{end}")[0] == 0
