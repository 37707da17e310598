"""What Tab completes in `edgellm chat`."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm.commands.chat_input import FILE, ChatCompletion

COMPLETION = ChatCompletion(
    {
        "save": FILE,
        "set": lambda: ("temperature", "top_k", "top_p"),
        "stats": None,
        "adapter": lambda: ("json", "pirate", "tools"),
    }
)


@pytest.mark.parametrize(
    ("line", "candidates"),
    [
        ("/s", ["/save ", "/set ", "/stats "]),
        ("/adapter", ["/adapter "]),
        ("/adapter p", ["/adapter pirate "]),
        ("/adapter  j", ["/adapter  json "]),
        ("/set to", ["/set top_k ", "/set top_p "]),
        ("/set top_k 4", []),
        ("/stats x", []),
        ("/unknown x", []),
        ("//s", []),
        ("s", []),
        ("", []),
    ],
)
def test_commands_and_words(line: str, candidates: list[str]) -> None:
    assert COMPLETION.candidates(line) == candidates


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("cup.png", "cup 'b'.JPG", "cup.txt", ".hidden.png", "cu\x1bp.png"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "cups").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_command_takes_every_file_as_its_name_stands(folder: Path) -> None:
    found = ["cup 'b'.JPG", "cup.png", "cup.txt", "cups/"]
    assert COMPLETION.candidates("/save cu") == [f"/save {name}" for name in found]
    assert COMPLETION.candidates("/save cup 'b") == ["/save cup 'b'.JPG"]
    assert COMPLETION.candidates(f"/save {folder}/cup.t") == [f"/save {folder}/cup.txt"]
    assert COMPLETION.candidates("/save ~/.h") == ["/save ~/.hidden.png"]
    assert COMPLETION.candidates("/save no/such/folder/x") == []


def test_a_message_takes_images_as_they_are_dropped(folder: Path) -> None:
    assert COMPLETION.candidates("see ./cup") == [r"see ./cup\ \'b\'.JPG ", "see ./cup.png ", "see ./cups/"]
    assert COMPLETION.candidates(r"see ~/cup\ ") == [r"see ~/cup\ \'b\'.JPG "]
    assert COMPLETION.candidates(f"{folder}/cup.p") == [f"{folder}/cup.png "]
    assert COMPLETION.candidates("see cup") == []
