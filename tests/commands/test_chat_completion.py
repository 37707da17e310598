"""What Tab completes in `edgellm chat`."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm.commands.chat_commands import FILE
from edgellm.commands.chat_input import candidates

ARGUMENTS = {
    "save": FILE,
    "set": lambda: ("temperature", "top_k", "top_p"),
    "stats": None,
    "adapter": lambda: ("json", "pirate", "tools"),
}


@pytest.mark.parametrize(
    ("line", "expected"),
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
def test_commands_and_words(line: str, expected: list[str]) -> None:
    assert candidates(ARGUMENTS, line) == expected


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
    assert candidates(ARGUMENTS, "/save cu") == [f"/save {name}" for name in found]
    assert candidates(ARGUMENTS, "/save cup 'b") == ["/save cup 'b'.JPG"]
    assert candidates(ARGUMENTS, f"/save {folder}/cup.t") == [f"/save {folder}/cup.txt"]
    assert candidates(ARGUMENTS, "/save ~/.h") == ["/save ~/.hidden.png"]
    assert candidates(ARGUMENTS, "/save no/such/folder/x") == []


def test_a_message_takes_images_as_they_are_dropped(folder: Path) -> None:
    assert candidates(ARGUMENTS, "see ./cup") == [r"see ./cup\ \'b\'.JPG ", "see ./cup.png ", "see ./cups/"]
    assert candidates(ARGUMENTS, r"see ~/cup\ ") == [r"see ~/cup\ \'b\'.JPG "]
    assert candidates(ARGUMENTS, f"{folder}/cup.p") == [f"{folder}/cup.png "]
    assert candidates(ARGUMENTS, "see cup") == []
