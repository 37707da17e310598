"""Files of limited size: ordinary ones, and pipes where a user names them."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from edgellm.engines.formats import small_files
from edgellm.engines.formats.small_files import check_ordinary, read_file, read_text, size_limit
from edgellm.errors import EdgeLLMError, RequestError
from edgellm.kernels.errors import LONGEST_MESSAGE
from edgellm.kernels.user_paths import printable


def test_a_file_and_a_link_to_one_are_read_up_to_the_limit(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"12345")
    link.symlink_to(path)
    assert read_file(path, 5, RequestError) == read_file(link, 5, RequestError, takes_pipes=True) == b"12345"
    for reader in (lambda: read_file(link, 4, RequestError), lambda: check_ordinary(link, 4, RequestError)):
        with pytest.raises(RequestError, match="link cannot be read: it has 5 bytes, more than the 4 bytes"):
            reader()


@pytest.mark.parametrize("takes_pipes", [False, True])
def test_what_is_no_file_is_named(tmp_path: Path, takes_pipes: bool) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path, message in (
        (tmp_path, "it is a directory, expected an ordinary file"),
        (tmp_path / "missing", "No such file"),
        (loop, "symbolic links"),
        (tmp_path / "a\0b", r"a\\x00b cannot be read: (stat: )?embedded null"),  # Python 3.13 names the call
        (tmp_path / ("a" * 300), "File name too long"),
    ):
        with pytest.raises(RequestError, match=message):
            read_file(path, 10, RequestError, "the file", takes_pipes=takes_pipes)


def test_a_pipe_is_read_where_a_user_may_name_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(RequestError, match="it is a pipe, expected an ordinary file"):
        read_file(pipe, 100, RequestError)

    def write() -> None:
        time.sleep(0.2)
        with pipe.open("wb", buffering=0) as file:
            for block in (b"one ", b"two"):
                file.write(block)
                time.sleep(0.1)

    writer = threading.Thread(target=write)
    writer.start()
    assert read_text(pipe, 7, RequestError, takes_pipes=True) == "one two"
    writer.join()


def test_an_endless_pipe_is_read_up_to_the_limit() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"y\n" * 100)
    with pytest.raises(RequestError, match="it has more than the 20 bytes"):
        read_file(Path(f"/dev/fd/{reader}"), 20, RequestError, takes_pipes=True)
    os.close(reader)
    os.close(writer)


def test_a_process_substitution_of_nothing_is_empty() -> None:
    reader, writer = os.pipe()
    os.close(writer)
    assert read_file(Path(f"/dev/fd/{reader}"), 10, RequestError, takes_pipes=True) == b""
    os.close(reader)
    assert read_file(Path("/dev/null"), 10, RequestError, takes_pipes=True) == b""


def test_a_silent_writer_is_not_waited_for_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_files, "SILENT_SECONDS", 0.2)
    reader, writer = os.pipe()
    with pytest.raises(RequestError, match="nothing was written into it for 0 s"):
        read_file(Path(f"/dev/fd/{reader}"), 10, RequestError, takes_pipes=True)
    os.close(reader)
    os.close(writer)


def test_text_names_the_first_byte_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "latin"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(RequestError, match="latin is not UTF-8 text: invalid byte 0xe9 at byte offset 3"):
        read_text(path, 10, RequestError)
    path.write_bytes(b"\xef\xbb\xbftext")
    assert read_text(path, 10, RequestError) == "text"


def test_limits_are_those_of_the_kind_of_file() -> None:
    assert size_limit("tokenizer.json") > size_limit("config.json") > size_limit("chat_template.jinja")


def test_messages_are_cut_in_the_middle_and_the_rest_is_counted() -> None:
    short, long = EdgeLLMError("a" * LONGEST_MESSAGE), EdgeLLMError("begin " + "a" * 2_000_000 + " do this")
    assert str(short) == "a" * LONGEST_MESSAGE
    assert len(str(long)) <= LONGEST_MESSAGE
    assert str(long).startswith("begin ") and str(long).endswith(" do this")
    left_out = int(str(long).split("(")[1].split(" characters left out")[0].replace(",", ""))
    assert left_out + str(long).count("a", 0, -40) > 1_990_000


def test_names_are_shown_on_one_line() -> None:
    assert printable("plain name ä 日本.txt") == "plain name ä 日本.txt"
    assert printable("a\nb\x1b[31m\udcff\u202e") == "a\\nb\\x1b[31m\\udcff\\u202e"
