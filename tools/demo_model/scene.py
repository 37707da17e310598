"""The world of one dialogue: what the system prompt tells, what has happened since, and what follows from both.

Meaning of places: on a grid (three rows, three columns, seen from the robot) "left of X" is every object in a column
further left than X's, "in front of X" every object in a row closer to the front, whatever the other coordinate.
"""

import random
from dataclasses import dataclass, field

from tools.demo_model.words import GRID_COLUMNS, GRID_ROWS, Words


@dataclass
class Thing:
    """One object; `place` is a grid name ("front left") with its `cell` (row, column), or a phrase ("by the lamp")."""

    colour: str
    kind: str
    place: str | None
    cell: tuple[int, int] | None
    moved: str | None = None  # where an action put it, as a phrase: "in the white bowl"
    given: bool = False

    @property
    def name(self) -> str:
        return f"{self.colour} {self.kind}"

    def location(self) -> str:
        """The place as a phrase: "at the front left", "beside the lamp", "in the white bowl"."""
        if self.moved:
            return self.moved
        return f"at the {self.place}" if self.cell else self.place or ""


@dataclass
class World:
    """A scene and the state of a dialogue about it. Facts that the system prompt does not tell are None."""

    name: str | None
    place: str | None
    battery: int | None
    limit: int | None
    things: list[Thing]
    grid: bool
    spelling: str = "centre"
    holding: Thing | None = None
    focus: Thing | None = None
    pending: object = None
    candidates: list[Thing] = field(default_factory=list)
    user_name: str | None = None

    @property
    def low(self) -> bool:
        """Whether the system prompt's battery rule forbids handling objects."""
        return self.limit is not None and self.battery is not None and self.battery < self.limit

    def here(self) -> list[Thing]:
        """The objects still on the table (not handed over), in the order of the system prompt."""
        return [thing for thing in self.things if not thing.given]

    def find(self, colour: str | None = None, kind: str | None = None) -> list[Thing]:
        """The objects of a colour, a kind or both, handed over or not."""
        return [t for t in self.things if colour in (None, t.colour) and kind in (None, t.kind)]

    def at(self, place: str) -> list[Thing]:
        """The objects at a place given as in the system prompt, those moved there included."""
        return [t for t in self.here() if t is not self.holding and t.place == place]

    def related(self, relation: str, thing: Thing) -> list[Thing] | None:
        """The objects in a relation to a thing, those put there included; None where nothing is known of it."""
        placed = [t for t in self.here() if t.moved == f"{relation} the {thing.name}"]
        if thing.cell is None:
            return placed or None
        row, column = thing.cell
        tests = {
            "left of": lambda c: c[1] < column,
            "right of": lambda c: c[1] > column,
            "in front of": lambda c: c[0] < row,
            "behind": lambda c: c[0] > row,
        }
        return [t for t in self.here() if t in placed or (t.cell and tests[relation](t.cell))]

    def side(self, side: str) -> list[Thing]:
        """The objects of a column ("left") or row ("front") of the grid."""
        if side in GRID_ROWS and side != "middle":
            return [t for t in self.here() if t.cell and t.cell[0] == GRID_ROWS.index(side)]
        return [t for t in self.here() if t.cell and t.cell[1] == GRID_COLUMNS.index(side)]

    def grid_place(self, cell: tuple[int, int]) -> str:
        """The name of a cell: "front left", "centre" (or "center", as the system prompt spells it)."""
        row, column = GRID_ROWS[cell[0]], GRID_COLUMNS[cell[1]]
        text = "centre" if cell == (1, 1) else f"{row} {column}"
        return text.replace("centre", self.spelling)

    def all_places(self) -> list[str]:
        """The nine names of the grid."""
        return [self.grid_place((row, column)) for row in range(3) for column in range(3)]

    def remove_from_place(self, thing: Thing) -> None:
        """Forget where a thing stood: it was picked up or put somewhere else."""
        thing.place, thing.cell, thing.moved = None, None, None


def clashes(new: str, used: str) -> bool:
    """Whether two different words or phrases share a word (`blue`, `dark blue`): they would make references unclear."""
    return new != used and bool(set(new.split()) & set(used.split()))


def random_world(rng: random.Random, words: Words) -> World:
    """A random scene of 0 to 8 objects, each pair of colour and kind at most once, with repeated colours and kinds."""
    count = rng.choices((0, 1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 6, 14, 18, 18, 14, 9, 6))[0]
    grid = rng.random() < 0.7
    world = World(
        name=words.draw("name") if rng.random() < 0.93 else None,
        place=words.draw("place") if rng.random() < 0.93 else None,
        battery=words.number(1, 100) if rng.random() < 0.93 else None,
        limit=None,
        things=[],
        grid=grid,
        spelling=rng.choice(("centre", "centre", "center")),
    )
    if world.battery is not None and rng.random() < 0.3:
        world.limit = words.rng.choice((5, 8, 10, 12, 15, 18, 20, 22, 25, 30, 33, 35, 40, 50))
        if rng.random() < 0.55:
            world.battery = words.number(1, min(99, world.limit + 12))
    cells = rng.sample([(row, column) for row in range(3) for column in range(3)], min(9, count))
    repeat_kind, repeat_colour = rng.choice((0.1, 0.35, 0.6)), rng.choice((0.1, 0.35, 0.6))
    attempts = 0
    while len(world.things) < count and attempts < 60:
        attempts += 1
        colours, kinds = [t.colour for t in world.things], [t.kind for t in world.things]
        colour = rng.choice(colours) if colours and rng.random() < repeat_colour else words.draw("colour")
        kind = rng.choice(kinds) if kinds and rng.random() < repeat_kind else words.draw("kind")
        taken = {word for text in colours + kinds for word in text.split()}
        if (
            any(clashes(colour, used) for used in colours)
            or any(clashes(kind, used) for used in kinds)
            or world.find(colour, kind)
            or set(colour.split()) & ({w for k in kinds for w in k.split()})
            or set(kind.split()) & {w for c in [*colours, colour] for w in c.split()}
            or (kind not in kinds and set(kind.split()) & taken)
        ):
            continue
        cell = cells[len(world.things)]
        place = world.grid_place(cell) if grid else words.draw("spot")
        if any(place == t.place for t in world.things):
            continue
        world.things.append(Thing(colour, kind, place, cell if grid else None))
    return world
