"""Random answers that follow a grammar, byte by byte, and random schemas."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from edgellm.engines.speculation.constraints import TokenConstraint, mask_words
from edgellm.structure.grammar import byte_vocabulary

END = 256
#: They lead to an end sooner than others.
CLOSING = frozenset(b'"}]')


def random_answer(
    grammar: str | TokenConstraint, generator: random.Random, most: int = 600, begin: bytes = b""
) -> str | None:
    """An answer drawn among what the masks of a grammar's text, or of rules, allow; None where it did not end within
    `most` bytes. `begin` is what it begins with."""
    constraint = byte_vocabulary().constraint_for(grammar) if isinstance(grammar, str) else grammar
    row, answer = np.empty(mask_words(257), np.uint32), bytearray(begin)
    assert all(map(constraint.try_advance, begin))
    for _ in range(most):
        constraint.fill_mask(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        closing = [each for each in allowed if each in CLOSING or each == END]
        choices = closing if closing and generator.random() < 0.3 else allowed
        token = generator.choice(choices)
        assert constraint.try_advance(token), (answer, token)
        if token == END:
            return answer.decode()
        answer.append(token)
    return None


def random_document(generator: random.Random) -> dict[str, Any]:
    """A schema of enforced keywords, with parts that others refer to, often one that cannot be fulfilled."""
    return random_schema(generator) | {"$defs": {name: random_schema(generator, 2) for name in ("p", "q")}}


def random_schema(generator: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose references go to #/$defs/p and #/$defs/q."""
    if depth and generator.random() < 0.1:
        return {"$ref": f"#/$defs/{generator.choice('pq')}"} | (
            generator.choice(
                [{"minLength": 2, "minimum": 3}, {"maxItems": 1, "maxProperties": 1}, {"enum": ["a", 4, []]}]
            )
            if generator.random() < 0.5
            else {}
        )
    schema = _random_kind(generator, depth)
    if generator.random() < 0.1:
        beside = generator.choice(["anyOf", "allOf"])
        schema = {beside: [random_schema(generator, depth + 2) for _ in range(2)]} | schema
    return schema


def _random_kind(generator: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["string", "number", "integer", "boolean", "null", "enum", "const"]
    kind = generator.choice(
        kinds if depth > 2 else [*kinds, "object", "object", "array", "anyOf", "allOf", "any", "types"]
    )
    if kind == "string":
        schema: dict[str, Any] = {"type": "string"}
        if generator.random() < 0.5:
            schema["minLength"] = generator.randrange(4)
        if generator.random() < 0.7:
            schema["maxLength"] = generator.randrange(3, 9)
        if generator.random() < 0.4:
            schema["pattern"] = generator.choice(
                ["^a", "b$", "[0-9]+", "^(ab|c)*$", "x.y", "^.{2,4}$", '"', "\\\\", "^[^a]"]
            )
        if generator.random() < 0.1:
            schema["format"] = generator.choice(["ipv4", "date", "uuid"])
            schema["maxLength"] = generator.choice([9, 10, 12, 40])
        return schema
    if kind in ("number", "integer"):
        schema = {"type": kind}
        step = generator.choice([1, 1, 0.5]) if kind == "number" else 1
        low, high = sorted(generator.randrange(-30, 60) * step for _ in range(2))
        for keyword, bound in (("minimum", low), ("maximum", high)):
            if generator.random() < 0.6:
                name = keyword if generator.random() < 0.6 else f"exclusive{keyword.capitalize()}"
                schema[name] = bound
        if generator.random() < 0.3:
            schema["multipleOf"] = generator.choice([2, 3, 5, 0.5, 0.25])
        return schema
    if kind == "enum":
        values = ["a", "b\n", 1, 2.5, -3, None, True, [1, "x"], {"k": [None]}, "caf\u00e9", ""]
        beside = [
            {},
            {},
            {"minLength": 1, "minimum": 2},
            {"pattern": "^b"},
            {"type": ["string", "array"], "maxItems": 1},
        ]
        return {"enum": generator.sample(values, generator.randint(1, 4)), **generator.choice(beside)}
    if kind == "const":
        return {"const": generator.choice(["c", 0, False, {"a": 1, "b": [2]}, []])}
    if kind == "types":
        return {"type": generator.sample(["string", "integer", "null", "boolean"], 2), "minimum": 3, "maxLength": 2}
    if kind in ("anyOf", "allOf"):
        return {kind: [random_schema(generator, depth + 1) for _ in range(generator.randint(1, 3))]}
    if kind == "any":
        return generator.choice(
            [{}, {"type": "object", "maxProperties": 2}, {"minLength": 2, "minimum": 4, "minItems": 1}]
        )
    if kind == "array":
        schema = {"type": "array"}
        if generator.random() < 0.8:
            schema["items"] = generator.choice([random_schema(generator, depth + 1), False, True])
        if generator.random() < 0.4:
            schema["prefixItems"] = [random_schema(generator, depth + 1) for _ in range(generator.randint(1, 3))]
        if generator.random() < 0.5:
            schema["minItems"] = generator.randrange(3)
        if generator.random() < 0.7:
            schema["maxItems"] = generator.randrange(2, 5)
        return schema
    names = generator.sample(["a", "b", "ab", "x\n", "caf\u00e9", "z"], generator.randrange(4))
    schema = {"type": "object", "properties": {name: random_schema(generator, depth + 1) for name in names}}
    schema["required"] = [name for name in [*names, "new"] if generator.random() < 0.4]
    if generator.random() < 0.7:
        schema["additionalProperties"] = generator.choice([False, random_schema(generator, depth + 1)])
    if generator.random() < 0.3:
        schema["patternProperties"] = {generator.choice(["^a", "b$", "^[xy]"]): random_schema(generator, depth + 1)}
    if generator.random() < 0.2:
        schema["maxProperties"] = generator.randrange(1, 4)
    return schema
