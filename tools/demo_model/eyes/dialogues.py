"""Dialogues about pictures: the text skills, with the objects in a user's picture instead of the system prompt.

Training dialogues hold one picture, now and then a second one that replaces the scene. `PICTURE` stands for a picture
in a message's content.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.demo_model import actions, dialogue, questions
from tools.demo_model.dialogue import Dialogue
from tools.demo_model.eyes.scenes import SeenWords, seen_world
from tools.demo_model.prompts import about_robot
from tools.demo_model.scene import World
from tools.demo_model.turns import Context, Turn

PICTURE = "<|image|>"
Skill = Callable[[Context], Turn | None]

# label -> the skills that can give a turn of that label
SOURCES: dict[str, tuple[Skill, ...]] = {
    "list": (questions.list_objects,),
    "count_all": (questions.count_all,),
    "count_kind": (questions.count_kind,),
    "count_colour": (questions.count_colour,),
    "colour": (questions.colour,),
    "colour_several": (questions.colour,),
    "where": (questions.where,),
    "exists": (questions.exists,),
    "at_position": (questions.at_position,),
    "relation": (questions.relation,),
    "side": (questions.side,),
    "compare_colour": (questions.compare_colour,),
    "compare_position": (questions.compare_position,),
    "pick": (actions.pick,),
    "give": (actions.give,),
    "place_object": (actions.place,),
    "move": (actions.move,),
    "push": (actions.push,),
    "look": (actions.look,),
    "point": (actions.point,),
    "go": (actions.go,),
    "missing": (questions.where, questions.colour, actions.pick, actions.give, actions.move, actions.look),
    "ambiguous": (questions.where, questions.relation, actions.pick, actions.give, actions.push),
}
# How much rarer skills that need no picture are than in the text model's own training.
_RARER = """name who place battery need_charge user_name_tell user_name_ask small_talk impossible simple turn wait
holding release sums"""
EMPHASIS = dict.fromkeys(_RARER.split(), 0.25)
EMPTY_LABELS = {questions.list_objects: "list", questions.count_all: "count_all"}


@dataclass
class Seen:
    """A dialogue about pictures: messages whose contents hold `PICTURE` where a picture stands, and the scenes' worlds.

    `worlds` are copies of what each picture shows, in order; what happened since is not in them.
    """

    messages: list[dict[str, str]]
    worlds: list[World]
    turns: list[Turn]


def _system(world: World, rng: random.Random, split: str) -> str:
    """A system prompt that tells of no object; now and then none."""
    if rng.random() < 0.1:
        world.name = world.place = world.battery = world.limit = None
        return rng.choice(("", "", "You are a helpful assistant.", "You are a small tabletop robot."))
    return about_robot(world, rng, split)


def start(rng: random.Random, split: str) -> tuple[Dialogue, World]:
    """A dialogue that begins with a picture, and a copy of the world that the picture shows."""
    words = SeenWords(rng, split)
    world = seen_world(rng, words, split)
    shown = World(None, None, None, None, [type(t)(t.colour, t.kind, t.place, t.cell) for t in world.things], True)
    talk = Dialogue(rng, split, world=world, system=_system(world, rng, split), emphasis=EMPHASIS)
    talk.context.words = words
    return talk, shown


def _place_picture(messages: list[dict[str, str]]) -> None:
    """Put a picture before the text of the first user message."""
    message = next(m for m in messages if m["role"] == "user")
    message["content"] = PICTURE + message["content"]


def seen_dialogue(rng: random.Random, split: str, turns: int, second: float = 0.12) -> Seen:
    """A random dialogue of about that many turns; with probability `second` another picture comes in the middle."""
    talk, shown = start(rng, split)
    worlds, done = [shown], []
    stops = [turns] if rng.random() >= second or turns < 4 else [turns // 2, turns - turns // 2]
    messages: list[dict[str, str]] = []
    for number, stop in enumerate(stops):
        if number:
            if talk.world.holding:  # what became of it the next picture could not tell
                break
            following, shown = start(rng, split)
            kept = talk.world
            for name in ("name", "place", "battery", "limit", "user_name"):
                setattr(following.world, name, getattr(kept, name))
            following.messages = []
            talk, worlds = following, [*worlds, shown]
        for _ in range(3 * stop):
            result = talk.turn()
            if result is not None:
                done.append(result)
            if sum(m["role"] == "user" for m in talk.messages) >= stop:
                break
        if any(m["role"] == "user" for m in talk.messages):
            _place_picture(talk.messages)
            messages, talk.messages = messages + talk.messages, []
        else:
            worlds.pop()
    return Seen(messages, worlds, done)


def _label(turn: Turn, skill: Skill) -> str:
    if turn.label == "empty":
        return EMPTY_LABELS[skill]
    return "place_object" if turn.label == "place" else turn.label


def seen_items(seed: int, count_per_skill: int, labels: tuple[str, ...] = tuple(SOURCES)) -> list[dict]:
    """Items {skill, messages, worlds, accepted}: held-out phrasings about scenes with held-out pairs.

    Half of the items come after earlier turns about the same picture.
    """
    items = []
    for label in labels:
        found, attempt = 0, 0
        while found < count_per_skill:
            attempt += 1
            rng = random.Random(f"eyes {seed} {label} {attempt}")
            talk, shown = start(rng, "eval")
            for _ in range(rng.choice((0, 0, 0, 1, 2, 3))):
                talk.turn(talk.next_skill() if talk.world.pending is None else dialogue.clarify)
            if talk.world.pending is not None:
                continue
            skill = rng.choice(SOURCES[label])
            turn = talk.turn(skill)
            if turn is None or _label(turn, skill) != label or len(talk.messages) > 12:
                continue
            _place_picture(talk.messages)
            accepted = list(dict.fromkeys((turn.answer, *turn.accepted)))
            items.append({"skill": label, "messages": talk.messages[:-1], "worlds": [shown], "accepted": accepted})
            found += 1
    return items
