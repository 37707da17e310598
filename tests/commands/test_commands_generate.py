"""`edgellm generate`, run on a real model with random weights by the NumPy backend."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgellm.commands import models
from edgellm.commands.console import write_answer
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import EngineLimits
from edgellm.generation import RequestState
from edgellm.llm import LLM
from edgellm.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("private_files")

SYSTEM = "You are Pip."
# Runs Python anew: a process started in the background may have inherited that interrupts are ignored.
HEEDING_INTERRUPTS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.fixture(scope="module")
def engines(tiny_checkpoint, tmp_path_factory) -> Path:
    """The tiny model with room for long answers and a system prompt of its own."""
    checkpoint, target = tmp_path_factory.mktemp("long") / "checkpoint", tmp_path_factory.mktemp("long") / "robot"
    checkpoint.mkdir()
    for file in tiny_checkpoint.iterdir():
        (checkpoint / file.name).write_bytes(file.read_bytes())
    config = json.loads((checkpoint / "config.json").read_text()) | {"max_position_embeddings": 8192}
    (checkpoint / "config.json").write_text(json.dumps(config))
    (checkpoint / "system_prompt.txt").write_text(SYSTEM + "\n")
    build_engine_directory(checkpoint, target, EngineLimits(max_batch=1, prefill_chunk=16, kv_capacity=8000), [])
    return target


@pytest.fixture(scope="module")
def llm(engines):
    with LLM(engines, backend="numpy") as opened:
        yield opened


def chat_of(text: str, system: str | None = SYSTEM) -> list[dict[str, str]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]


def greedy(llm, messages, tokens: int = 12) -> str:
    return llm.chat(messages, SamplingParams(max_tokens=tokens)).text


def test_answers_as_a_chat_turn_with_the_models_own_system_prompt(edgellm, engines, llm):
    code, out, err = edgellm("generate", "hello", "--model", engines, "--max-tokens", 12)
    assert (code, err) == (0, "")
    assert out == greedy(llm, chat_of("hello")) + "\n"
    assert greedy(llm, chat_of("hello")) == greedy(llm, chat_of("hello", None)) != greedy(llm, chat_of("hello", ""))


@pytest.mark.parametrize("system", ["Be brief.", ""])
def test_system_prompt_of_the_command_line(edgellm, engines, llm, system, tmp_path):
    options = ("--model", engines, "--max-tokens", 12)
    assert edgellm("generate", "hello", "--system", system, *options)[1] == greedy(llm, chat_of("hello", system)) + "\n"
    (tmp_path / "system.txt").write_text(system + "\n")
    out = edgellm("generate", "hello", "--system-file", tmp_path / "system.txt", *options)[1]
    assert out == greedy(llm, chat_of("hello", system)) + "\n"


def test_raw_prompt(edgellm, engines, llm):
    code, out, _ = edgellm("generate", "--raw", "once", "--model", engines, "--max-tokens", 12)
    assert (code, out) == (0, llm.generate("once", SamplingParams(max_tokens=12)).text + "\n")


def test_an_answer_has_the_fewest_tokens_that_are_asked_for(edgellm):
    """The shipped model would end it earlier."""
    for least, reason in (((), "stop"), (("--min-tokens", 30), "length")):
        code, out, _ = edgellm("generate", "Where is the red cup?", "--json", "--max-tokens", 30, *least)
        answer = json.loads(out)
        assert code == 0 and answer["finish_reason"] == reason and (len(answer["token_ids"]) < 30) == (not least)


@pytest.mark.parametrize("how", ["file", "pipe", "dash"])
def test_prompt_from_file_and_standard_input(edgellm, engines, llm, how, tmp_path):
    text = "zwei Zeilen,\nüber 你好"
    (tmp_path / "prompt.txt").write_text(text + "\n", encoding="utf-8")
    arguments = {"file": ["--file", tmp_path / "prompt.txt"], "pipe": [], "dash": ["-"]}[how]
    stdin = b"" if how == "file" else f"{text}\n".encode()
    code, out, _ = edgellm("generate", *arguments, "--model", engines, "--max-tokens", 12, stdin=stdin)
    assert (code, out) == (0, greedy(llm, chat_of(text)) + "\n")


def test_json_object(edgellm, engines, llm):
    options = (
        "--model",
        engines,
        "--max-tokens",
        9,
        "--temperature",
        0.9,
        "--top-k",
        50,
        "--seed",
        7,
        "--backend",
        "numpy",
    )
    code, out, _ = edgellm("generate", "hello", "--json", *options)
    answer = json.loads(out)
    params = SamplingParams(temperature=0.9, top_k=50, seed=7, max_tokens=9)
    response = llm.chat(chat_of("hello"), params)
    assert code == 0
    assert (answer["text"], answer["token_ids"]) == (response.text, list(response.token_ids))
    assert (answer["finish_reason"], answer["seed"], answer["backend"]) == ("length", 7, "numpy")
    assert answer["usage"] == {
        "prompt_tokens": len(llm.tokenizer.encode_chat(chat_of("hello"))),
        "reused_tokens": 0,
        "completion_tokens": 9,
        "context_left": response.usage.context_left,
    }
    timings = answer["timings"]
    assert "step_gaps" not in timings  # one for each step
    assert 0 < timings["prefill_seconds"] <= timings["time_to_first_token"] < timings["total_seconds"]
    assert timings["tokens_per_second"] == pytest.approx(8 / timings["decode_seconds"])


def test_a_drawn_seed_is_reported_and_repeats_the_answer(edgellm, engines):
    options = ("generate", "hello", "--json", "--model", engines, "--max-tokens", 9, "--temperature", 1.0)
    first, second = (json.loads(edgellm(*options)[1]) for _ in range(2))
    assert first["seed"] != second["seed"]
    again = json.loads(edgellm(*options, "--seed", first["seed"])[1])
    assert again["token_ids"] == first["token_ids"] != second["token_ids"]
    assert json.loads(edgellm("generate", "hello", "--json", "--model", engines, "--max-tokens", 2)[1])["seed"] is None


def test_stop_strings(edgellm, engines, llm):
    whole = greedy(llm, chat_of("hello"), 40)
    stop = whole[len(whole) // 2 :][:2]
    options = ("--model", engines, "--max-tokens", 40, "--json")
    answer = json.loads(edgellm("generate", "hello", "--stop", stop, "--stop", "never said", *options)[1])
    assert (answer["finish_reason"], answer["stop_match"]) == ("stop_string", stop)
    assert answer["text"] == whole[: whole.index(stop)]


def test_settings_file_is_below_the_command_line(edgellm, engines, llm, tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text(f"model: {engines}\nsystem: Be brief.\nsampling: {{max_tokens: 5}}\n")
    assert edgellm("generate", "hello", "--config", path)[1] == greedy(llm, chat_of("hello", "Be brief."), 5) + "\n"
    code, out, _ = edgellm("generate", "hello", "--config", path, "--max-tokens", 7, "--system", "Now.")
    assert (code, out) == (0, greedy(llm, chat_of("hello", "Now."), 7) + "\n")


def test_chat_template_of_the_command_line(edgellm, engines, llm, tmp_path):
    path = tmp_path / "plain.jinja"
    path.write_text("{{ messages[-1].content }}=")
    code, out, _ = edgellm("generate", "1+1", "--chat-template", path, "--model", engines, "--max-tokens", 12)
    assert (code, out) == (0, llm.generate("1+1=", SamplingParams(max_tokens=12)).text + "\n")


@pytest.mark.parametrize(
    ("option", "value", "range_"),
    [
        ("--temperature", "-1", "a number from 0 to 100"),
        ("--top-p", "0", "above 0 and up to 1"),
        ("--top-k", "-2", "from -1 to 2147483647"),
        ("--min-p", "2", "a number from 0 to 1"),
        ("--seed", "18446744073709551616", "to 18446744073709551615"),
        ("--max-tokens", "0", "from 1 to 2147483647"),
        ("--repetition-penalty", "0", "above 0 and up to 100"),
        ("--presence-penalty", "9", "from -2 to 2"),
        ("--frequency-penalty", "-9", "from -2 to 2"),
        ("--stop", "", "empty string"),
        ("--backend", "cuda", "expected one of auto, numpy, tensorrt"),
    ],
)
def test_numbers_out_of_range_name_option_and_range(edgellm, option, value, range_):
    code, out, err = edgellm("generate", "hello", option, value)
    assert (code, out) == (2, "")
    assert option in err
    assert range_ in " ".join(err.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hello", "--raw", "--system", "x"], "--raw"),
        (["hello", "--file", "x"], "--file"),
        (["hello", "--system", "a", "--system-file", "b"], "--system"),
        (["hello", "world"], "world"),
        (["--frobnicate"], "--frobnicate"),
    ],
)
def test_wrong_usage(edgellm, arguments, message):
    code, _, err = edgellm("generate", *arguments)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (["x", "--backend", "numpy", "--executor", "tensorrt"], b"", "the executor tensorrt runs steps on a GPU"),
        ([""], b"", "the prompt is empty"),
        (["  \n"], b"", "the prompt is empty"),
        ([], b"", "standard input is empty"),
        (["-"], b"abc\xff\xfe", "standard input is not UTF-8 text: invalid byte 0xff at byte offset 3"),
        (["bad \udcff byte"], b"", "the prompt is not UTF-8 text: invalid byte 0xff at byte offset 4"),
        (["--file", "/no/such/file"], b"", "--file /no/such/file cannot be read: No such file"),
        (["hello", "--system-file", "/no/such/file"], b"", "--system-file /no/such/file cannot be read"),
        (["hello", "--config", "/no/such/file"], b"", "settings file /no/such/file cannot be read"),
        (["hello", "--chat-template", "/no/such/file"], b"", "chat template /no/such/file cannot be read"),
        (["hello", "--model", "/no/such/directory"], b"", "/no/such/directory does not exist"),
        (["x" * 9000], b"", "context 8000"),
    ],
)
def test_errors_are_one_line_on_standard_error(edgellm, engines, arguments, stdin, message):
    model = [] if "--model" in arguments else ["--model", engines]
    code, out, err = edgellm("generate", *arguments, *model, stdin=stdin)
    assert (code, out) == (1, "")
    assert err.startswith("error: ") and message in err
    assert len(err.splitlines()) == 1


def test_debug_shows_where_an_error_comes_from(engines, monkeypatch):
    monkeypatch.setenv("EDGELLM_DEBUG", "")
    command = [sys.executable, "-m", "edgellm", "generate", "", "--debug"]
    finished = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
    assert finished.returncode == 1
    assert "Traceback" in finished.stderr and "RequestError: the prompt is empty" in finished.stderr


def start(engines) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-c", HEEDING_INTERRUPTS, "-m", "edgellm"]
    command = [*program, "generate", "hello", "--model", str(engines)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/")


def test_text_streams_and_an_interrupt_ends_it(engines):
    """From another folder: the first text is there long before the answer would be finished."""
    process = start(engines)
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, b"")
    assert rest.endswith(b"\n")


def test_an_interrupted_answer_is_still_an_object(edgellm, engines, monkeypatch):
    deliver = RequestState.deliver

    def deliver_first(state, chunk):
        monkeypatch.setattr(RequestState, "deliver", deliver)
        deliver(state, chunk)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(RequestState, "deliver", deliver_first)
    code, out, err = edgellm("generate", "hello", "--model", engines, "--json")
    assert (code, err) == (130, "")
    answer = json.loads(out)
    assert answer["finish_reason"] == "cancelled"
    assert 1 <= answer["usage"]["completion_tokens"] == len(answer["token_ids"]) < 7000


def test_a_terminal_without_prompt_is_wrong_usage():
    master, child = pty.openpty()
    command = [sys.executable, "-m", "edgellm", "generate"]
    finished = subprocess.run(command, stdin=child, capture_output=True, text=True, check=False)
    os.close(child)
    os.close(master)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert "missing" in finished.stderr and "PROMPT" in finished.stderr


def test_a_terminal_gets_no_control_characters(monkeypatch):
    master, child = pty.openpty()
    with os.fdopen(child, "w", encoding="utf-8") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        write_answer("a\x1b[31mb\tc\x9bd\x07 é\n")
        shown = os.read(master, 100).decode()
    os.close(master)
    assert shown == "a\ufffd[31mb\tc\ufffdd\ufffd é\r\n"


def test_a_broken_pipe_is_quiet(engines):
    process = start(engines)
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=20) == 141


def test_top_level_knows_its_commands(edgellm):
    code, out, _ = edgellm("--help")
    assert code == 0
    assert all(name in out for name in ("chat", "generate", "build", "info", "doctor"))
    assert edgellm("--version")[1].startswith("edgellm 0.")
    assert edgellm("genrate")[0] == 2


@pytest.mark.parametrize(
    ("asked", "modules"),
    [
        ("create_app()", {"app", "console"}),
        ("load_command('generate')", {"app", "console", "descriptions", "generate", "images", "models", "settings"}),
    ],
)
def test_only_the_command_asked_for_is_imported(asked, modules):
    program = (
        f"import sys, edgellm.commands.app as app; app.{asked}; "
        "print([m for m in sys.modules if m.startswith('edgellm.commands.') or m in ('numpy', 'tokenizers', 'rich')])"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    loaded = {name.rpartition(".")[2] for name in eval(out)}
    assert loaded == modules | {"table", "options"}


PIPES = {
    "a pipe": ("printf 'one\\ntwo\\n' |", "", "one\ntwo"),
    "nothing": ("", "< /dev/null", ""),
    "a closed one": ("", "<&-", ""),
}


@pytest.mark.parametrize(
    "how",
    ["a pipe", pytest.param("nothing", marks=pytest.mark.slow), pytest.param("a closed one", marks=pytest.mark.slow)],
)
def test_what_is_piped_in_follows_the_prompt(engines, llm, tmp_path, how):
    before, after, text = PIPES[how]
    command = f"{sys.executable} -m edgellm generate Summarize: --model {engines} --backend numpy --max-tokens 12"
    line = f"{before} {command} {after}"
    finished = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    asked = f"Summarize:\n\n{text}" if text else "Summarize:"
    assert (finished.returncode, finished.stderr) == (0, "")
    assert finished.stdout == greedy(llm, chat_of(asked)) + "\n"


def test_a_pipe_that_nothing_comes_from_is_said(engines):
    command = [sys.executable, "-m", "edgellm", "generate", "hi", "-m", str(engines), "--max-tokens", "2"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr.readline().startswith("Waiting for the end of standard input")
    out, err = process.communicate("", timeout=60)
    assert (process.returncode, err) == (0, "") and out


def test_loading_shows_on_a_terminal(edgellm, engines, monkeypatch):
    """The percentage, taken away before the answer; nothing where standard error is no terminal."""
    program = (
        "import sys, edgellm.commands.models as opening; opening.PROGRESS_AFTER_SECONDS = -1; "
        f"sys.argv[1:] = ['generate', 'hi', '-m', {str(engines)!r}, '--backend', 'numpy', '--max-tokens', '2']; "
        "from edgellm.__main__ import main; main()"
    )
    terminal, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=child
    )
    os.close(child)
    process.communicate(timeout=60)
    shown = os.read(terminal, 65536).decode()
    os.close(terminal)
    assert "loading the model: 100 %" in shown and shown.endswith("\r\x1b[K")
    monkeypatch.setattr(models, "PROGRESS_AFTER_SECONDS", -1)
    code, _, err = edgellm("generate", "hi", "-m", engines, "--backend", "numpy", "--max-tokens", 2)
    assert (code, err) == (0, "")
