"""System prompts: the same scene written in the ways a robotics programmer would write it."""

import json
import random

from tools.demo_model.grammar import choose
from tools.demo_model.scene import Thing, World
from tools.demo_model.words import article, join

INTRODUCTIONS = """
You are {name}, a small tabletop robot.
You are {name}, a (small|little|friendly|helpful) robot (on|at) a table.
You are a (small|friendly|) tabletop robot (named|called) {name}.
You are the robot {name}.
Your name is {name}.
Your name is {name} and you are a (small|little) robot.
You are {name}.
~ You are {name}, a (tiny|cheerful) robot arm.
"""
PLACES = """
You are (now|currently|) at {place}.
(Your place|Your location|Your workplace) is {place}.
You (stand|work|live|sit) at {place}.
You are located at {place}.
~ You have been set up at {place}.
"""
BATTERIES = """
Your battery is at {battery} percent.
(Your battery|Your battery level|Battery|Battery level|The battery) is {battery}%.
Your battery (is at|shows|has) {battery}%.
Battery: {battery} (%|percent).
~ Your battery is charged to {battery} percent.
"""
RULES = """
(Do not|Never|You must not) (handle|touch) objects (when|if|while) (the|your) battery is below {limit} percent.
(When|If) (the|your) battery is below {limit} percent, (do not handle|do not touch|leave) (any objects|objects).
(When|If) your battery is below {limit} percent, do not handle objects and ask to be charged.
Below {limit}% battery you (may not|must not) handle objects.
Minimum battery for handling objects: {limit}%.
(Never|Do not) (handle|touch|pick up|move) (objects|things) below {limit} (percent|percent battery|% battery|%).
(Never|Do not) (handle|touch|pick up|move) anything below {limit} (percent|percent battery|% battery|%).
(Never|Do not) (handle|touch|move) (objects|things|anything) under {limit} (percent|percent battery|%).
No (handling of objects|object handling) below {limit} percent (battery|).
(You may|You can) handle objects only (above|from) {limit} percent battery.
~ Handle objects only with at least {limit} percent battery.
"""
EXTRAS = """
(Answer|Reply|Speak) (briefly|in short sentences|politely|kindly|in one sentence).
Be (friendly|polite|brief|kind|helpful).
(Help|Assist) the people (around you|at the table).
Today is (Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday).
For every command, (say what you will do and then|) give one JSON action.
You (can|may) (pick up, move and hand over|move) objects.
(People|Children|Visitors) will talk to you.
Only talk about (what you know|objects in the list).
"""
SCENE_LINES = """
(On the table you see|You see|In front of you are|On the table there are) {list}.
(Objects on the table|The objects are|You can see) {list}.
(These|The following) objects are (here|on the table|in front of you|around you): {list}.
(On the table|Objects|Things on the table|You see): {list}.
~ (Within reach are|Around you there are) {list}.
"""
EMPTY_LINES = """
(The table is empty.|There are no objects on the table.|You see no objects.|Objects: none.|The table is clear.|)
"""


def _placed(thing: Thing) -> str:
    return f"{article(thing.name)} {thing.location()}"


def _bare(thing: Thing) -> str:
    return thing.place


def _intro(world: World, rng: random.Random, split: str) -> list[str]:
    """The sentences about the robot itself, battery rule and remarks, in an order that varies a little."""
    first = (
        choose(rng, INTRODUCTIONS, split).replace("{name}", world.name)
        if world.name
        else rng.choice(("You are a small tabletop robot.", "You are a robot on a table.", "You are a helpful robot."))
    )
    facts = []
    if world.place:
        facts.append(choose(rng, PLACES, split).replace("{place}", world.place))
    if world.battery is not None:
        facts.append(choose(rng, BATTERIES, split).replace("{battery}", str(world.battery)))
    if rng.random() < 0.3:
        rng.shuffle(facts)
    return [first, *facts]


def _rule(world: World, rng: random.Random, split: str) -> list[str]:
    return [choose(rng, RULES, split).replace("{limit}", str(world.limit))] if world.limit is not None else []


def _extras(rng: random.Random) -> list[str]:
    return [choose(rng, EXTRAS, "train") for _ in range(rng.choice((0, 0, 0, 1, 1, 2)))]


def prose(world: World, rng: random.Random, split: str) -> str:
    """Sentences, the objects in one list or one sentence each."""
    parts = _intro(world, rng, split)
    tail = _rule(world, rng, split) + _extras(rng)
    rng.shuffle(tail)
    if not world.things:
        scene = [choose(rng, EMPTY_LINES, "train")]
    elif rng.random() < 0.6:
        items = [_placed(thing) for thing in world.things]
        text = join(items) if rng.random() < 0.7 else (", ", "; ")[rng.random() < 0.5].join(items)
        scene = [choose(rng, SCENE_LINES, split).replace("{list}", text)]
    else:
        form = rng.choice(("The {n} is {p}.", "There is {a} {p}.", "{A} is {p}.", "You see {a} {p}."))
        scene = [
            form.replace("{n}", t.name)
            .replace("{a}", article(t.name))
            .replace("{A}", article(t.name).capitalize())
            .replace("{p}", t.location())
            for t in world.things
        ]
    body = parts + scene + tail if rng.random() < 0.75 else parts + tail + scene
    separator = rng.choice((" ", " ", "\n"))
    return separator.join(part for part in body if part)


def bullets(world: World, rng: random.Random, split: str) -> str:
    """Sentences about the robot, then one object a line."""
    mark = rng.choice(("- {}", "- {}", "* {}", "{i}. {}", "  {}"))
    item = rng.choice(
        ("{n}: {p}", "{n}, {p}", "{n} ({p})", "{a} {l}", "{n} {l}", "{n} - {p}", "{n} | {p}", "{n} at: {p}")
    )
    lines = [" ".join(_intro(world, rng, split) + _extras(rng))]
    rule = _rule(world, rng, split)
    if rng.random() < 0.5:
        lines += rule
        rule = []
    lines.append(
        rng.choice(("Objects:", "Objects on the table:", "On the table:", "You see:", "Things on the table:", "Table:"))
    )
    for index, thing in enumerate(world.things):
        text = (
            item.replace("{n}", thing.name)
            .replace("{p}", _bare(thing))
            .replace("{a}", article(thing.name))
            .replace("{l}", thing.location())
        )
        lines.append(mark.replace("{i}", str(index + 1)).replace("{}", text))
    if not world.things:
        lines[-1] += " none"
    return "\n".join(lines + rule)


def fields(world: World, rng: random.Random, split: str) -> str:
    """`key: value` lines, objects as `colour kind: place` or with a key for each property."""
    upper = rng.random() < 0.5
    key = (lambda text: text.capitalize()) if upper else (lambda text: text)
    lines = [rng.choice(("You are a small tabletop robot.", "You are a robot on a table.", "Robot state", ""))]
    facts = []
    if world.name:
        facts.append(f"{key(rng.choice(('name', 'robot', 'robot name')))}: {world.name}")
    if world.place:
        facts.append(f"{key(rng.choice(('place', 'location')))}: {world.place}")
    if world.battery is not None:
        facts.append(f"{key('battery')}: {world.battery}{rng.choice(('%', ' percent', ' %', ''))}")
    if world.limit is not None:
        facts.append(
            f"{key(rng.choice(('minimum battery for handling objects', 'handle objects only above battery')))}: "
            f"{world.limit}{rng.choice(('%', ' percent'))}"
        )
    if rng.random() < 0.3:
        rng.shuffle(facts)
    lines += facts
    colour = rng.choice(("colour", "color"))
    style = rng.choice(("pair", "keys", "short"))
    rows = []
    for thing in world.things:
        if style == "keys":
            parts = [f"{colour}: {thing.colour}", f"kind: {thing.kind}"]
            if rng.random() < 0.4:
                parts.reverse()
            rows.append(f"- {', '.join(parts)}, {rng.choice(('position', 'place'))}: {_bare(thing)}")
        elif style == "pair":
            rows.append(f"- {thing.name}: {_bare(thing)}")
        else:
            rows.append(f"{thing.name} = {_bare(thing)}")
    lines += [f"{key('objects')}:{'' if rows else ' none'}", *rows]
    return "\n".join(line for line in lines if line)


def compact(world: World, rng: random.Random, split: str) -> str:
    """One terse paragraph."""
    parts = [f"Robot {world.name}." if world.name else "Tabletop robot."]
    if world.place:
        parts.append(f"Location: {world.place}.")
    if world.battery is not None:
        parts.append(f"Battery {world.battery}%.")
    parts += _rule(world, rng, split)
    form = rng.choice(("{n} ({p})", "{n} {l}", "{n}: {p}"))
    items = [form.replace("{n}", t.name).replace("{p}", _bare(t)).replace("{l}", t.location()) for t in world.things]
    parts.append(f"{rng.choice(('Table', 'Objects', 'On the table'))}: {'; '.join(items) if items else 'empty'}.")
    return " ".join(parts)


def as_json(world: World, rng: random.Random, split: str) -> str:
    """A sentence and the state as JSON, as a program would dump it."""
    colour = rng.choice(("colour", "color"))
    place = rng.choice(("position", "place"))
    state: dict[str, object] = {}
    if world.name:
        state["name"] = world.name
    if world.place:
        state[rng.choice(("place", "location"))] = world.place
    if world.battery is not None:
        state["battery"] = world.battery
    if world.limit is not None:
        state["minimum_battery_for_handling"] = world.limit
    form = rng.random() < 0.7
    state["objects"] = [
        {colour: t.colour, "kind": t.kind, place: _bare(t)} if form else {"object": t.name, place: _bare(t)}
        for t in world.things
    ]
    text = json.dumps(state, ensure_ascii=False, indent=rng.choice((None, None, 1)))
    head = rng.choice(
        ("You are a small tabletop robot. This is what you know:", "You are a robot on a table. Your state:", "")
    )
    return f"{head}\n{text}".strip()


def about_robot(world: World, rng: random.Random, split: str) -> str:
    """A system prompt that tells of the robot and of no object, for scenes that only a picture shows."""
    tail = _rule(world, rng, split) + _extras(rng)
    rng.shuffle(tail)
    return rng.choice((" ", " ", "\n")).join([*_intro(world, rng, split), *tail])


def system_prompt(world: World, rng: random.Random, split: str) -> str:
    """A system prompt for the world in one of five layouts."""
    layout = rng.choices((prose, bullets, fields, compact, as_json), (40, 24, 14, 10, 12))[0]
    return layout(world, rng, split)
