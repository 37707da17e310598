"""Requests to a robot with tools: each gives a turn whose answer acts as the model's own answers do, or asks back.

An answer that acts has one line of JSON for each action, as `tools.demo_model.actions` writes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tools.demo_model import actions, actions_text, questions, smalltalk
from tools.demo_model.calls import requests_text as text
from tools.demo_model.calls.toolbox import DIRECTIONS
from tools.demo_model.dialogue import SKILLS, clarify, it_command
from tools.demo_model.scene import Thing
from tools.demo_model.turns import Context, Turn, absent_reference, refer

if TYPE_CHECKING:
    from tools.demo_model.calls.dialogues import ToolTalk


class Lack(NamedTuple):
    """What a request left out: the action of `kind` has no value for `missing`, but `values`."""

    kind: str
    missing: str
    values: dict[str, Any]


class Request(NamedTuple):
    """A turn, the kind of action that it wants (none for questions; `IT` where only its answer shows it), and what it
    lacks."""

    turn: Turn
    kind: str | None = None
    lack: Lack | None = None


#: Makes a request; None where it does not fit the dialogue.
MakeRequest = Callable[["ToolTalk"], "Request | None"]

IT = "it"
#: Skills of the model that are commands for one kind of tool.
COMMANDS: dict[str, Callable[[Context], Turn | None]] = {
    "pick": actions.pick,
    "give": actions.give,
    "place": actions.place,
    "move": actions.move,
    "push": actions.push,
    "look": actions.look,
    "point": actions.point,
    "go": actions.go,
    "release": actions.release,
    "turn": actions.turn,
    "wait": actions.wait,
}
#: The phrasings of a command about one object.
ABOUT = {
    "pick": actions_text.PICK,
    "give": actions_text.GIVE,
    "release": actions_text.RELEASE,
    "look": actions_text.LOOK,
    "point": actions_text.POINT,
    "go": actions_text.GO,
    "weigh": text.WEIGH,
}
#: Kinds of which one request may need two calls.
TWICE = ("give", "look", "point", "go", "weigh", "move", "push", "turn", "say")
#: Kinds that are refused where the battery is low or the hand is full.
HANDLING = ("pick", "give", "move", "push")
QUESTIONS = [(skill, weight) for skill, weight in SKILLS if skill.__module__ == questions.__name__]
SLOW, QUICK = (re.compile(rf"\b({'|'.join(words)})\b", re.I) for words in (text.SLOWLY, text.QUICKLY))
#: In questions that are answered in words: what could be meant for a tool.
_ELSEWHERE = re.compile(r"\b(time|clock|warm|cold|hot|temperature|degrees|light|lights|weigh|heavy)\b", re.I)


def command(talk: ToolTalk, kind: str | None = None) -> Request | None:
    """A command for one of the tools, or for a given kind of action."""
    rng = talk.rng
    if kind is None:
        tool = rng.choice(talk.tools)
        kind = rng.choice(("open_gripper", "close_gripper")) if tool.kind == "gripper" else tool.kind
    turn = _about_object(talk, kind)
    if turn is None:
        return None
    tool = talk.tool_for(kind)
    if (
        tool is not None
        and tool.slow
        and rng.random() < 0.5
        and not (SLOW.search(turn.user) or QUICK.search(turn.user))
    ):
        word = rng.choice(text.SLOWLY if rng.random() < 0.5 else text.QUICKLY)
        turn.user = f"{word} {turn.user}" if rng.random() < 0.3 else f"{turn.user} {word}"
    return Request(turn, kind)


def _about_object(talk: ToolTalk, kind: str) -> Turn | None:
    c = talk.context
    if kind not in ABOUT and kind not in ("place", "move", "push"):
        return _about_none(c, kind)
    if not talk.is_told:
        return _untold(talk, kind)
    if kind == "weigh":
        return actions._with_object(c, text.WEIGH, partial(actions.do_plain, c, action="weigh", verb="weigh"), False)
    return COMMANDS[kind](c)


def _about_none(c: Context, kind: str) -> Turn | None:
    """A command that names no object of the scene."""
    if kind in COMMANDS:
        return COMMANDS[kind](c)
    c.world.focus = None
    if kind == "say":
        words = spoken(c)
        return Turn(c.phrase(text.SAY, t=words), actions.acting("", "say", text=words), "say", literal=True)
    if kind == "light":
        on = c.rng.random() < 0.5
        return Turn(actions.command(c, c.phrase(text.LIGHT[on])), actions.acting("", "light", on=on), "light")
    if kind in ("time", "temperature"):
        block = text.TIME if kind == "time" else text.TEMPERATURE
        return Turn(c.phrase(block), actions.acting("", kind), kind)
    sentence, block = actions_text.SIMPLE[kind]
    return Turn(actions.command(c, c.phrase(block)), actions.acting(sentence, kind), "simple")


def spoken(c: Context) -> str:
    """Some words that the robot is to say."""
    return c.phrase(text.TEXTS, person=c.words.draw("person"))


def _named(talk: ToolTalk, thing: Thing) -> str:
    """How a user names one thing so that no other fits: in full, where no scene is told."""
    return refer(talk.context, thing, exact=True).text if talk.is_told else f"the {thing.name}"


def _untold(talk: ToolTalk, kind: str) -> Turn:
    """A command where no scene is told: the user names everything in full, and nothing is refused."""
    c, rng = talk.context, talk.rng
    thing, other = rng.sample(talk.world.things, 2)
    values: dict[str, Any] = {"object": thing.name}
    if kind == "place":
        values["relation"], phrase = c.phrase(actions_text.PLACE_ON).split(" :: ")
        values["target"] = other.name
        phrase = phrase.replace("{x}", f"the {thing.name}").replace("{y}", f"the {other.name}")
    elif kind == "move":
        values["position"] = rng.choice(talk.world.all_places())
        phrase = c.phrase(actions_text.MOVE, p=values["position"])
    elif kind == "push":
        values["direction"], phrase = c.phrase(actions_text.PUSH).split(" :: ")
    else:
        phrase = c.phrase(ABOUT[kind])
    user = actions.command(c, phrase.replace("{o}", f"the {thing.name}"))
    return Turn(user, actions.acting("", kind, **values), kind, literal=True)


def twice(talk: ToolTalk) -> Request | None:
    """One request that needs the same tool twice."""
    kinds = [kind for kind in TWICE if talk.tool_for(kind)]
    if not kinds:
        return None
    kind = talk.rng.choice(kinds)
    pair = _pair_of_values(talk, kind) if kind in ("turn", "say") else _pair_of_objects(talk, kind)
    if pair is None:
        return None
    user, both = pair
    c = talk.context
    c.world.focus = None
    lines = [actions.acting("", kind, **values) for values in both]
    return Request(Turn(user, "\n".join(lines), "twice", literal=kind == "say" or not talk.is_told), kind)


def _pair_of_values(talk: ToolTalk, kind: str) -> tuple[str, list[dict[str, Any]]]:
    c, rng = talk.context, talk.rng
    if kind == "say":
        words = [spoken(c), spoken(c)]
        return c.phrase(text.SAY_PAIR, t=words[0], u=words[1]), [{"text": each} for each in words]
    both = [{"direction": rng.choice(("left", "right")), "degrees": c.words.number(1, 360)} for _ in range(2)]
    ways = [rng.choice(("{}", "to the {}")).format(each["direction"]) for each in both]
    numbers = [str(each["degrees"]) for each in both]
    phrase = c.phrase(text.TURN_PAIR, d=ways[0], e=ways[1], n=numbers[0], m=numbers[1])
    return actions.command(c, phrase), both


def _pair_of_objects(talk: ToolTalk, kind: str) -> tuple[str, list[dict[str, Any]]] | None:
    c, rng, world = talk.context, talk.rng, talk.world
    things = [thing for thing in world.things if not (thing.given or thing is world.holding)]
    if len(things) < 2 or not talk.may_handle(kind):
        return None
    pair = rng.sample(things, 2)
    names = [_named(talk, thing) for thing in pair]
    both: list[dict[str, Any]] = [{"object": thing.name} for thing in pair]
    if kind == "move":
        places = _free_places(talk)
        if len(places) < 2:
            return None
        chosen = rng.sample(places, 2)
        user = c.phrase(text.MOVE_PAIR, a=names[0], b=names[1], p=chosen[0], q=chosen[1])
        for thing, values, place in zip(pair, both, chosen, strict=True):
            values["position"] = place
            if talk.is_told:
                actions.do_move(c, thing, place)
        return actions.command(c, user), both
    joined = rng.choice(text.PAIRS).replace("{a}", names[0]).replace("{b}", names[1])
    if kind == "push":
        direction, phrase = c.phrase(actions_text.PUSH).split(" :: ")
        both = [values | {"direction": direction} for values in both]
    else:
        phrase = c.phrase(ABOUT[kind])
    if kind == "give" and talk.is_told:
        for thing in pair:
            actions.do_give(c, thing)
    return actions.command(c, phrase.replace("{o}", joined)), both


def _free_places(talk: ToolTalk) -> list[str]:
    """Where an object may be moved: on a grid that is told, the free places of it."""
    world = talk.world
    if not talk.is_told:
        return world.all_places()
    return [place for place in world.all_places() if world.grid and not world.at(place)]


def lacking(talk: ToolTalk) -> Request | None:
    """A command that leaves out what its tool needs; the answer asks for it."""
    c, rng, world = talk.context, talk.rng, talk.world
    options = [(kind, missing) for kind, missing in text.LACKING if talk.tool_for(kind)]
    if not options:
        return None
    kind, missing = rng.choice(options)
    things = [thing for thing in world.things if not (thing.given or thing is world.holding)]
    wants_object = missing == "object" or kind in ("move", "push")
    if not talk.may_handle(kind) or (wants_object and not things) or (missing == "position" and not _free_places(talk)):
        return None
    values: dict[str, Any] = {}
    slots = {}
    if kind == "turn" and missing == "degrees":
        values["direction"] = rng.choice(("left", "right"))
        slots["d"] = rng.choice(("{}", "to the {}")).format(values["direction"])
    elif kind == "turn":
        values["degrees"] = c.words.number(1, 360)
        slots["n"] = str(values["degrees"])
    elif kind in ("move", "push"):
        thing = rng.choice(things)
        values["object"] = thing.name
        slots["o"] = _named(talk, thing)
    user = actions.command(c, c.phrase(text.LACKING[kind, missing], **slots))
    world.focus = None
    asking = text.ASKING[missing].replace("{o}", values.get("object", ""))
    return Request(Turn(user, asking, "lacking", literal=not talk.is_told), kind, Lack(kind, missing, values))


def completed(talk: ToolTalk, lack: Lack) -> Request | None:
    """What was missing; the answer calls the tool."""
    c, rng, world = talk.context, talk.rng, talk.world
    kind, missing, values = lack.kind, lack.missing, dict(lack.values)
    thing = next((each for each in world.things if each.name == values.get("object")), None)
    if missing in ("degrees", "seconds"):
        values[missing] = c.words.number(*((1, 360) if missing == "degrees" else (2, 120)))
        slots = {"n": str(values[missing])}
    elif missing == "direction":
        way = values[missing] = rng.choice(("left", "right") if kind == "turn" else DIRECTIONS)
        slots = {"d": rng.choice((way, f"to the {way}")) if way in ("left", "right") else way}
    elif missing == "position":
        places = _free_places(talk)
        if not places:
            return None
        values[missing] = rng.choice(places)
        slots = {"p": values[missing]}
    elif missing == "text":
        values[missing] = spoken(c)
        slots = {"t": values[missing]}
    else:
        thing = rng.choice([each for each in world.things if not (each.given or each is world.holding)])
        values[missing] = thing.name
        slots = {"o": _named(talk, thing)}
    # As a user's order has them: what was said first comes first in no call, the tool's own order counts.
    if talk.is_told and thing is not None:
        if kind == "pick":
            actions.do_pick(c, thing)
        elif kind == "give":
            actions.do_give(c, thing)
        elif kind == "move":
            actions.do_move(c, thing, values["position"])
        else:
            world.focus = thing
    user = c.phrase(text.REPLIES[missing], **slots)
    answer = actions.acting("", kind, **values)
    return Request(Turn(user, answer, "completed", literal=missing == "text" or not talk.is_told), kind)


def about_it(talk: ToolTalk) -> Request | None:
    """A command about "it"."""
    turn = it_command(talk.context) if talk.is_told else None
    return None if turn is None else Request(turn, IT)


def chosen(talk: ToolTalk) -> Request | None:
    """The reply to "Which ... do you mean?"."""
    turn = clarify(talk.context)
    return None if turn is None else Request(turn, talk.pending_kind)


def question(talk: ToolTalk) -> Request | None:
    """A question about the scene, answered in words."""
    skills, weights = zip(*QUESTIONS, strict=True)
    turn = talk.rng.choices(skills, weights)[0](talk.context) if talk.is_told else None
    return None if turn is None or _ELSEWHERE.search(turn.user) else Request(turn)


def small_talk(talk: ToolTalk) -> Request | None:
    """Small talk, answered in words."""
    turn = smalltalk.small_talk(talk.context)
    return None if _ELSEWHERE.search(turn.user) else Request(turn)


def impossible(talk: ToolTalk) -> Request | None:
    """What no robot of this kind can do."""
    turn = actions.impossible(talk.context)
    return None if _ELSEWHERE.search(turn.user) else Request(turn)


def not_offered(talk: ToolTalk) -> Request | None:
    """A command for which no tool is offered."""
    kinds = [kind for kind in (*COMMANDS, *actions_text.SIMPLE) if not talk.tool_for(kind)]
    return command(talk, talk.rng.choice(kinds)) if kinds else None


def absent(talk: ToolTalk) -> Request | None:
    """A command about an object that is not there."""
    c = talk.context
    kinds = [kind for kind in ABOUT if kind != "release" and talk.tool_for(kind)]
    if not talk.is_told or not kinds:
        return None
    kind = talk.rng.choice(kinds)
    reference, missing = absent_reference(c)
    c.world.focus = None
    if kind in HANDLING and c.world.low:
        missing = actions.low_battery(c)
    user = actions.command(c, c.phrase(ABOUT[kind], o=reference.text))
    return Request(Turn(user, missing, "missing", literal=True), kind)


#: Requests and how often they come.
REQUESTS: dict[MakeRequest, float] = {
    command: 50,
    twice: 18,
    lacking: 14,
    about_it: 4,
    question: 9,
    small_talk: 3,
    impossible: 2,
    not_offered: 4,
    absent: 3,
}
