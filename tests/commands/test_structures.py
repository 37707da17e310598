"""The form of answers on the command line: --json-schema, --regex, --choice, and /schema in a chat."""

from __future__ import annotations

import json

import pytest

from edgellm.commands.options import StructureOptions
from edgellm.structure.description import Structure

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}


@pytest.fixture
def schema_file(tmp_path):
    path = tmp_path / "point.json"
    path.write_text(json.dumps(SCHEMA))
    return path


def test_options_are_structures(schema_file):
    assert StructureOptions().structure() is None is StructureOptions(choice=[]).structure()
    assert StructureOptions(json_schema=schema_file).structure() == Structure(json=SCHEMA)
    assert StructureOptions(regex="a+").structure() == Structure(regex="a+")
    assert StructureOptions(choice=["a", "b"]).structure() == Structure(choice=["a", "b"])


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--regex", "a", "--choice", "b"], 2, "--choice: is given beside --regex"),
        (["--regex", "("], 1, "the regular expression cannot be enforced"),
        (["--choice", ""], 1, "choice is '': expected text"),
        (["--json-schema", "none.json"], 1, "none.json"),
    ],
)
def test_wrong_forms_are_named_before_anything_is_loaded(edgellm, tmp_path, options, code, words):
    found, out, err = edgellm("generate", "hello", "--model", tmp_path, *options)
    assert (found, out) == (code, "") and words in err.replace("\n", " ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "the JSON schema"),
        ('{"uniqueItems": true}', "at #, has the keyword 'uniqueItems', which would not be enforced"),
        ("[]", "expected a JSON schema"),
    ],
)
def test_a_wrong_schema_is_named_with_its_file(edgellm, tmp_path, text, words):
    path = tmp_path / "schema.json"
    path.write_text(text)
    code, _, err = edgellm("generate", "hello", "--model", tmp_path, "--json-schema", path)
    assert code == 1 and "schema.json" in err and words in err.replace("\n", " ")


def test_a_chat_shows_sets_and_forgets_its_schema(edgellm, chat_engines, schema_file, tmp_path):
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"uniqueItems": true}')
    lines = ["/schema", f"/schema {schema_file}", "/schema", f"/schema {wrong}", "/set max_tokens 3", "/schema"]
    stdin = "\n".join([*lines, f"/save {tmp_path / 'chat.json'}", '/schema ""', "/schema"])
    code, out, err = edgellm("chat", "--model", chat_engines, "--backend", "numpy", stdin=stdin)
    assert (code, out) == (1, "")
    assert "has the keyword 'uniqueItems', which would not be enforced" in err.replace("\n", " ")
    assert err.count("Answers have any form") == 3 and err.count("Answers are JSON now.") == 1
    assert err.count('"type": "integer"') == 2
    assert "structure" not in (tmp_path / "chat.json").read_text()
