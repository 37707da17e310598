"""The pictures of README and the pages: drawn again from the same runs, and from a new one."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from tools.docs.draw_chat import COLUMNS, PROMPT, QUESTIONS, conversation, drawn
from tools.docs.draw_speeds import bars, figures


def texts(picture: str) -> list[str]:
    """The texts of an SVG, in order."""
    root = ElementTree.fromstring(picture)
    return ["".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]


def test_the_chart_of_speeds_is_that_of_the_result_files(repository: Path) -> None:
    shown = texts((repository / "docs" / "pages" / "pictures" / "speeds.svg").read_text(encoding="utf-8"))
    expected = bars(*figures())
    assert [bar.label for bar in expected] == shown[-2 * len(expected) :: 2]
    assert [f"{bar.speed:,.0f} ({bar.note})" for bar in expected] == shown[-2 * len(expected) + 1 :: 2]
    assert any("simulated" in line for line in shown)


def test_a_chat_is_drawn_as_its_terminal_shows_it() -> None:
    lines = [">>> Is 1 < 2?", "Yes & no.", "", " ".join(["word"] * 40)]
    title, *rows = texts(drawn("\n".join(lines), "a chat"))
    assert title == "a chat"
    assert rows[:3] == lines[:3]
    assert " ".join(rows[3:]) == lines[3]
    assert all(len(row) <= COLUMNS for row in rows)


def test_the_picture_of_a_chat_shows_what_the_model_answers(repository: Path) -> None:
    shown = conversation(QUESTIONS[:2], ["--no-stats"]).splitlines()
    picture = texts((repository / "docs" / "pages" / "pictures" / "chat.svg").read_text(encoding="utf-8"))
    first = shown.index(f"{PROMPT}{QUESTIONS[0]}")
    assert [line for line in shown[first:] if line not in picture] == []
