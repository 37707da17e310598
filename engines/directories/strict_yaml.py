"""YAML read without trust: plain values, no deeper than JSON may be, and nothing that multiplies.

The parser's events come one by one, so that a text is refused before anything recursive has seen it: libyaml's own
composer overflows the stack on deep nesting, and aliases make a few hundred bytes grow without end.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from edgellm.engines.directories.strict_formats import DEEPEST_NESTING, check_values
from edgellm.engines.errors import EdgeLLMError

#: Values and their ends in one text: more are no settings, and would take seconds.
MOST_EVENTS = 30_000
_LONGEST_NUMBER = 64
#: What YAML may take for a whole number, also to the base 60 (1:59:59), a float, a date or a time.
_NUMBER = re.compile(r"[-+.]?[0-9][0-9a-fA-FxobTtZ_:.+-]*")
_TEXT_TAG = "tag:yaml.org,2002:str"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse_yaml(text: str, place: str, error_class: type[EdgeLLMError]) -> Any:
    """The value of a YAML (or JSON) text: dictionaries, lists, text, numbers, dates, truth values, None.

    `error_class`, in one line that begins with `place`, for what is malformed, nested more than 64 deep, has anchors,
    aliases, tags or a number of more than 64 bits.
    """
    try:
        _check_events(text)
        value = yaml.load(text, Loader=_LOADER)
        check_values(value)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise error_class(f"{place} is not valid YAML: {error.problem or error.context}{where}") from error
    except yaml.YAMLError as error:
        raise error_class(f"{place} is not valid YAML: {' '.join(str(error).split())}") from error
    except (ValueError, OverflowError, RecursionError) as error:  # a date that there is none of
        raise error_class(f"{place} is not valid YAML: {error}") from error
    return value


def _check_events(text: str) -> None:
    """Raise ValueError or YAMLError for what `parse_yaml` refuses before any value is made."""
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=_LOADER)):
        where = f"in line {event.start_mark.line + 1 if event.start_mark else 1}"
        if count >= MOST_EVENTS:
            raise ValueError(f"it has more than {MOST_EVENTS:,} values up to here: {where}")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise ValueError(f"{where} is an anchor or an alias (& or *), which are not read: write the value out")
        if isinstance(event, (yaml.SequenceStartEvent, yaml.MappingStartEvent)):
            depth += 1
            if depth > DEEPEST_NESTING:
                raise ValueError(f"its lists and dictionaries are nested more than {DEEPEST_NESTING} deep {where}")
        elif isinstance(event, (yaml.SequenceEndEvent, yaml.MappingEndEvent)):
            depth -= 1
        tag = getattr(event, "tag", None)
        if tag not in (None, "!", _TEXT_TAG):
            raise ValueError(f"{where} is the tag {tag!r:.80}, which is not read: write the value alone")
        if isinstance(event, yaml.ScalarEvent) and event.implicit[0] and _is_long_number(event.value):
            raise ValueError(
                f"{where} is a number of {len(event.value)} characters, expected at most {_LONGEST_NUMBER}"
            )


def _is_long_number(text: str) -> bool:
    return len(text) > _LONGEST_NUMBER and _NUMBER.fullmatch(text) is not None
