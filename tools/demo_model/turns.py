"""What every skill needs: the turn it returns, references to objects, and their resolution against the scene."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.demo_model.grammar import choose
from tools.demo_model.scene import Thing, World
from tools.demo_model.words import Words, article


@dataclass
class Turn:
    """One exchange; `label` is the skill that it counts for, `accepted` other answers that are as good."""

    user: str
    answer: str
    label: str
    accepted: tuple[str, ...] = ()
    literal: bool = False  # the user's words are copied into the answer: no typing errors


@dataclass
class Context:
    """Everything a skill draws from."""

    world: World
    rng: random.Random
    words: Words
    split: str

    def phrase(self, block: str, **slots: str) -> str:
        """A phrasing of the block with its slots filled."""
        text = choose(self.rng, block, self.split)
        for slot, value in slots.items():
            text = text.replace("{" + slot + "}", value)
        return text


@dataclass
class Reference:
    """A phrase such as "the red cup", "the cup", "the red one", and the objects it fits."""

    text: str
    things: list[Thing]
    ask: str = ""  # "cup", "red one": for the question which one is meant
    literal: bool = False

    @property
    def thing(self) -> Thing:
        return self.things[0]


def refer(context: Context, thing: Thing, exact: bool = False) -> Reference:
    """A reference to the thing; it may fit others too, unless `exact`."""
    rng, world = context.rng, context.world
    options = [(Reference(f"the {thing.name}", [thing]), 6)]
    by_kind, by_colour = world.find(kind=thing.kind), world.find(colour=thing.colour)
    if len(by_kind) == 1 or not exact:
        options.append((Reference(f"the {thing.kind}", by_kind, thing.kind), 3))
    if len(by_colour) == 1 or not exact:
        word = rng.choice(("one", "one", "thing", "object"))
        options.append((Reference(f"the {thing.colour} {word}", by_colour, f"{thing.colour} one"), 1.5))
    return rng.choices([o for o, _ in options], [w for _, w in options])[0]


def any_thing(context: Context) -> Thing | None:
    """A random object of the scene, handed over or not."""
    return context.rng.choice(context.world.things) if context.world.things else None


def absent(context: Context) -> tuple[str | None, str | None]:
    """A colour and kind (or one of them) that fit no object; half of the time one of the two words does occur."""
    world, rng = context.world, context.rng
    for _ in range(50):
        mode = rng.random()
        colour, kind = context.words.draw("colour"), context.words.draw("kind")
        if world.things and mode < 0.5:
            if mode < 0.25:
                colour = rng.choice(world.things).colour
            else:
                kind = rng.choice(world.things).kind
        elif mode < 0.7:
            colour = None
        elif mode < 0.75:
            kind = None
        used = {word for t in world.things for word in t.name.split()}
        fresh = [text for text in (colour, kind) if text and not any(text in (t.colour, t.kind) for t in world.things)]
        if fresh and not any(set(text.split()) & used for text in fresh) and not world.find(colour, kind):
            return colour, kind
    return "plaid", "sextant"


def absent_reference(context: Context) -> tuple[Reference, str]:
    """A reference to nothing and the answer to it."""
    colour, kind = absent(context)
    if kind is None:
        word = context.rng.choice(("one", "thing", "object"))
        return Reference(f"the {colour} {word}", [], literal=True), f"I see nothing {colour}."
    name = f"{colour} {kind}" if colour else kind
    return Reference(f"the {name}", [], literal=True), f"I do not see {article(name)}."


def either(things: list[Thing]) -> str:
    """`the red cup, the blue cup or the green cup`."""
    names = [f"the {thing.name}" for thing in things]
    return ", ".join(names[:-1]) + " or " + names[-1]


def ask_which(context: Context, reference: Reference, complete: Callable[[Thing], tuple[str, str]]) -> str:
    """The question which object is meant; `complete` gives the answer and label once one is named."""
    context.world.pending, context.world.candidates = complete, list(reference.things)
    context.world.focus = None
    return f"Which {reference.ask} do you mean: {either(reference.things)}?"
