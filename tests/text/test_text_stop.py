"""Stop strings, stop ids, limits: when an answer ends, and what of it is shown when."""

from __future__ import annotations

import random

import pytest

from edgellm.text.output import OutputText, StopStrings

EOS = 0


class Letters:
    """A detokenizer whose token ids are code points; id 1 is the first half of a character that id 2 completes."""

    def __init__(self) -> None:
        self.half = False

    def push(self, token_id: int) -> str:
        if token_id == 1:
            self.half = True
            return ""
        self.half = False
        return "é" if token_id == 2 else chr(token_id)

    def finish(self) -> str:
        return "\ufffd" if self.half else ""


def fed(answer: OutputText, text: str) -> list[str]:
    """Push the letters of `text` until the answer ends; return what each push showed."""
    shown = []
    for letter in text:
        shown.append(answer.push(ord(letter)))
        if answer.finish_reason:
            break
    return shown


def expected_cut(text: str, strings: list[str]) -> tuple[str, str | None]:
    """The rule, read letter by letter: the first place where any string is complete, the longest one there."""
    for end in range(1, len(text) + 1):
        complete = [string for string in strings if text[:end].endswith(string)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_any_cutting_of_the_text_gives_the_same_end():
    generator = random.Random(4)
    ended = 0
    for _ in range(3000):
        text = "".join(generator.choice("ab\n") for _ in range(generator.randrange(1, 25)))
        strings = [
            "".join(generator.choice("ab\n") for _ in range(generator.randrange(1, 6)))
            for _ in range(generator.randrange(0, 4))
        ]
        matcher, shown, match, rest = StopStrings(strings), "", None, text
        while rest and match is None:
            size = generator.randrange(1, 8)
            piece, match = matcher.push(rest[:size])
            shown, rest = shown + piece, rest[size:]
        if match is None:
            shown += matcher.release()
        ended += match is not None
        assert (shown, match) == expected_cut(text, strings)
    assert 500 < ended < 2500


def test_nothing_of_a_stop_string_is_ever_shown_and_nothing_else_is_held_back():
    generator = random.Random(5)
    for _ in range(500):
        strings = ["abab", "bb\n"]
        text = "".join(generator.choice("ab\n") for _ in range(30))
        cut, match = expected_cut(text, strings)
        matcher, shown = StopStrings(strings), ""
        for count, letter in enumerate(text, 1):
            piece, found = matcher.push(letter)
            shown += piece
            assert cut.startswith(shown)
            if found:
                break
            could_begin = max(k for k in range(4) for s in strings if k < len(s) and text[:count].endswith(s[:k]))
            assert len(shown) == count - could_begin
        assert (shown == cut) or match is None


def test_end_of_sequence_has_no_text_and_releases_what_is_held():
    answer = OutputText(Letters(), stop_strings=["ab!"], eos_token_ids=[EOS])
    fed(answer, "xab")
    assert answer.text == "x"
    assert answer.push(EOS) == "ab"
    assert (answer.finish_reason, answer.text, answer.stop_match) == ("stop", "xab", None)
    assert answer.token_ids == (ord("x"), ord("a"), ord("b"), EOS)


def test_stop_id_is_reported():
    answer = OutputText(Letters(), stop_token_ids=[ord("z")], eos_token_ids=[EOS])
    assert "".join(fed(answer, "xyzw")) == "xy"
    assert (answer.finish_reason, answer.stop_match) == ("stop", ord("z"))


def test_max_tokens():
    answer = OutputText(Letters(), stop_strings=["cd"], max_tokens=3)
    assert fed(answer, "abcd") == ["a", "b", "c"]
    assert (answer.finish_reason, answer.text) == ("length", "abc")


@pytest.mark.parametrize(("last", "reason"), [(EOS, "stop"), (ord("c"), "stop_string"), (ord("d"), "length")])
def test_a_better_reason_wins_at_the_last_token(last, reason):
    answer = OutputText(Letters(), stop_strings=["c"], eos_token_ids=[EOS], max_tokens=2)
    answer.push(ord("a"))
    answer.push(last)
    assert answer.finish_reason == reason


def test_half_a_character_is_replaced_only_at_the_end():
    answer = OutputText(Letters(), eos_token_ids=[EOS])
    assert [answer.push(1), answer.push(2), answer.push(1)] == ["", "é", ""]
    assert answer.push(EOS) == "\ufffd"
    assert answer.text == "é\ufffd"


@pytest.mark.parametrize("reason", ["context", "cancelled"])
def test_the_loop_can_end_the_answer(reason):
    answer = OutputText(Letters(), stop_strings=["ab!"])
    fed(answer, "xab")
    assert answer.finish(reason) == "ab"
    assert (answer.finish_reason, answer.text) == (reason, "xab")
    assert answer.finish("cancelled") == ""
    assert answer.finish_reason == reason


def test_no_stop_string_ends_in_the_text_of_the_first_tokens():
    """One that begins there counts where it ends later, one that lies there does not, also when it is held back."""
    cases = [("ab", "ababxab", "ababx"), ("aa", "aaaaab", "aaa"), ("ab", "xxxxab", "xxxx")]
    for stop, text, shown in cases:
        answer = OutputText(Letters(), [stop], min_tokens=4)
        assert "".join(fed(answer, text)) == answer.text == shown and answer.stop_match == stop
    answer = OutputText(Letters(), ["bc", "abcd"], min_tokens=3)
    assert "".join(fed(answer, "abcx")) + answer.finish("length") == "abcx"
