"""Dialogues: skills one after the other about one scene, with turns that refer back ("it", "the red one")."""

import random
from collections.abc import Callable
from functools import partial

from tools.demo_model import actions, questions, smalltalk
from tools.demo_model import actions_text as text
from tools.demo_model.noise import typed
from tools.demo_model.prompts import system_prompt
from tools.demo_model.questions_text import COLOUR, WHERE
from tools.demo_model.scene import World, random_world
from tools.demo_model.turns import Context, Turn
from tools.demo_model.words import Words


def it_question(c: Context) -> Turn | None:
    """ "Where is it?", "What colour is it?" about the object of the turn before."""
    thing = c.world.focus
    if thing is None:
        return None
    if c.rng.random() < 0.5:
        return Turn(c.phrase(WHERE, o="it"), questions.where_is(c, thing), "it_question")
    return Turn(c.phrase(COLOUR, o="it"), questions.colour_of(thing), "it_question")


def it_command(c: Context) -> Turn | None:
    """A command about "it": the object of the turn before."""
    world, thing = c.world, c.world.focus
    if thing is None or (world.holding and world.holding is not thing):
        return None
    kind = c.rng.choice(("place", "place", "place", "give", "pick", "move", "push", "look", "point", "go"))
    if kind == "place":
        chosen = actions._relation_and_target(c, text.IT_PLACE, thing)
        if chosen is None:
            return None
        relation, phrase, target = chosen
        if target.thing is thing:
            return None
        answer, label = actions.do_place(c, thing, relation, target.thing)
    elif kind == "move":
        if not world.grid:
            return None
        place = c.rng.choice(world.all_places())
        if thing.place == place:
            return None
        phrase = c.phrase(text.MOVE, o="it", p=place)
        answer, label = actions.do_move(c, thing, place)
    elif kind == "push":
        direction, phrase = c.phrase(text.PUSH, o="it").split(" :: ")
        answer, label = actions.do_push(c, thing, direction)
    else:
        block = {"give": text.GIVE, "pick": text.PICK, "look": text.LOOK, "point": text.POINT, "go": text.GO}[kind]
        phrase = c.phrase(block, o="it")
        act = {
            "give": actions.do_give,
            "pick": actions.do_pick,
            "look": partial(actions.do_plain, action="look", verb="look at"),
            "point": partial(actions.do_plain, action="point", verb="point at"),
            "go": partial(actions.do_plain, action="go", verb="go to"),
        }[kind]
        answer, label = act(c, thing)
    label = "it_command" if label in ("place", "give", "pick", "move", "push", "look", "point", "go") else label
    return Turn(actions.command(c, phrase), answer, label)


def clarify(c: Context) -> Turn | None:
    """The reply to "Which ... do you mean?": the object by name, colour or kind, whatever tells it apart."""
    world = c.world
    if world.pending is None:
        return None
    thing, complete = c.rng.choice(world.candidates), world.pending
    same_kind = len({t.kind for t in world.candidates}) == 1
    if same_kind:
        phrase = c.phrase(
            text.CLARIFY, o=c.rng.choice((f"the {thing.name}", f"the {thing.colour} one")), c=thing.colour
        )
    else:
        phrase = c.rng.choice(("the {k}", "{k}", "the {k} please", "i mean the {k}", "the {n}")).replace(
            "{k}", thing.kind
        )
        phrase = phrase.replace("{n}", thing.name)
    world.pending = None
    answer, _ = complete(thing)
    return Turn(phrase, answer, "clarify")


def unknown(c: Context, utterances: list[str]) -> Turn | None:
    return smalltalk.unknown(c, utterances)


SKILLS: list[tuple[Callable[[Context], Turn | None], float]] = [
    (questions.name, 2),
    (questions.who, 1),
    (questions.place, 2),
    (questions.battery, 2),
    (questions.need_charge, 2),
    (questions.list_objects, 3),
    (questions.colour, 4),
    (questions.where, 5),
    (questions.exists, 5),
    (questions.count_kind, 4),
    (questions.count_colour, 4),
    (questions.count_all, 3),
    (questions.at_position, 5),
    (questions.relation, 7),
    (questions.side, 3),
    (questions.compare_colour, 3),
    (questions.compare_position, 5),
    (questions.holding, 2),
    (questions.user_name_tell, 1),
    (questions.user_name_ask, 1),
    (actions.pick, 5),
    (actions.place, 7),
    (actions.move, 5),
    (actions.push, 3),
    (actions.give, 4),
    (actions.look, 2),
    (actions.point, 2),
    (actions.go, 2),
    (actions.turn, 2),
    (actions.wait, 1),
    (actions.simple, 7),
    (actions.impossible, 7),
    (actions.release, 6),
    (it_question, 5),
    (it_command, 6),
    (smalltalk.small_talk, 14),
    (smalltalk.sums, 0.7),
]


class Dialogue:
    """One scene and its turns. `turn` appends one exchange, of a given skill or a random one."""

    def __init__(
        self,
        rng: random.Random,
        split: str,
        pool: tuple[str, ...] = (),
        utterances: list[str] | None = None,
        world: World | None = None,
        system: str | None = None,
        emphasis: dict[str, float] | None = None,
    ):
        self.rng, self.utterances, self.emphasis = rng, utterances or [], emphasis or {}
        words = Words(rng, split, pool)
        self.messages: list[dict[str, str]] = []
        self.world = world or random_world(rng, words)
        if world is None and rng.random() < 0.07:  # no system prompt, or one that tells nothing
            self.world = World(None, None, None, None, [], False)
            system = rng.choice(("", "", "You are a helpful assistant.", "You are a small tabletop robot."))
        elif system is None:
            system = system_prompt(self.world, rng, split)
        if system:
            self.messages.append({"role": "system", "content": system})
        self.context = Context(self.world, rng, words, split)

    def next_skill(self) -> Callable[[Context], Turn | None]:
        """A random skill; a pending question back is nearly always answered."""
        if self.world.pending is not None and self.rng.random() < 0.85:
            return clarify
        if self.utterances and self.rng.random() < (0.02 if self.world.things else 0.1):
            return partial(unknown, utterances=self.utterances)
        weights = [weight * self.emphasis.get(skill.__name__, 1) for skill, weight in SKILLS]
        return self.rng.choices([skill for skill, _ in SKILLS], weights)[0]

    def turn(self, skill: Callable[[Context], Turn | None] | None = None) -> Turn | None:
        """Append a turn and return it; None (and nothing appended) where the skill does not fit the scene."""
        before = self.world.pending
        chosen = skill or self.next_skill()
        result = chosen(self.context)
        if result is None:
            return None
        if self.world.pending is before:
            self.world.pending = None
        user = typed(result, self.world, self.rng, self.context.split == "train")
        self.messages += [{"role": "user", "content": user}, {"role": "assistant", "content": result.answer}]
        return result


def dialogue(
    rng: random.Random,
    split: str,
    turns: int,
    pool: tuple[str, ...] = (),
    utterances: list[str] | None = None,
    emphasis: dict[str, float] | None = None,
) -> list[dict[str, str]]:
    """The messages of a dialogue with about that many turns; `emphasis` multiplies the weights of skills by name."""
    result = Dialogue(rng, split, pool, utterances, emphasis=emphasis)
    for _ in range(turns * 2):
        result.turn()
        if len(result.messages) >= 2 * turns:
            break
    return result.messages
