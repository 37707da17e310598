"""Scenes that can be drawn: the grid world of the text skills with objects whose kinds and colours have a look.

Objects are named in a fixed order, as a picture is read: the back row from left to right, then the middle and the
front row. A seventh of the pairs of colour and kind, by checksum, is only ever seen in evaluation.
"""

import random

from tools.demo_model.grammar import held_out_word
from tools.demo_model.scene import Thing, World
from tools.demo_model.vision.kinds import COLOURS, KINDS
from tools.demo_model.words import Words

ROWS_COLUMNS = tuple((row, column) for row in (2, 1, 0) for column in range(3))
COUNTS = ((0, 1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 5, 10, 14, 16, 14, 10, 6))
HELD_OUT_PAIR_ONE_IN = 7
NOVEL = 1 / HELD_OUT_PAIR_ONE_IN  # share of held-out pairs in scenes where every pair is as likely


def held_out_pair(colour: str, kind: str) -> bool:
    """Whether objects of this colour and kind are kept for evaluation."""
    return held_out_word(f"{colour} {kind}", HELD_OUT_PAIR_ONE_IN)


class SeenWords(Words):
    """Colours and kinds that can be drawn, so that what is asked for in vain is something the eyes know too."""

    def draw(self, category: str) -> str:
        """One word as `Words.draw`; a colour or kind is nearly always one with a look."""
        if category == "colour" and self.rng.random() < 0.93:
            return self.rng.choice(tuple(COLOURS))
        if category == "kind" and self.rng.random() < 0.85:
            return self.rng.choice(tuple(KINDS))
        return super().draw(category)


def _pair(rng: random.Random, things: list[Thing], repeat: tuple[float, float]) -> tuple[str, str]:
    colours, kinds = [t.colour for t in things], [t.kind for t in things]
    colour = rng.choice(colours) if colours and rng.random() < repeat[0] else rng.choice(tuple(COLOURS))
    kind = rng.choice(kinds) if kinds and rng.random() < repeat[1] else rng.choice(tuple(KINDS))
    return colour, kind


def seen_things(rng: random.Random, world: World, novel: float) -> list[Thing]:
    """Up to eight objects on different cells, in the order of a picture, no colour and kind twice.

    A share `novel` of them, none in training, is of held-out pairs of colour and kind.
    """
    count = rng.choices(*COUNTS)[0]
    repeat = rng.choice((0.1, 0.35, 0.6)), rng.choice((0.1, 0.35, 0.6))
    cells = sorted(rng.sample(ROWS_COLUMNS, count), key=ROWS_COLUMNS.index)
    things: list[Thing] = []
    for cell in cells:
        wanted = rng.random() < novel
        while True:
            colour, kind = _pair(rng, things, repeat)
            if held_out_pair(colour, kind) is not wanted:
                repeat = (repeat[0] * 0.97, repeat[1] * 0.97)
                continue
            if not any((t.colour, t.kind) == (colour, kind) for t in things):
                break
            repeat = (repeat[0] * 0.97, repeat[1] * 0.97)
        things.append(Thing(colour, kind, world.grid_place(cell), cell))
    return things


def seen_world(rng: random.Random, words: Words, novel: float = 0.0) -> World:
    """A random world whose objects are told by a picture alone; the rest a system prompt may tell."""
    world = World(
        name=words.draw("name") if rng.random() < 0.9 else None,
        place=words.draw("place") if rng.random() < 0.8 else None,
        battery=words.number(1, 100) if rng.random() < 0.8 else None,
        limit=None,
        things=[],
        grid=True,
    )
    if world.battery is not None and rng.random() < 0.3:
        world.limit = words.rng.choice((5, 8, 10, 12, 15, 18, 20, 22, 25, 30, 33, 35, 40, 50))
    world.things = seen_things(rng, world, novel)
    return world
