"""Structures: what they are made of, how JSON is written, and what a text says."""

from __future__ import annotations

import enum
import json
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Dict, List, Literal, Optional, TypedDict  # noqa: UP035

import pytest
from costly_schemas import rules
from processor_time import within_seconds
from random_answers import random_answer
from wrong_values import wrong_values

from edgellm.errors import RequestError
from edgellm.structure.description import Structure, schema_of, structure_of, structure_of_response_format

if sys.version_info >= (3, 11):
    from typing import NotRequired, Required

POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"]}
POINT |= {"additionalProperties": False}


class Frame(enum.Enum):
    BASE = "base"
    TOOL = "tool"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclass
class Pose:
    xyz: list[float]
    frame: Frame = Frame.BASE


@dataclass
class Action:
    name: Literal["move", "grasp"]
    pose: Pose
    speed: float
    level: Level
    careful: bool
    retries: int | None
    note: Optional[str] = None  # noqa: UP045
    then: Action | None = None
    tags: list[Literal[1, "a"]] = field(default_factory=list)
    made: str = field(init=False, default="here")


@pytest.mark.parametrize(
    ("whitespace", "written"),
    [("spaced", '{"x": 1, "y": 2}'), ("compact", '{"x":1,"y":2}'), ("free", '{ "x" :1 ,\n"y":\t2}')],
)
def test_json_has_the_whitespace_that_was_asked_for(whitespace, written):
    structure = Structure(json=POINT, whitespace=whitespace)
    assert structure.is_complete(written) and structure.parsed(written) == {"x": 1, "y": 2}
    others = {'{"x": 1, "y": 2}', '{"x":1,"y":2}', '{"x": 1,"y": 2}', ' {"x": 1, "y": 2}', '{"x": 1, "y": 2}\n'}
    if whitespace != "free":
        assert not any(structure.is_complete(other) for other in others - {written})


def test_spaced_json_is_what_json_dumps_writes():
    schema = schema_of(Pose)
    schema["$defs"]["Pose"]["properties"]["xyz"]["items"] = {"type": "integer"}
    generator, structure = random.Random(3), Structure(json=schema)
    for _ in range(10):
        text = random_answer(structure.grammar_text, generator)
        assert text is None or "-0" in text or json.dumps(json.loads(text)) == text


def test_keys_have_one_spelling():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    structure = Structure(json=schema)
    assert structure.is_complete('{"b": "x"}')
    assert not structure.is_complete('{"\\u0061": "x"}')  # which is "a", and no integer


def test_a_dataclass_is_a_schema_and_its_answers_are_instances():
    structure = Structure(json=Action)
    value = {"name": "move", "pose": {"xyz": [1, 2.5], "frame": "tool"}, "speed": 1, "level": 2, "careful": True}
    value |= {"retries": None, "then": {**value, "retries": 3, "tags": [1, "a"]}}
    action = structure.parsed(json.dumps(value))
    inner = Action("move", Pose([1.0, 2.5], Frame.TOOL), 1.0, Level.HIGH, True, 3, tags=[1, "a"])
    assert action == Action("move", Pose([1.0, 2.5], Frame.TOOL), 1.0, Level.HIGH, True, None, then=inner)
    assert isinstance(action.speed, float) and isinstance(action.pose.xyz[0], float) and action.made == "here"
    assert not structure.is_complete(json.dumps({**value, "made": "x"}))
    assert not structure.is_complete(json.dumps({**value, "level": 3}))


class Step(TypedDict, total=False):
    at: Required[int]
    then: NotRequired[List[Dict]]  # noqa: UP006
    by: float


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no marks of keys")
def test_a_typed_dict_is_a_schema_whose_keys_may_be_marked():
    structure = Structure(json=Step)
    assert structure.parsed('{"at": 1, "then": [{"a": 1}, {}], "by": 2}') == {
        "at": 1,
        "then": [{"a": 1}, {}],
        "by": 2.0,
    }
    assert structure.parsed('{"at": 1}') == {"at": 1} and not structure.is_complete('{"by": 2}')


def test_random_answers_of_a_dataclass_are_instances():
    generator, structure, found = random.Random(0), Structure(json=Action), 0
    for _ in range(60):
        text = random_answer(structure.grammar_text, generator, 900)
        if text is not None:
            found += 1
            assert isinstance(structure.parsed(text), Action)
    assert found > 5


def test_what_a_class_checks_itself_is_raised():
    @dataclass
    class Positive:
        n: int

        def __post_init__(self):
            if self.n <= 0:
                raise ValueError("n must be positive")

    structure = Structure(json=Positive)
    assert structure.parsed('{"n": 1}').n == 1
    with pytest.raises(ValueError, match="n must be positive"):
        structure.parsed('{"n": -1}')


@dataclass
class Unknown:
    when: complex


@dataclass
class Unnamed:
    what: Missing  # noqa: F821


@dataclass
class Several:
    what: int | set[str]


class Nothing(enum.Enum):
    pass


@dataclass
class Empty:
    what: Nothing


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (Unknown, "the field Unknown.when is complex: expected str, int"),
        (Unnamed, "the annotations of Unnamed cannot be read"),
        (Several, "the field Several.what is set[str]: expected"),
        (Empty, "the field Empty.what has no values"),
        (int, "json is .*: expected a JSON schema"),
    ],
)
def test_classes_of_other_fields_are_refused_by_name(cls, words):
    with pytest.raises(RequestError, match=words.replace("[", r"\[")):
        Structure(json=cls)


class Model:
    """As pydantic's classes, which are not needed for it."""

    def __init__(self, x: int) -> None:
        self.x = x

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {
            "title": "Model",
            "type": "object",
            "properties": {"x": {"title": "X", "type": "integer"}},
            "required": ["x"],
        }

    @classmethod
    def model_validate(cls, value: dict[str, Any]) -> Model:
        return cls(**value)


def test_a_class_with_model_json_schema_validates_what_it_described():
    assert Structure(json=Model).parsed('{"x": 4}').x == 4


def test_a_union_with_a_discriminator_as_pydantic_writes_it():
    alternatives = {
        name: {
            "type": "object",
            "properties": {"kind": {"const": name, "title": "Kind", "type": "string"}},
            "required": ["kind"],
        }
        for name in ("cat", "dog")
    }
    mapping = {name: f"#/$defs/{name}" for name in alternatives}
    union = {"oneOf": [{"$ref": place} for place in mapping.values()], "title": "Pet"}
    union["discriminator"] = {"mapping": mapping, "propertyName": "kind"}
    schema = {"$defs": alternatives, "type": "object", "properties": {"pet": union}, "required": ["pet"]}
    structure = Structure(json=schema)
    assert structure.is_complete('{"pet": {"kind": "dog"}}') and not structure.is_complete('{"pet": {"kind": "cow"}}')


def test_choices_regular_expressions_and_grammars_are_whole_texts():
    choice = Structure(choice=["yes", "no", 'a "b"\n', "caf\u00e9"])
    assert [choice.parsed(text) for text in choice.choice] == list(choice.choice)
    assert not choice.is_complete("ye") and not choice.is_complete("yesno")
    regex = Structure(regex=r"[A-Z]{2}-\d{3}")
    assert regex.is_complete("AB-123") and not regex.is_complete("AB-12") and not regex.is_complete("xAB-123")
    grammar = Structure(grammar='start: item ("," item)*\nitem: /[a-z]+/ "=" /[0-9]+/')
    assert grammar.is_complete("a=1,b=22") and not grammar.is_complete("a=1,")
    anything = Structure(json_object=True)
    assert anything.parsed('{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]} and not anything.is_complete("[1]")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "a structure has nothing: expected one of json"),
        ({"regex": "a", "choice": ["b"]}, "a structure has regex and choice"),
        ({"json": POINT, "json_object": True}, "a structure has json and json_object"),
        ({"json_object": 1}, "json_object is 1: expected true or false"),
        ({"json": POINT, "whitespace": "none"}, "whitespace is 'none': expected one of spaced, compact, free"),
        ({"regex": ""}, "regex is '': expected text"),
        ({"regex": 5}, "regex is 5: expected text"),
        ({"regex": "("}, "the regular expression cannot be enforced .*unclosed group"),
        ({"regex": "(?<=a)b"}, "look-around, including look-ahead and look-behind, is not supported"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"regex": r"[^\s\S]"}, "there is nothing that fulfils it"),
        ({"regex": "a" * 20_000}, "regex has 20000 bytes: at most 16384"),
        ({"regex": "\ud800"}, "half of a surrogate pair"),
        ({"choice": []}, "choice is .*: expected a list of at least one"),
        ({"choice": ["a", ""]}, "choice is '': expected text"),
        ({"choice": "yes"}, "choice is 'yes': expected a list"),
        ({"choice": ["x" * 200_000]}, "choice has 200000 bytes"),
        ({"grammar": "start: other"}, "the grammar cannot be enforced .*unknown name"),
        ({"grammar": "start: start"}, "there is nothing that fulfils it"),
        ({"grammar": 'start: "a" start'}, "cannot be begun by any answer, or takes too much work"),
        ({"grammar": 'start: %json {"foo": 1}'}, "the grammar has '%json', which would not be checked"),
        ({"grammar": 'start: "a" <|im_end|>'}, r"the grammar has '<\|im_end\|>'"),
        ({"grammar": "start[max_tokens=3]: /.*/"}, "would not be checked or enforced"),
        ({"grammar": '{"grammars": [{"json_schema": {"x-guidance": {}}}]}'}, "the grammar cannot be enforced"),
    ],
)
def test_a_wrong_structure_is_named(fields, words):
    with pytest.raises(RequestError, match=words):
        Structure(**fields)


@pytest.mark.parametrize("regex", ["(a{1000}){1000}", "((a{999}){999}){999}", "(.*[a-z]{500}.*){500}", "(x+x+)+y" * 50])
def test_a_regular_expression_that_explodes_ends_soon(regex):
    began = time.process_time()
    try:
        structure = Structure(regex=regex)
    except RequestError as error:
        assert "too much work" in str(error) or "cannot be enforced" in str(error)
    else:  # it is enforced lazily, and costs nothing before
        assert not structure.is_complete("b" * 50)
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('"\\' * 60_000, "cannot be enforced"),
        ("[" * 120_000, "cannot be enforced"),
        ("<" * 120_000, "cannot be enforced"),
        ("a" * 120_000, "cannot be enforced"),
        (rules(201), "the grammar refers from one place to the next more than 200 times in a row"),
        (rules(9000), "the grammar refers from one place to the next more than 200 times in a row"),
    ],
    ids=lambda value: value[:8],
)
def test_a_hostile_grammar_ends_soon_in_a_clear_error(grammar, words):
    with within_seconds(2), pytest.raises(RequestError, match=words):
        Structure(grammar=grammar)


def test_a_grammar_may_recur_and_its_rules_may_be_many():
    text = "\n".join(["start: r1 | r2", *(f'r{n}: "x" r{n % 3 + 1}? | "{n}"' for n in range(1, 150))])
    assert Structure(grammar=text).is_complete("xxx2")
    assert Structure(grammar=rules(199)).is_complete("x")


@pytest.mark.parametrize("name", ["json", "regex", "choice", "grammar", "json_object", "whitespace"])
def test_hostile_values_are_refused_in_words(name):
    for value in wrong_values():
        fields = {name: value} | ({"json_object": True} if name == "whitespace" else {})
        try:
            Structure(**fields)
        except RequestError as error:
            assert str(error)


def test_hostile_forms_are_refused_in_words():
    for value in wrong_values():
        for make in (structure_of, structure_of_response_format):
            try:
                make(value)
            except RequestError as error:
                assert str(error)
        try:
            structure_of_response_format({"type": "json_schema", "json_schema": {"schema": value}})
        except RequestError as error:
            assert str(error)


def test_literals_of_a_grammar_may_look_like_what_is_refused():
    assert Structure(grammar='start: "%json <a>" /<b>[0-9]/ // <c>').is_complete("%json <a><b>1")


def test_short_forms_and_response_formats():
    assert structure_of(POINT) == Structure(json=POINT) == structure_of(Structure(json=POINT))
    assert structure_of(["a"]) == Structure(choice=["a"]) and structure_of(Model) == Structure(json=Model)
    assert structure_of("json_object") == Structure(json_object=True)
    with pytest.raises(RequestError, match="structure is 'x': expected Structure"):
        structure_of("x")
    assert structure_of_response_format(None) is None is structure_of_response_format({"type": "text"})
    assert structure_of_response_format({"type": "json_object"}) == Structure(json_object=True)
    for name in ("schema", "value"):
        assert structure_of_response_format({"type": "json_object", name: POINT}) == Structure(json=POINT)
    described = {"name": "point", "schema": POINT, "strict": True, "description": "A point."}
    assert structure_of_response_format({"type": "json_schema", "json_schema": described}) == Structure(json=POINT)
    assert structure_of_response_format(Model) == Structure(json=Model)


@pytest.mark.parametrize(
    "value",
    [
        5,
        {"type": "xml"},
        {"type": ["text"]},
        {"type": "text", "more": 1},
        {"type": "json_schema"},
        {"type": "json_object", "schema": {}, "value": {}},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"schema": {}, "other": 1}},
    ],
)
def test_a_wrong_response_format_says_what_was_expected(value):
    with pytest.raises(RequestError, match=r"response_format.* expected"):
        structure_of_response_format(value)
