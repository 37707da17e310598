"""Commands: one sentence and one JSON action on its own line, or one sentence that says why not."""

import json
from collections.abc import Callable

from tools.demo_model import actions_text as text
from tools.demo_model.scene import Thing
from tools.demo_model.turns import Context, Reference, Turn, absent_reference, any_thing, ask_which, refer
from tools.demo_model.words import CONTAINER_KINDS, LISTS

CANNOT = "I cannot do that. I am a small robot on a table."


def acting(sentence: str, action: str, **arguments: object) -> str:
    """The answer to a command: sentence, line break, JSON with the action first."""
    return f"{sentence}\n{json.dumps({'action': action, **arguments}, ensure_ascii=False)}"


def command(c: Context, phrase: str) -> str:
    """The bare command with a polite, curt or addressing frame around it."""
    name = c.world.name or "robot"
    prefix = c.phrase(text.PREFIXES, name=name) if c.rng.random() < 0.5 else ""
    suffix = c.phrase(text.SUFFIXES, name=name) if c.rng.random() < 0.35 else ""
    if (
        phrase.startswith(("can ", "could ", "may ", "i ", "i'", "let ", "the ", "would you ", "you ", "it "))
        or phrase[0].isdigit()
    ):
        prefix = ""
    joined = f"{prefix} {phrase} {suffix}".strip()
    return " ".join(joined.split()).replace(" ,", ",")


def low_battery(c: Context) -> str:
    return f"My battery is at {c.world.battery} percent, so I must charge first."


def _blocked(c: Context, thing: Thing | None = None) -> tuple[str, str] | None:
    """Why handling a thing is refused: battery rule, hand full, thing handed over."""
    world = c.world
    if world.low:
        return low_battery(c), "low_battery"
    if thing and thing.given:
        return f"You have the {thing.name}.", "busy"
    if thing and world.holding and world.holding is not thing:
        return f"I am already holding the {world.holding.name}.", "busy"
    return None


def _reference(c: Context) -> tuple[Reference, str]:
    """A reference to a random object, or to none (with the answer to that)."""
    thing = any_thing(c)
    if thing is None or c.rng.random() < 0.1:
        return absent_reference(c)
    return refer(c, thing), ""


def _with_object(c: Context, block: str, act: Callable[[Thing], tuple[str, str]], handles: bool) -> Turn:
    """A command about one object; `act` carries it out and returns answer and label."""
    reference, missing = _reference(c)
    user = command(c, c.phrase(block, o=reference.text))
    return _resolve(c, user, reference, missing, act, handles)


def _resolve(c, user, reference, missing, act, handles) -> Turn:
    if handles and c.world.low:
        c.world.focus = None
        return Turn(user, low_battery(c), "low_battery", literal=bool(missing))
    if missing:
        c.world.focus = None
        return Turn(user, missing, "missing", literal=True)
    if len(reference.things) > 1:
        return Turn(user, ask_which(c, reference, act), "ambiguous")
    answer, label = act(reference.thing)
    return Turn(user, answer, label)


def do_pick(c: Context, thing: Thing) -> tuple[str, str]:
    c.world.focus = thing
    if c.world.holding is thing:
        return f"I am already holding the {thing.name}.", "busy"
    blocked = _blocked(c, thing)
    if blocked:
        c.world.focus = None
        return blocked
    c.world.remove_from_place(thing)
    c.world.holding = thing
    return acting(f"I will pick up the {thing.name}.", "pick", object=thing.name), "pick"


def do_give(c: Context, thing: Thing) -> tuple[str, str]:
    c.world.focus = None
    blocked = _blocked(c, thing)
    if blocked:
        return blocked
    c.world.remove_from_place(thing)
    thing.given, c.world.holding = True, None
    return acting(f"I will hand you the {thing.name}.", "give", object=thing.name), "give"


def do_place(c: Context, thing: Thing, relation: str, target: Thing) -> tuple[str, str]:
    world = c.world
    world.focus = None
    blocked = _blocked(c, thing)
    if blocked:
        return blocked
    if target.given:
        return f"You have the {target.name}.", "busy"
    world.remove_from_place(thing)
    thing.moved, world.holding, world.focus = f"{relation} the {target.name}", None, thing
    return acting(
        f"I will put the {thing.name} {relation} the {target.name}.",
        "place",
        object=thing.name,
        relation=relation,
        target=target.name,
    ), "place"


def do_move(c: Context, thing: Thing, place: str) -> tuple[str, str]:
    world = c.world
    world.focus = None
    blocked = _blocked(c, thing)
    if blocked:
        return blocked
    occupant = next((t for t in world.at(place) if t is not thing), None)
    if occupant:
        return f"The {place} is not free: the {occupant.name} is there.", "occupied"
    cells = {world.grid_place((row, column)): (row, column) for row in range(3) for column in range(3)}
    world.remove_from_place(thing)
    thing.place, thing.cell, world.holding, world.focus = place, cells[place], None, thing
    return acting(f"I will move the {thing.name} to the {place}.", "move", object=thing.name, position=place), "move"


def do_release(c: Context, thing: Thing) -> tuple[str, str]:
    world = c.world
    if world.holding is not thing:
        world.focus = None
        return f"I am not holding the {thing.name}.", "release"
    thing.moved, world.holding, world.focus = "on the table", None, thing
    return acting(f"I will put down the {thing.name}.", "release", object=thing.name), "release"


def do_push(c: Context, thing: Thing, direction: str) -> tuple[str, str]:
    c.world.focus = None
    if c.world.low:
        return low_battery(c), "low_battery"
    if thing.given:
        return f"You have the {thing.name}.", "busy"
    if thing is c.world.holding:
        return f"I am already holding the {thing.name}.", "busy"
    c.world.focus = thing
    way = {"left": "to the left", "right": "to the right"}.get(direction, direction)
    return acting(f"I will push the {thing.name} {way}.", "push", object=thing.name, direction=direction), "push"


def do_plain(c: Context, thing: Thing, action: str, verb: str) -> tuple[str, str]:
    """Look, point, go: allowed at any battery level, whatever is in the hand."""
    c.world.focus = None
    if thing.given:
        return f"You have the {thing.name}.", "busy"
    c.world.focus = thing
    return acting(f"I will {verb} the {thing.name}.", action, object=thing.name), action


def pick(c: Context) -> Turn:
    return _with_object(c, text.PICK, lambda thing: do_pick(c, thing), True)


def give(c: Context) -> Turn:
    return _with_object(c, text.GIVE, lambda thing: do_give(c, thing), True)


def look(c: Context) -> Turn:
    return _with_object(c, text.LOOK, lambda thing: do_plain(c, thing, "look", "look at"), False)


def point(c: Context) -> Turn:
    return _with_object(c, text.POINT, lambda thing: do_plain(c, thing, "point", "point at"), False)


def go(c: Context) -> Turn:
    return _with_object(c, text.GO, lambda thing: do_plain(c, thing, "go", "go to"), False)


def push(c: Context) -> Turn:
    direction, phrase = c.phrase(text.PUSH).split(" :: ")
    reference, missing = _reference(c)
    user = command(c, phrase.replace("{o}", reference.text))
    return _resolve(c, user, reference, missing, lambda thing: do_push(c, thing, direction), True)


def move(c: Context) -> Turn | None:
    world = c.world
    if not world.grid or not world.things:
        return None
    places = world.all_places()
    free = [p for p in places if not world.at(p)]
    place = c.rng.choice(free) if c.rng.random() < 0.8 else c.rng.choice(places)
    reference, missing = _reference(c)
    if any(thing.place == place for thing in reference.things):
        return None
    user = command(c, c.phrase(text.MOVE, o=reference.text, p=place))
    return _resolve(c, user, reference, missing, lambda thing: do_move(c, thing, place), True)


def _relation_and_target(c: Context, block: str, thing: Thing) -> tuple[str, str, Reference] | None:
    """A relation that suits a target: things go into containers (and, in training, into anything unknown)."""
    for _ in range(20):
        relation, phrase = c.phrase(block).split(" :: ")
        others = [t for t in c.world.things if t is not thing and t is not c.world.holding]
        if relation == "in":
            others = [t for t in others if t.kind in CONTAINER_KINDS or t.kind not in LISTS["kind"]]
        if others:
            target = refer(c, c.rng.choice(others), exact=True)
            return relation, phrase.replace("{y}", target.text), target
    return None


def place(c: Context) -> Turn | None:
    world = c.world
    thing = world.holding if world.holding and c.rng.random() < 0.5 else any_thing(c)
    if thing is None:
        return None
    chosen = _relation_and_target(c, text.PLACE_ON, thing)
    if chosen is None:
        return None
    relation, phrase, target = chosen
    reference, missing = absent_reference(c) if c.rng.random() < 0.08 else (refer(c, thing), "")
    if target.thing in reference.things:
        return None
    if c.rng.random() < 0.08 and not missing:  # the target is absent instead
        reference = refer(c, thing, exact=True)
        absent, missing = absent_reference(c)
        phrase = phrase.replace(target.text, absent.text)
        if absent.text not in phrase:
            return None
    user = command(c, phrase.replace("{x}", reference.text))
    return _resolve(c, user, reference, missing, lambda chosen: do_place(c, chosen, relation, target.thing), True)


def turn(c: Context) -> Turn:
    direction, phrase = c.phrase(text.TURN).split(" :: ")
    degrees = c.words.number(1, 360)
    user = command(c, phrase.replace("{n}", str(degrees)))
    c.world.focus = None
    return Turn(
        user,
        acting(f"I will turn {direction} {degrees} degrees.", "turn", direction=direction, degrees=degrees),
        "turn",
    )


def wait(c: Context) -> Turn:
    seconds = c.words.number(2, 120)
    c.world.focus = None
    return Turn(
        command(c, c.phrase(text.WAIT, n=str(seconds))),
        acting(f"I will wait {seconds} seconds.", "wait", seconds=seconds),
        "wait",
    )


def simple(c: Context) -> Turn:
    action = c.rng.choice(list(text.SIMPLE))
    sentence, block = text.SIMPLE[action]
    return Turn(command(c, c.phrase(block)), acting(sentence, action), "simple")


def impossible(c: Context) -> Turn:
    c.world.focus = None
    return Turn(command(c, c.phrase(text.IMPOSSIBLE)), CANNOT, "impossible")


def release(c: Context) -> Turn | None:
    """Put down what is held, by name or as "it"; or be told to without holding anything."""
    world, rng = c.world, c.rng
    if world.holding:
        if rng.random() < 0.8:
            thing = world.holding
            word = "it" if rng.random() < 0.5 else refer(c, thing, exact=True).text
        else:
            thing = any_thing(c)
            word = refer(c, thing, exact=True).text
        answer, label = do_release(c, thing)
        return Turn(command(c, c.phrase(text.RELEASE, o=word)), answer, label)
    if world.focus or rng.random() < 0.7:
        return None
    return Turn(command(c, c.phrase(text.RELEASE, o="it")), "I am not holding anything.", "release")
