"""`edgellm chat` and `edgellm generate` with images, on a tiny model with random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Edgellm
from PIL import Image
from synthetic_images import synthetic_image
from tiny_multimodal import FAMILIES

from edgellm.commands.images import dropped_files
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import EngineLimits
from edgellm.llm import LLM
from edgellm.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def engines(multimodal_engines: Callable[[str], Path]) -> Path:
    return multimodal_engines("qwen2_5_vl")


@pytest.fixture
def cup(tmp_path: Path) -> Path:
    """An image whose path has to be quoted."""
    path = tmp_path / "my cup's (1).png"
    Image.fromarray(synthetic_image(24, 20)).save(path)
    return path


@pytest.fixture
def ball(tmp_path: Path) -> Path:
    path = tmp_path / "ball.JPG"
    Image.fromarray(synthetic_image(15, 37)[:, ::-1].copy()).save(path, "JPEG")
    return path


@pytest.fixture
def edgellm(edgellm: Edgellm) -> Edgellm:
    """On NumPy, with answers of eight tokens; `lines` come on standard input."""
    return lambda *arguments, lines="": edgellm(*arguments, "--backend", "numpy", "--max-tokens", 8, stdin=lines)


def expected(engines: Path, *questions: tuple[list[Path], str]) -> str:
    """What the API answers to questions with images, one line each."""
    messages, out = [], ""
    with LLM(engines, backend="numpy") as llm:
        for images, text in questions:
            parts = [{"type": "image", "image": image} for image in images]
            messages.append({"role": "user", "content": [*parts, {"type": "text", "text": text}] if parts else text})
            answer = llm.chat(messages, SamplingParams(max_tokens=8)).text
            messages.append({"role": "assistant", "content": answer})
            out += answer + "\n"
    return out


def test_generate_shows_images(edgellm: Edgellm, engines: Path, cup: Path, ball: Path) -> None:
    code, out, err = edgellm("generate", "What is it?", "-m", engines, "--image", cup, "--image", ball)
    assert (code, out, err) == (0, expected(engines, ([cup, ball], "What is it?")), "")
    assert out != expected(engines, ([ball, cup], "What is it?"))


def test_chat_shows_images_with_the_first_question(edgellm: Edgellm, engines: Path, cup: Path, ball: Path) -> None:
    code, out, err = edgellm("chat", engines, "--image", cup, "--image", ball, lines="What are they?\nAnd now?\n")
    assert (code, out) == (0, expected(engines, ([cup, ball], "What are they?"), ([], "And now?")))
    assert err.splitlines() == [
        "The next question shows my cup's (1).png (20 x 24).",
        "The next question shows ball.JPG (37 x 15).",
    ]


def test_commands_show_images_in_several_turns(edgellm: Edgellm, engines: Path, cup: Path, ball: Path) -> None:
    lines = f'/image\n/image {cup}\n/image\n/image ""\n/image {ball}\nThis?\nAgain?\n/image "{cup}"\nAnd this?\n'
    code, out, err = edgellm("chat", engines, lines=lines)
    assert (code, out) == (0, expected(engines, ([ball], "This?"), ([], "Again?"), ([cup], "And this?")))
    assert err.splitlines() == [
        "No image waits for a question: /image FILE shows one.",
        "The next question shows my cup's (1).png (20 x 24).",
        "The next question shows my cup's (1).png (20 x 24).",
        "The next question shows no image.",
        "The next question shows ball.JPG (37 x 15).",
        "The next question shows my cup's (1).png (20 x 24).",
    ]


def test_dropped_paths_are_shown(edgellm: Edgellm, engines: Path, cup: Path, ball: Path) -> None:
    escaped = str(cup).replace(" ", "\\ ").replace("'", "\\'").replace("(", "\\(").replace(")", "\\)")
    lines = f"{ball} What is it?\n{escaped} \nIs {ball.as_uri()} like it?\n"
    code, out, err = edgellm("chat", engines, lines=lines)
    assert (code, out) == (0, expected(engines, ([ball], "What is it?"), ([cup, ball], "Is  like it?")))
    assert err.splitlines() == [
        "This question shows ball.JPG (37 x 15).",
        "The next question shows my cup's (1).png (20 x 24).",
        "This question shows ball.JPG (37 x 15).",
    ]


def test_conversations_with_images_are_saved_and_loaded(
    edgellm: Edgellm, engines: Path, cup: Path, tmp_path: Path
) -> None:
    file = tmp_path / "conversation.json"
    edgellm("chat", engines, lines=f"/image {cup}\nWhat is it?\n/save {file}\n")
    message = json.loads(file.read_text())["messages"][0]
    assert message["content"] == [{"type": "image", "path": str(cup)}, {"type": "text", "text": "What is it?"}]
    code, out, err = edgellm("chat", engines, lines=f"/load {file}\nAnd now?\n")
    both = expected(engines, ([cup], "What is it?"), ([], "And now?"))
    assert code == 0 and both.endswith(out) and out
    assert err == f"Loaded 2 messages from {file}.\n"
    cup.unlink()
    code, _, err = edgellm("chat", engines, lines=f"/load {file}\n")
    assert code == 1 and "cannot be read: No such file" in err
    code, _, err = edgellm("chat", engines, lines="/image https://robot.local/cup.png\n")
    assert code == 1 and "https:/robot.local/cup.png is a URL, and nothing is fetched here: expected the file" in err


@pytest.fixture(scope="module")
def prompted(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a system prompt of its own, and another one for images."""
    folder = tmp_path_factory.mktemp("prompted")
    checkpoint = make_checkpoint(folder / "checkpoint", 0, **FAMILIES["qwen2_5_vl"])
    (checkpoint / "system_prompt.txt").write_text("You are blind.\n")
    (checkpoint / "system_prompt_image.txt").write_text("You see.\n")
    build_engine_directory(checkpoint, folder / "engines", EngineLimits(1, 16, 256, image_rows=(64,)), [])
    return folder / "engines"


CHANGED = "The system prompt is now the model's own for images: /system shows it, /reset takes the first one."
RETURNED = "The conversation is forgotten, and the system prompt is the first one again."


def test_an_images_own_system_prompt_is_announced_and_reset_returns(
    edgellm: Edgellm, prompted: Path, cup: Path
) -> None:
    shows = "The next question shows my cup's (1).png (20 x 24)."
    lines = f"/system\n/image {cup}\n/system\n/image {cup}\n/reset\n/system\n/reset\n/image {cup}\n/system\n"
    code, _, err = edgellm("chat", prompted, lines=lines)
    assert (code, err.splitlines()) == (
        0,
        [
            *("You are blind.", shows, CHANGED, "You see.", shows, RETURNED, "You are blind."),
            *("The conversation is forgotten.", shows, CHANGED, "You see."),
        ],
    )
    _, _, err = edgellm("chat", prompted, "--image", cup, lines="/reset\n/system\n")
    assert err.splitlines() == [shows, CHANGED, RETURNED, "You are blind."]


def test_without_the_image_the_first_system_prompt_stands_again(edgellm: Edgellm, prompted: Path, cup: Path) -> None:
    _, _, err = edgellm("chat", prompted, lines=f'/image {cup}\n/image ""\n/system\n')
    assert err.splitlines()[-2:] == [
        "The next question shows no image, and the system prompt is the first one.",
        "You are blind.",
    ]
    _, _, err = edgellm("chat", prompted, lines=f'/image {cup}\nWhat?\n/image ""\n/system\n')
    assert err.splitlines()[-2:] == ["The next question shows no image.", "You see."]


def test_a_system_prompt_of_the_user_stays(edgellm: Edgellm, prompted: Path, cup: Path) -> None:
    _, _, err = edgellm("chat", prompted, "--system", "Mine.", lines=f"/image {cup}\n/reset\n/system\n")
    assert CHANGED not in err and err.splitlines()[-2:] == ["The conversation is forgotten.", "Mine."]
    _, _, err = edgellm("chat", prompted, lines=f"/image {cup}\n/system Mine.\n/reset\n/system\n")
    assert CHANGED in err and err.splitlines()[-2:] == ["The conversation is forgotten.", "Mine."]


def test_statistics_count_images(edgellm: Edgellm, engines: Path, cup: Path) -> None:
    _, _, err = edgellm("chat", engines, "--image", cup, lines="What is it?\nAnd now?\n/stats\n")
    assert "\nimages: 2 in prompts, 1 of them encoded before, 12 tokens, encoded in " in err


def test_bad_images_are_errors_and_the_chat_goes_on(edgellm: Edgellm, engines: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.png"
    bad.write_text("no image")
    code, out, err = edgellm("chat", engines, lines=f"/image {bad}\n{bad} What?\n/image {tmp_path}/none.png\nHello\n")
    assert (code, out) == (1, expected(engines, ([], "Hello")))
    assert err.count("bad.png is not an image") == 2 and "none.png cannot be read: No such file" in err
    code, out, err = edgellm("generate", "What?", "-m", engines, "--image", bad)
    assert (code, out) == (1, "") and "bad.png is not an image" in err


def test_a_text_only_model_refuses_images(edgellm: Edgellm, tiny_engines: Path, ball: Path) -> None:
    message = "has no vision model, it cannot see images: leave them out, or take a model that can"
    for arguments in (("generate", "What?", "-m", tiny_engines), ("chat", tiny_engines)):
        code, out, err = edgellm(*arguments, "--image", ball, lines="Hi\n")
        assert (code, out) == (1, "") and message in err
    code, _, err = edgellm("chat", tiny_engines, lines=f"/image {ball}\n/image\n")
    assert code == 1 and err.count(message) == 2


def test_a_text_only_model_reads_paths_as_text(edgellm: Edgellm, tiny_engines: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"")
    code, out, err = edgellm("chat", tiny_engines, "--chat-template", _short_template(tmp_path), lines=f"{path}\n")
    assert code == 0 and out
    assert err == "This model sees no images: the path of a.png is sent as text.\n"


def _short_template(folder: Path) -> Path:
    """A path has more characters than the tiny model's context has room for."""
    file = folder / "template.jinja"
    file.write_text("{{ messages[-1].content[-20:] }}")
    return file


def test_raw_prompts_have_no_place_for_images(edgellm: Edgellm, engines: Path, cup: Path) -> None:
    code, _, err = edgellm("generate", "What?", "-m", engines, "--image", cup, "--raw")
    assert code == 2 and "has no place for images" in err


def test_where_dropped_files_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("a.png", "with space.jpg", "it's.webp", 'double".png', "text.txt", "ä.png")
    for name in names:
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "folder.png").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    found = {
        f"{tmp_path}/a.png": ("", ["a.png"]),
        f"  {tmp_path}/a.png  ": ("", ["a.png"]),
        f"{tmp_path}/with space.jpg": ("", ["with space.jpg"]),
        f"'{tmp_path}/with space.jpg' what is it?": ("what is it?", ["with space.jpg"]),
        f"'{tmp_path}/it'\\''s.webp'": ("", ["it's.webp"]),
        f"{tmp_path}/it\\'s.webp and {tmp_path}/with\\ space.jpg?": None,
        f'Compare {tmp_path}/it\\\'s.webp with "{tmp_path}/with space.jpg" please': (
            "Compare  with  please",
            ["it's.webp", "with space.jpg"],
        ),
        f'"{tmp_path}/double\\".png" x': ("x", ['double".png']),
        f"file://{tmp_path}/with%20space.jpg": ("", ["with space.jpg"]),
        f"file://{tmp_path}/%C3%A4.png look": ("look", ["ä.png"]),
        "~/a.png what?": ("what?", ["a.png"]),
        "./a.png what?": ("what?", ["a.png"]),
        "look\n./a.png\nwhat?": ("look\n\nwhat?", ["a.png"]),
    }
    for message, expectation in found.items():
        text, files = dropped_files(message)
        if expectation is None:  # the second has a question mark behind it
            assert [file.name for file in files] == ["it's.webp"]
            continue
        assert (text, [file.name for file in files]) == expectation, message
    for message in (
        "a.png is a name",
        f"{tmp_path}/text.txt",
        f"{tmp_path}/missing.png",
        f"{tmp_path}/folder.png",
        f"/{tmp_path}/a.png",
        f"file://elsewhere{tmp_path}/a.png",
        f"x{tmp_path}/a.png",
        "it's /help and 'quotes",
        "/" + "x" * 5000 + ".png",
        "",
        "/set seed 5",
    ):
        assert dropped_files(message) == (message, [])
