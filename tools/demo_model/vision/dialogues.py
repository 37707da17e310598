"""Dialogues about pictures: the text skills, with the objects in a user's picture instead of the system prompt.

Training dialogues hold one picture, some of them a second and a third that each replace the scene. `PICTURE` stands for
a picture in a message's content.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.demo_model import actions, dialogue, questions
from tools.demo_model.dialogue import Dialogue
from tools.demo_model.prompts import about_robot
from tools.demo_model.questions_text import RELATION
from tools.demo_model.scene import Thing, World
from tools.demo_model.turns import Context, Turn, absent_reference
from tools.demo_model.vision.phrases_text import IN_PICTURE
from tools.demo_model.vision.scenes import NOVEL, SeenWords, seen_world

PICTURE = "<|image|>"
Skill = Callable[[Context], Turn | None]

_ABOUT_PICTURE = (questions.list_objects, questions.count_all, questions.count_kind, questions.exists, questions.where)
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
    "in_picture": _ABOUT_PICTURE,
    "next_picture": (*_ABOUT_PICTURE, questions.colour, questions.at_position, actions.pick, actions.give),
}
EXTRA_LABELS = {"in_picture", "next_picture"}
# How much rarer skills that need no picture are than in the text model's own training.
_RARER = """name who place battery need_charge user_name_tell user_name_ask small_talk impossible simple turn wait
holding release sums"""
EMPHASIS = dict.fromkeys(_RARER.split(), 0.25) | {"list_objects": 1.5, "count_all": 1.5}
EMPTY_LABELS = {questions.list_objects: "list", questions.count_all: "count_all"}


@dataclass
class SeenContext(Context):
    """A context whose questions name the picture now and then."""

    share: float = 0.3

    def phrase(self, block: str, **slots: str) -> str:
        """A phrasing as `Context.phrase`; where there is one that names the picture, it is taken with `share`."""
        named = block in IN_PICTURE and self.rng.random() < self.share
        return super().phrase(IN_PICTURE[block] if named else block, **slots)


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


def start(rng: random.Random, split: str, novel: float = 0.0) -> tuple[Dialogue, World]:
    """A dialogue that begins with a picture, and a copy of the world that the picture shows.

    `novel` is the share of held-out pairs among the objects. In evaluation no question names the picture unasked.
    """
    words = SeenWords(rng, split)
    world = seen_world(rng, words, novel)
    shown = World(None, None, None, None, [Thing(t.colour, t.kind, t.place, t.cell) for t in world.things], True)
    talk = Dialogue(rng, split, world=world, system=_system(world, rng, split), emphasis=EMPHASIS)
    talk.context = SeenContext(world, rng, words, split, 0.3 if split == "train" else 0.0)
    return talk, shown


def following(talk: Dialogue, novel: float = 0.0) -> tuple[Dialogue, World]:
    """A dialogue without messages yet that goes on from another with a new picture: the same robot, another scene."""
    new, shown = start(talk.rng, talk.context.split, novel)
    for name in ("name", "place", "battery", "limit", "user_name"):
        setattr(new.world, name, getattr(talk.world, name))
    new.messages = []
    return new, shown


def relation_of_missing(c: Context) -> Turn:
    """What is left of an object that is not there: training only, since the text skills never ask that."""
    reference, answer = absent_reference(c)
    _, phrasing = c.phrase(RELATION).split(" :: ")
    c.world.focus = None
    return Turn(phrasing.replace("{o}", reference.text), answer, "missing", literal=True)


def _place_picture(messages: list[dict[str, str]]) -> None:
    """Put a picture before the text of the first user message."""
    message = next(m for m in messages if m["role"] == "user")
    message["content"] = PICTURE + message["content"]


def seen_dialogue(rng: random.Random, split: str, turns: int, pictures: int = 1) -> Seen:
    """A random dialogue of about that many turns, and at most so many pictures, the turns divided among them."""
    talk, shown = start(rng, split)
    messages, worlds, done = [], [shown], []
    for number in range(pictures):
        if number:
            if talk.world.holding:  # what became of it the next picture could not tell
                break
            talk, shown = following(talk)
            worlds.append(shown)
        stop = turns * (number + 1) // pictures - turns * number // pictures
        for _ in range(3 * stop):
            asked_in_vain = talk.world.pending is None and rng.random() < 0.03
            result = talk.turn(relation_of_missing if asked_in_vain else None)
            if result is not None:
                done.append(result)
            if sum(m["role"] == "user" for m in talk.messages) >= stop:
                break
        if not any(m["role"] == "user" for m in talk.messages):
            worlds.pop()
            break
        _place_picture(talk.messages)
        messages, talk.messages = messages + talk.messages, []
    return Seen(messages, worlds, done)


def _label(turn: Turn, skill: Skill) -> str:
    if turn.label == "empty":
        return EMPTY_LABELS[skill]
    return "place_object" if turn.label == "place" else turn.label


def _turns(talk: Dialogue, count: int) -> None:
    for _ in range(count):
        talk.turn(talk.next_skill() if talk.world.pending is None else dialogue.clarify)


def _item(rng: random.Random, label: str, novel: float) -> dict | None:
    """One held-out item of a label, or None where it did not come about."""
    talk, shown = start(rng, "eval", novel)
    worlds, messages = [shown], []
    if label == "next_picture":
        for _ in range(rng.choice((1, 1, 2))):
            _turns(talk, rng.choice((1, 1, 2)))
            if talk.world.pending is not None or talk.world.holding or len(talk.messages) < 2:
                return None
            _place_picture(talk.messages)
            messages += talk.messages
            talk, shown = following(talk, novel)
            worlds.append(shown)
    else:
        _turns(talk, rng.choice((0, 0, 0, 1, 2, 3)))
    if talk.world.pending is not None:
        return None
    if label in EXTRA_LABELS:
        talk.context.share = 1.0 if label == "in_picture" else 0.3
    skill = rng.choice(SOURCES[label])
    turn = talk.turn(skill)
    if turn is None or len(talk.messages) > 12 or (label not in EXTRA_LABELS and _label(turn, skill) != label):
        return None
    _place_picture(talk.messages)
    messages = (messages + talk.messages)[:-1]
    return {
        "skill": label,
        "messages": messages,
        "worlds": worlds,
        "accepted": list(dict.fromkeys((turn.answer, *turn.accepted))),
    }


def seen_items(
    seed: int, count_per_skill: int, labels: tuple[str, ...] = tuple(SOURCES), novel: float = NOVEL
) -> list[dict]:
    """Items {skill, messages, worlds, accepted}: held-out phrasings about new scenes.

    A share `novel` of the objects is of held-out pairs of colour and kind, as many as there are by default. Half of the
    items come after earlier turns about the same picture; those of `next_picture` after other pictures.
    """
    items = []
    for label in labels:
        attempt, found = 0, []
        while len(found) < count_per_skill:
            attempt += 1
            item = _item(random.Random(f"eyes {seed} {label} {attempt}"), label, novel)
            if item:
                found.append(item)
        items += found
    return items
