"""Each keyword that is taken is enforced: shown with real masks of bytes, and by jsonschema. Others are refused."""

import json
import random
import re

import jsonschema
import pytest
from costly_schemas import chain, objects_of_one_another, patterns
from processor_time import within_seconds
from random_answers import random_answer

from edgellm.errors import RequestError
from edgellm.structure.description import Structure
from edgellm.structure.grammar import byte_vocabulary
from edgellm.structure.schema import ANNOTATIONS, ENFORCED, enforced_schema

TREE = {
    "type": "object",
    "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/t"}}},
    "required": ["kids"],
}
PICK = {
    "type": "object",
    "properties": {"kind": {"const": "pick"}, "n": {"type": "integer"}},
    "required": ["kind", "n"],
}
WAIT = {
    "type": "object",
    "properties": {"kind": {"const": "wait"}},
    "required": ["kind"],
    "additionalProperties": False,
}

#: Of each keyword: a schema, texts that it allows and texts that it alone forbids.
CASES = {
    "type": ({"type": ["integer", "null"]}, ["3", "null"], ['"3"', "3.5", "true"]),
    "enum": ({"enum": ["a", 2, {"k": [None]}]}, ['"a"', "2", '{"k": [null]}'], ['"b"', "3", '{"k": []}']),
    "const": ({"const": "caf\u00e9\n"}, ['"caf\u00e9\\n"'], ['"cafe"', "null"]),
    "anyOf": ({"anyOf": [{"type": "string", "maxLength": 1}, {"const": 5}]}, ['"a"', "5"], ['"ab"', "6"]),
    "allOf": ({"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 3}]}, ['"ab"', '"abc"'], ['"a"', '"abcd"']),
    "oneOf": (
        {"oneOf": [PICK, WAIT]},
        ['{"kind": "wait"}', '{"kind": "pick", "n": 1}'],
        ['{"kind": "pick"}', '{"kind": 1}'],
    ),
    "prefixItems": (
        {"type": "array", "prefixItems": [{"type": "null"}, {"const": 1}]},
        ["[null, 1]", "[null]"],
        ["[1]", "[null, 2]"],
    ),
    "items": ({"type": "array", "items": {"type": "boolean"}}, ["[]", "[true, false]"], ["[1]", "[true, null]"]),
    "properties": ({"type": "object", "properties": {"a": {"const": 1}}}, ['{"a": 1}', "{}", '{"b": 2}'], ['{"a": 2}']),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^a": {"const": 1}}},
        ['{"ab": 1}', '{"b": 2}'],
        ['{"ab": 2}'],
    ),
    "additionalProperties": (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
        ['{"a": 1}'],
        ['{"b": 1}'],
    ),
    "$defs": ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"const": 1}}}, ["1"], ["2"]),
    "definitions": ({"$ref": "#/definitions/x%20y", "definitions": {"x y": {"const": 1}}}, ["1"], ["2"]),
    "$ref": (
        {"$ref": "#/$defs/t", "$defs": {"t": TREE}},
        ['{"kids": []}', '{"kids": [{"kids": []}]}'],
        ['{"kids": [1]}', "{}"],
    ),
    "required": (
        {"type": "object", "properties": {"a": {}}, "required": ["a", "z"]},
        ['{"a": 1, "z": 2}'],
        ['{"a": 1}', "{}"],
    ),
    "maxProperties": ({"type": "object", "maxProperties": 1}, ["{}", '{"a": 1}'], ['{"a": 1, "b": 2}']),
    "minProperties": (
        {"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 1},
        ['{"a": 1}'],
        ["{}"],
    ),
    "minLength": (
        {"type": "string", "minLength": 2},
        ['"ab"', '"\u00e9\U0001f600"', '"\\n\\""'],
        ['"\u00e9"', '"\U0001f600"', '"\\n"'],
    ),
    "maxLength": ({"type": "string", "maxLength": 2}, ['""', '"\U0001f600\U0001f600"'], ['"abc"']),
    "pattern": ({"type": "string", "pattern": "b+$"}, ['"ab"', '"bb"'], ['"ba"', '"a"']),
    "format": ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-30"', '"today"']),
    "minItems": ({"type": "array", "minItems": 2}, ["[1, 2]"], ["[1]"]),
    "maxItems": ({"type": "array", "maxItems": 1}, ["[]", "[1]"], ["[1, 2]"]),
    "minimum": ({"type": "integer", "minimum": -5}, ["-5", "12"], ["-6"]),
    "maximum": ({"type": "number", "maximum": 1.5}, ["1.5", "-3"], ["1.51", "2"]),
    "exclusiveMinimum": ({"type": "number", "exclusiveMinimum": 0}, ["0.001", "3"], ["0", "-1", "0.0"]),
    "exclusiveMaximum": ({"type": "integer", "exclusiveMaximum": 3}, ["2"], ["3"]),
    "multipleOf": ({"type": "number", "multipleOf": 0.25}, ["0.75", "-2"], ["0.3"]),
}


def test_every_enforced_keyword_is_shown():
    assert set(CASES) == ENFORCED


@pytest.mark.parametrize("keyword", sorted(CASES))
def test_a_keyword_is_enforced_as_jsonschema_understands_it(keyword):
    schema, allowed, forbidden = CASES[keyword]
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    structure = Structure(json=schema)
    for text in allowed:
        assert validator.is_valid(json.loads(text)) and structure.is_complete(text), text
    for text in forbidden:
        assert not validator.is_valid(json.loads(text)) and not structure.is_complete(text), text
    generator = random.Random(0)
    answers = [random_answer(structure.grammar_text, generator) for _ in range(20)]
    assert any(answers)
    for text in filter(None, answers):
        assert validator.is_valid(json.loads(text)), text


FORMATS = {
    "date-time": r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)",
    "time": r"\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)",
    "uri-reference": r"[!-~]*",
    "json-pointer": r"(/[^/]*)*",
    "date": r"\d{4}-\d\d-\d\d",
    "duration": r"P(?=.)(\d+[YMWD])*(T(?=\d)(\d+[HMS])+)?",
    "email": r"[^@]+@[^@]+",
    "hostname": r"[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*",
    "ipv4": r"(\d{1,3}\.){3}\d{1,3}",
    "ipv6": r"[0-9A-Fa-f:.]{2,45}",
    "uuid": r"[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:.*",
}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_format_has_its_shape(name):
    structure, generator = Structure(json={"type": "string", "format": name}), random.Random(name)
    checker, found = jsonschema.FormatChecker(), 0
    for _ in range(30):
        text = random_answer(structure.grammar_text, generator, 300)
        if text is None:
            continue
        found += 1
        assert re.fullmatch(FORMATS[name], json.loads(text), re.DOTALL), text
        if name in ("ipv4", "ipv6", "uuid", "date"):
            checker.check(json.loads(text), name)
    assert found > 5


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string", "format": "idn-email"}, "at #/format, is 'idn-email', which would not be enforced"),
        ({"type": "string", "format": ["date"]}, "at #/format, is .* expected text, such as date-time"),
        (
            {"properties": {"a b": {"not": {"pattern": "a"}}}},
            "at #/properties/a b, has the keyword 'not', which would not be enforced",
        ),
        ({"items": {"uniqueItems": True}}, "at #/items, has the keyword 'uniqueItems'"),
        ({"maxlength": 3}, "'maxlength', which would not be enforced: did you mean maxLength"),
        ({"uniqueItems": True}, "'uniqueItems', which would not be enforced: leave it out"),
        ({"x-guidance": {"whitespace_flexible": True}}, "at #, has x-guidance, which would change"),
        ({"anyOf": [{}, {"x-guidance": {}}]}, "at #/anyOf/1, has x-guidance"),
        ({"type": "object", "minProperties": 2}, "#/minProperties, is 2, which would not be enforced"),
        ({"$ref": "https://example.org/s"}, r"#/\$ref, is 'https"),
        ({"$ref": "#/$defs/none"}, r"where there is no schema"),
        ({"$ref": "#/default", "default": 3}, r"where there is no schema"),
        ({"properties": {"a": {"$id": "x", "$ref": "#/$defs/b"}}, "$defs": {"b": {}}}, r"where there is no schema"),
        ({"items": [{}], "prefixItems": [{}]}, "at #/items, is .*: expected a schema"),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "items": {}, "prefixItems": [{}]},
            "at #/prefixItems, is of a later draft",
        ),
        ({"additonalProperties": False}, "'additonalProperties', .*: did you mean additionalProperties"),
        ({"requried": ["a"]}, "'requried', .*: did you mean required"),
        ({"minLenght": 3}, "'minLenght', .*: did you mean minLength"),
        ({"uniqueItem": True}, "'uniqueItem', .*: did you mean uniqueItems"),
        ({"contains": {}, "minContains": 0}, "has the keyword 'contains'"),
        ({"type": "text"}, "at #/type, is 'text': expected one of object"),
        ({"type": "string", "pattern": "(?=a)"}, r"with \(\? at 0"),
        ({"type": "string", "pattern": r"\p{L}"}, "as JavaScript and Python read it"),
        ({"type": "string", "pattern": "[a&&b]"}, "as JavaScript and Python read it"),
        ({"type": "string", "pattern": r"\bword"}, "cannot be enforced"),
        ({"patternProperties": {"(": {}}}, "#/patternProperties, is '\\('"),
        ({"minimum": "3"}, "#/minimum, is '3': expected a number"),
        ({"minLength": -1}, "#/minLength, is -1: expected a whole number from 0"),
        ({"required": "a"}, "#/required, is 'a': expected a list"),
        ({"properties": [1]}, "#/properties, is .* expected schemas by name"),
        ({"anyOf": []}, "#/anyOf, is .* expected a list of at least one schema"),
        ({"enum": []}, "#/enum, is .* expected a list of at least one value"),
        ({"const": "a\x01"}, "#/const, has the control character"),
        ({"const": 2**53 + 1}, "#/const, is 9007199254740993: expected a number from"),
        ({"multipleOf": 0}, "#/multipleOf, is 0: expected a positive number"),
        ({"multipleOf": 1000003}, "#/multipleOf, is 1000003"),
        ({"type": "integer", "minimum": 3, "maximum": 1}, "has minimum 3 and maximum 1"),
        ({"minimum": 3, "exclusiveMaximum": 3}, "has minimum 3 and exclusiveMaximum 3"),
        ({"minLength": 3, "maxLength": 1}, "has minLength 3 above maxLength 1"),
        ({"minItems": 3, "maxItems": 1}, "has minItems 3 above maxItems 1"),
        ({"type": "array", "items": False, "minItems": 1}, "has minItems 1, but no items behind prefixItems"),
        (
            {"type": "object", "required": ["a", "b"], "maxProperties": 1},
            "requires 2 properties, more than maxProperties",
        ),
        ({"type": "integer", "minimum": 1.2, "maximum": 1.8}, "contains no integer values"),
        ({"type": "string", "enum": [1, 2]}, "cannot be enforced"),
        (
            {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
            "#/exclusiveMinimum, is 0, with another bound less than 1",
        ),
        ({"allOf": [{"exclusiveMaximum": 3}, {"minimum": 2.5}], "type": "number"}, "#/allOf/0/exclusiveMaximum, is 3"),
        ({3: 4}, "has the key 3: expected text"),
        ({"const": float("nan")}, "is nan: expected a finite number"),
        ({"const": {1, 2}}, "expected a value as JSON has it"),
        ({"title": "\ud800"}, "half of a surrogate pair"),
        ({"items": 5}, "at #/items, is 5: expected a schema"),
        ({"items": False, "prefixItems": {}}, "#/prefixItems, is"),
        ([], "json is .*: expected a JSON schema"),
        (False, "is false, which no value fulfils"),
    ],
)
def test_what_would_not_be_enforced_is_refused_with_its_place(schema, words):
    with pytest.raises(RequestError, match=words):
        Structure(json=schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "integer"}, "b": {}}, "patternProperties": {"^(a|b)$": {"minimum": 3}}},
        {"properties": {"a": {}}, "patternProperties": {"^a$": {"type": "integer"}, "^c": False}},
        {"patternProperties": {"^a$": {"type": "integer"}}, "required": ["a"]},
        {"properties": {"a": {}, "b": {}}, "patternProperties": {"^a$": {"type": "integer"}, "^b$": {"type": "null"}}},
    ],
    ids=str,
)
def test_names_that_are_all_listed_leave_no_dead_end_to_patterns(schema):
    schema = {"type": "object", "additionalProperties": False, **schema}
    structure, validator = Structure(json=schema), jsonschema.Draft202012Validator(schema)
    for text in ('{"a": 4}', '{"a": "x"}', '{"a": 1}', '{"a": 4, "b": null}', '{"b": null}', '{"c": 1}', "{}"):
        assert structure.is_complete(text) == validator.is_valid(json.loads(text)), text
    constraint = byte_vocabulary().constraint_for(structure.grammar_text)
    names = [*schema.get("properties", ["a"])]
    whole = json.dumps({name: 4 if name == "a" else None for name in names})
    assert all(map(constraint.try_advance, whole[:-1].encode()))
    assert not constraint.try_advance(ord(","))  # behind which nothing could come
    assert constraint.try_advance(ord("}"))


@pytest.mark.parametrize("keyword", sorted(ANNOTATIONS))
def test_annotations_pass_and_change_nothing(keyword):
    schema = {"type": "integer", "minimum": 3}
    noted = {keyword: "https://json-schema.org/draft/2020-12/schema", **schema}
    assert Structure(json=noted).grammar_text == Structure(json=schema).grammar_text


ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
READ = {
    "unknown keywords": (
        {"type": "integer", "format": "int64", "x-order": 1, "_uniqueItems": True, "min": 7, "links": []},
        ["3"],
        ["true"],
    ),
    "keywords that say nothing": (
        {
            "type": "array",
            "uniqueItems": False,
            "additionalItems": False,
            "then": False,
            "maxContains": 0,
            "not": False,
        },
        ["[1, 1]"],
        ["{}"],
    ),
    "one item": ({"type": "array", "uniqueItems": True, "maxItems": 1}, ["[1]"], ["[1, 2]"]),
    "whole numbers with a point": ({"type": "string", "minLength": 2.0}, ['"ab"'], ['"a"']),
    "tuples": (
        {"type": "array", "items": [{"type": "null"}, {"$ref": "#/items/0"}], "additionalItems": {"type": "string"}},
        ['[null, null, "a"]', "[null]"],
        ["[null, 1]", "[null, null, 1]"],
    ),
    "exclusive bounds": (
        {"type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 5, "exclusiveMaximum": False},
        ["4", "5"],
        ["3", "6"],
    ),
    "references to anywhere": (
        {"$ref": "#/components/a", "components": {"a": {"$ref": "#/components/b"}, "b": {"type": "null"}}},
        ["null"],
        ["1"],
    ),
    "definitions that nothing refers to": (
        {"type": "null", "definitions": {"a": {"not": {}}, "b": {"$ref": "#/none"}}},
        ["null"],
        ["1"],
    ),
    "names within": (
        {
            "properties": {"a": {"id": "a", "$ref": "#/definitions/b"}},
            "definitions": {"b": {"$id": "b", "$ref": "#/definitions/c", "definitions": {"c": {"type": "null"}}}},
        },
        ['{"a": null}'],
        ['{"a": 1}'],
    ),
    "one property more": (
        {"required": ["a"], "minProperties": 2, "type": "object"},
        ['{"a": 1, "b": 1}'],
        ['{"a": 1}', "{}"],
    ),
    "one property or another": (
        {"type": "object", "minProperties": 1, "properties": {"a": {}, "b": {"type": "null"}}},
        ['{"b": null}', '{"a": 1, "b": null}', '{"c": 1}', '{"a": 1, "c": 1}'],
        ["{}", '{"b": 1}'],
    ),
    "dependencies": (
        {"type": "object", "dependencies": {"a": ["b"], "c": {"properties": {"d": {"type": "null"}}}}},
        ['{"b": 1}', '{"b": 1, "a": 1}', '{"d": 1}', '{"d": null, "c": 1}'],
        ['{"a": 1}', '{"d": 1, "c": 1}'],
    ),
    "nothing that is required": ({"not": {"required": ["a", "b"]}}, ['{"a": 1}'], ['{"a": 1, "b": 1}', "3"]),
    "no values": (
        {"not": {"anyOf": [{"type": ["object", "number"]}, {"not": {"type": "null"}}]}},
        ["null"],
        ["1", '"a"'],
    ),
    "other values": (
        {"not": {"type": "object", "properties": {"a": {"type": "null"}}}},
        ['{"a": 1}', "1"],
        ['{"a": null}', "{}"],
    ),
    "never": ({"properties": {"a": {"not": {}}}, "type": "object"}, ["{}"], ['{"a": 1}']),
    "one property of those listed": (
        {"type": "object", "minProperties": 1, "properties": {"a": {}, "b": {}}, "additionalProperties": False},
        ['{"b": 1}', '{"a": 1, "b": 1}'],
        ["{}"],
    ),
    "leap years": (
        {"type": "string", "format": "date"},
        ['"2024-02-29"', '"2000-02-29"', '"2023-02-28"'],
        ['"2023-02-29"', '"1900-02-29"', '"0000-01-01"'],
    ),
    "times of leap days": (
        {"type": "string", "format": "date-time", "pattern": "Z$"},
        ['"2024-02-29T01:02:03Z"'],
        ['"2023-02-29T01:02:03Z"', '"2024-02-29T01:02:60Z"', '"2024-02-29T01:02:03+00:00"'],
    ),
    "IPv4 within IPv6": (
        {"type": "string", "format": "ipv6"},
        ['"::FFFF:1.2.3.4"', '"::ffff:1.2.3.4"', '"1:2:3:4:5:6:7.8.9.10"', '"1::"', '"::"'],
        ['"1:2:3:4:5:6:7:8.9.10.11"', '"::1.2.3"', '"1::2::3"'],
    ),
    "long names of hosts": (
        {"type": "string", "format": "hostname"},
        ['"' + ".".join(["a" * 60] * 4) + '"'],
        ['"' + ".".join(["a" * 60] * 5) + '"'],
    ),
    "JSON pointers": ({"type": "string", "format": "json-pointer"}, ['"/a~1b"', '""'], ['"/a~2"', '"a"']),
    "references of URIs": (
        {"type": "string", "format": "uri-reference"},
        ['"/a?b#c"', '"../x"', '"http://a.b/c"'],
        ['"a b"', '"%z"'],
    ),
    "URIs": (
        {"type": "string", "format": "uri"},
        ['"urn:isbn:1"', '"https://a:b@c.d:80/e?f=/#g"', '"mailto:a@b.c"'],
        ['"//a/b"', '"a b:c"', '"1a:b"', '"http://[::1"'],
    ),
    "durations": (
        {"type": "string", "format": "duration"},
        ['"P1Y2M3DT4H5M6S"', '"PT10M"', '"P2W"', '"P1DT12H"'],
        ['"P"', '"PT"', '"P1Y1D"', '"P1W1D"', '"P1.5D"'],
    ),
    "zod's addresses of mail": (
        {"type": "string", "format": "email", "pattern": ZOD_EMAIL},
        ['"o\'neil.a+b@c-d.ef"', '"_@a.bc"'],
        ['"a\'@b.cd"', '"a..b@c.de"', '".a@b.cd"', '"a@b.c"', '"a@b"'],
    ),
    "pydantic's decimals": (
        {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
        ['"-00.50"', '"+.5"', '"7."', '"12"'],
        ['"."', '"-"', '""', '"1.2.3"', '"+-1"'],
    ),
    "addresses of mail": (
        {"type": "string", "format": "email"},
        ['"o\'neil+a@b-c.d"', '"a@localhost"'],
        ['"a..b@c"', '"a@-b"', '"a@b@c"', '".a@b"'],
    ),
}


@pytest.mark.parametrize("case", READ)
def test_what_others_write_is_read_as_the_specification_has_it(case):
    schema, allowed, forbidden = READ[case]
    structure = Structure(json=schema)
    assert [structure.is_complete(text) for text in allowed] == [True] * len(allowed)
    assert not any(structure.is_complete(text) for text in forbidden)


def test_names_of_properties_are_no_keywords():
    schema = {"type": "object", "properties": {"not": {"const": 1}, "x-guidance": {"const": 2}}, "required": ["not"]}
    assert Structure(json=schema).is_complete('{"not": 1, "x-guidance": 2}')


@pytest.mark.parametrize(
    "alternatives",
    [
        [{"type": "string"}, {"type": ["integer", "null"]}],
        [{"const": 1}, {"enum": [True, "1"]}],
        [{"const": "a"}, {"type": "number"}],
        [PICK, WAIT],
        [{"$ref": "#/$defs/p"}, {"$ref": "#/$defs/w"}, {"type": "null"}],
        [
            {"type": "object", "required": ["a"], "properties": {"a": PICK}},
            {"type": "object", "required": ["a"], "properties": {"a": WAIT}},
        ],
    ],
)
def test_alternatives_that_are_disjoint_are_a_one_of(alternatives):
    schema = {"oneOf": alternatives, "$defs": {"p": PICK, "w": WAIT}}
    structure, generator = Structure(json=schema), random.Random(1)
    validator = jsonschema.Draft202012Validator(schema)
    texts = [random_answer(structure.grammar_text, generator) for _ in range(20)]
    assert any(texts) and all(validator.is_valid(json.loads(text)) for text in texts if text)


@pytest.mark.parametrize(
    ("alternatives", "allowed", "forbidden"),
    [
        ([{"required": ["a"]}, {"required": ["b"]}], ['{"a": 1}', '{"b": 1}'], ['{"a": 1, "b": 1}', "{}", "3"]),
        (
            [{"required": ["a", "c"]}, {"required": ["a", "b"]}, {"required": ["d"]}],
            ['{"a": 1, "c": 1}', '{"d": 1}'],
            ['{"a": 1, "b": 1, "c": 1}', '{"a": 1, "b": 1, "d": 1}', '{"a": 1}'],
        ),
        (
            [{"properties": {"k": {"const": 1}}}, {"properties": {"k": {"const": 2}}, "type": ["object", "null"]}],
            ['{"k": 1}', '{"k": 2}'],
            ['{"k": 3}', "{}", "null"],
        ),
        (
            [{"properties": {"a": {}}, "additionalProperties": False, "required": ["a"]}, {"required": ["b"]}],
            ['{"a": 1}', '{"b": 1}'],
            ['{"a": 1, "b": 1}', '{"c": 1}'],
        ),
        ([{"anyOf": [{"type": "null"}, {"type": "string"}]}, {"type": "integer"}], ["null", "1"], ["true"]),
        ([{"allOf": [{"$ref": "#/$defs/p"}]}, {"$ref": "#/$defs/w"}], ['{"kind": "wait"}'], ['{"kind": "pick"}']),
        (
            [{"$ref": "#/$defs/s"}, {"properties": {"kind": {"const": "say"}}, "required": ["text"]}],
            ['{"kind": 1}', '{"kind": "say", "text": 1}'],
            ['{"kind": "say"}', "3"],
        ),
    ],
)
def test_alternatives_are_narrowed_to_values_that_fulfil_one_alone(alternatives, allowed, forbidden):
    schema = {
        "oneOf": alternatives,
        "$defs": {"p": PICK, "w": WAIT, "s": {"properties": {"kind": {"type": "integer"}}}},
    }
    structure, generator = Structure(json=schema), random.Random(1)
    validator = jsonschema.Draft202012Validator(schema)
    assert [structure.is_complete(text) for text in allowed] == [True] * len(allowed)
    assert not any(structure.is_complete(text) for text in forbidden)
    texts = [random_answer(structure.grammar_text, generator) for _ in range(20)]
    assert any(texts) and all(validator.is_valid(json.loads(text)) for text in texts if text)


@pytest.mark.parametrize(
    "alternatives",
    [
        [{"type": "string"}, {"type": "string", "maxLength": 3}],
        [{"type": "integer"}, {"type": "number"}],
        [{"const": 1}, {"enum": [1.0, 2]}],
        [{}, {"type": "null"}],
        [{"required": ["a"]}, {"required": ["a", "b"]}],
        [{"type": "object", "properties": {"a": {"type": "integer"}}}, {"type": "object", "required": ["a"]}],
    ],
)
def test_alternatives_that_one_value_may_fulfil_are_refused(alternatives):
    with pytest.raises(RequestError, match=r"#/properties/x/oneOf, has alternatives 0 and 1, which one value may both"):
        Structure(json={"properties": {"x": {"oneOf": alternatives}}})


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {
            "properties": {"x": {"$ref": "#/$defs/a"}},
            "$defs": {"a": {"type": "array", "prefixItems": [{"$ref": "#/$defs/a"}], "minItems": 1}},
        },
    ],
)
def test_recursion_without_an_end_is_refused(schema):
    with pytest.raises(RequestError, match="for ever: no value of it ever ends"):
        Structure(json=schema)


def test_recursion_with_an_end_works():
    schema = {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1, "maxItems": 2}]}
    structure = Structure(json=schema)
    assert structure.is_complete("[[1, [2]], 3]") and not structure.is_complete("[[]]")


def nested(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def holds_itself():
    schema = {"type": "array"}
    schema["items"] = schema
    return schema


def shares_parts():
    schema = {"type": "integer"}
    for _ in range(20):
        schema = {"type": "array", "prefixItems": [schema, schema]}
    return schema


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nested(200), "is nested more than"),
        (holds_itself, "is nested more than .* holds itself"),
        (shares_parts, "more than 50,000 values"),
        (lambda: {"const": "x" * 200_000}, "has 200\\d\\d\\d bytes without"),
        (lambda: {"const": [10**5000]}, "cannot be written as text|expected a number"),
        (
            lambda: {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(2000)}},
            "has 2000 properties that may be left out",
        ),
        (
            lambda: {
                "allOf": [
                    {"anyOf": [{"properties": {f"a{n}{m}": {"type": "null"}}} for m in range(4)]} for n in range(12)
                ]
            },
            "cannot be enforced",
        ),
        (lambda: {"type": "string", "pattern": "^(a{1000}){1000}$"}, "too much work"),
        (  # each word and each character is counted: the automaton is too large behind the first letters
            lambda: {
                "type": "object",
                "properties": {"a": {"pattern": r"^(\S+\s+){0,99}\S+$", "maxLength": 5000, "type": "string"}},
                "required": ["a"],
            },
            "too much work",
        ),
        (lambda: chain(2500), "refers from one place to the next more than 200 times"),
        (lambda: chain(201, required="p"), "refers from one place to the next more than 200 times"),
        (lambda: {"allOf": patterns(60)}, "at #, has 60 patterns, formats and lengths that one text has to fulfil"),
        (lambda: {"allOf": [{"format": "date", "maxLength": 9}, {"anyOf": patterns(9)}] * 3}, "at #, has 9 patterns"),
        (lambda: objects_of_one_another(40), "alternatives 0 and 1, which one value may both fulfil"),
        (lambda: {"oneOf": [{"required": [f"a{n}"]} for n in range(3000)]}, "alternatives 0 and 1"),
        (
            lambda: {
                "oneOf": [
                    {
                        "type": "object",
                        "required": ["k"],
                        "properties": {"k": {"type": "object", "required": ["k"], "properties": {"k": {"const": n}}}},
                    }
                    for n in range(900)
                ]
            },
            "takes too much work to check",
        ),
        (
            lambda: {"properties": {"k" * 60_000: {"required": [], "prefixItems": [{}] * 15_000}}},
            "too much work to check",
        ),
    ],
)
def test_an_enormous_schema_ends_soon_in_a_clear_error(make, words):
    schema = make()
    longest = 3 if words.startswith("takes too much work") else 2  # all the work that there may be, 1.4 s alone
    with within_seconds(longest), pytest.raises(RequestError, match=words):
        Structure(json=schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"const": f"c{n}"} for n in range(4000)]},
        {"oneOf": [{"enum": [*range(9000)]}, {"enum": [*range(9000, 18000)]}]},
        {"oneOf": [{"type": "object", "required": ["k"], "properties": {"k": {"const": n}}} for n in range(1200)]},
        {
            "type": "object",
            "allOf": [{}],
            "properties": {f"p{n}": {"exclusiveMinimum": n, "maximum": n + 2} for n in range(399)},
        },
        {"$ref": "#/$defs/d0", "allOf": [{"$ref": "#/$defs/d9"}] * 2000, "$defs": chain(199)["$defs"]},
    ],
    ids=["consts", "enums", "kinds", "ranges", "chain"],
)
def test_walks_over_a_long_schema_are_linear(schema):
    with within_seconds(1):
        enforced = enforced_schema(schema)
    assert json.loads(re.sub(r"\bd(\d+)-\d+", r"d\1", json.dumps(enforced))) == schema  # definitions have a number


def test_deep_and_long_schemas_within_the_limits_work():
    optional = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(400)}}
    assert Structure(json=optional | {"additionalProperties": False}).is_complete('{"p7": 1, "p399": 2}')
    assert Structure(json=nested(50)).is_complete("[" * 51 + "]" * 51) is False
    assert Structure(json=nested(50)).is_complete("[" * 50 + "7" + "]" * 50)
    assert Structure(json={"enum": [f"value {number}" for number in range(5000)]}).is_complete('"value 4999"')
