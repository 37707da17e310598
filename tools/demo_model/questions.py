"""Questions about the robot and the objects, with the one canonical answer of each."""

from tools.demo_model.questions_text import (
    AT_POSITION,
    BATTERY,
    COLOUR,
    COMPARE_COLOUR,
    COMPARE_POSITION,
    COUNT_ALL,
    COUNT_COLOUR,
    COUNT_KIND,
    EXISTS,
    EXISTS_COLOUR,
    EXISTS_KIND,
    HOLDING,
    LIST,
    NAME,
    NEED_CHARGE,
    PLACE,
    RELATION,
    SIDE,
    USER_NAME_ASK,
    USER_NAME_TELL,
    WHERE,
    WHO,
)
from tools.demo_model.scene import Thing
from tools.demo_model.turns import Context, Turn, absent, absent_reference, any_thing, ask_which, refer
from tools.demo_model.words import article, join, plural

_RELATIONS = ("left of", "right of", "in front of", "behind")


def _the(things: list[Thing]) -> str:
    return join([f"the {thing.name}" for thing in things])


def name(c: Context) -> Turn:
    answer = f"My name is {c.world.name}." if c.world.name else "I do not have a name yet."
    return Turn(c.phrase(NAME), answer, "name")


def who(c: Context) -> Turn:
    answer = f"I am {c.world.name}, a small tabletop robot." if c.world.name else "I am a small tabletop robot."
    return Turn(c.phrase(WHO), answer, "who")


def place(c: Context) -> Turn:
    answer = f"I am at {c.world.place}." if c.world.place else "I do not know where I am."
    return Turn(c.phrase(PLACE), answer, "place")


def _battery(c: Context) -> str:
    if c.world.battery is None:
        return "I do not know my battery level."
    return f"My battery is at {c.world.battery} percent."


def battery(c: Context) -> Turn:
    return Turn(c.phrase(BATTERY), _battery(c), "battery")


def need_charge(c: Context) -> Turn:
    world = c.world
    if world.limit is None or world.battery is None:
        answer = _battery(c)
    elif world.low:
        answer = f"Yes, my battery is at {world.battery} percent, below the limit of {world.limit}."
    else:
        answer = f"No, my battery is at {world.battery} percent, not below the limit of {world.limit}."
    return Turn(c.phrase(NEED_CHARGE), answer, "need_charge")


def list_objects(c: Context) -> Turn:
    c.world.focus = None
    here = c.world.here()
    if not c.world.things:
        return Turn(c.phrase(LIST), "I see no objects listed.", "empty")
    answer = f"I see {join([article(t.name) for t in here])}." if here else "I see no objects now."
    return Turn(c.phrase(LIST), answer, "list")


def _about_one(c: Context, block: str, label: str, answer) -> Turn | None:
    """A question about one object, which may be absent or ambiguous."""
    thing = any_thing(c)
    if thing is None or c.rng.random() < 0.1:
        reference, reply = absent_reference(c)
        c.world.focus = None
        return Turn(c.phrase(block, o=reference.text), reply, "missing", literal=True)
    reference = refer(c, thing)

    def complete(chosen: Thing) -> tuple[str, str]:
        c.world.focus = chosen
        return answer(chosen), label

    user = c.phrase(block, o=reference.text)
    if len(reference.things) > 1:
        return Turn(user, ask_which(c, reference, complete), "ambiguous")
    reply, label = complete(reference.thing)
    return Turn(user, reply, label)


def colour_of(thing: Thing) -> str:
    return f"The {thing.kind} is {thing.colour}."


def colour(c: Context) -> Turn | None:
    """Asked by kind alone: with the colour in the reference the question would answer itself."""
    thing = any_thing(c)
    if thing is None or c.rng.random() < 0.1:
        kind = absent(c)[1]
        if kind is None or c.world.find(kind=kind):
            return None
        c.world.focus = None
        return Turn(c.phrase(COLOUR, o=f"the {kind}"), f"I do not see {article(kind)}.", "missing", literal=True)
    matches = c.world.find(kind=thing.kind)
    user = c.phrase(COLOUR, o=f"the {thing.kind}")
    if len(matches) > 1:
        c.world.focus = None
        return Turn(user, f"I see {_the(matches)}.", "colour_several")
    c.world.focus = thing
    return Turn(user, colour_of(thing), "colour")


def where_is(c: Context, thing: Thing) -> str:
    if thing is c.world.holding:
        return f"I am holding the {thing.name}."
    if thing.given:
        return f"You have the {thing.name}."
    return f"The {thing.name} is {thing.location()}."


def where(c: Context) -> Turn | None:
    turn = _about_one(c, WHERE, "where", lambda thing: where_is(c, thing))
    focus = c.world.focus
    if turn and turn.label == "where" and focus and (focus.moved or focus.given or focus is c.world.holding):
        turn.label = "where_after_action"
    return turn


def exists(c: Context) -> Turn | None:
    thing = any_thing(c)
    form = c.rng.choice(("full", "kind", "colour"))
    if thing is None or c.rng.random() < 0.45:
        colour, kind = absent(c)
        if kind is None:
            user, reply = c.phrase(EXISTS_COLOUR, c=colour), f"No, I see nothing {colour}."
        else:
            text = f"{colour} {kind}" if colour else kind
            user, reply = c.phrase(EXISTS, a=article(text)), f"No, I do not see {article(text)}."
        c.world.focus = None
        return Turn(user, reply, "exists", literal=True)
    if thing.given:
        return None
    if form == "full":
        found, user = [thing], c.phrase(EXISTS, a=article(thing.name))
    elif form == "kind":
        found = c.world.find(kind=thing.kind)
        user = (
            c.phrase(EXISTS_KIND, ks=plural(thing.kind))
            if c.rng.random() < 0.4
            else c.phrase(EXISTS, a=article(thing.kind))
        )
    else:
        found, user = c.world.find(colour=thing.colour), c.phrase(EXISTS_COLOUR, c=thing.colour)
    found = [t for t in found if not t.given]
    c.world.focus = found[0] if len(found) == 1 else None
    return Turn(user, f"Yes, I see {_the(found)}.", "exists")


def _counted(things: list[Thing]) -> str:
    if not things:
        return "I see none of those."
    return f"I see {_the(things)}, so there {'is 1' if len(things) == 1 else f'are {len(things)}'}."


def count_kind(c: Context) -> Turn | None:
    thing = any_thing(c)
    kind = thing.kind if thing and c.rng.random() < 0.8 else absent(c)[1]
    if kind is None:
        return None
    found = [t for t in c.world.find(kind=kind) if not t.given]
    c.world.focus = None
    return Turn(c.phrase(COUNT_KIND, ks=plural(kind)), _counted(found), "count_kind")


def count_colour(c: Context) -> Turn | None:
    thing = any_thing(c)
    colour = thing.colour if thing and c.rng.random() < 0.8 else absent(c)[0]
    if colour is None:
        return None
    found = [t for t in c.world.find(colour=colour) if not t.given]
    c.world.focus = None
    return Turn(c.phrase(COUNT_COLOUR, c=colour), _counted(found), "count_colour")


def count_all(c: Context) -> Turn:
    c.world.focus = None
    if not c.world.things:
        return Turn(c.phrase(COUNT_ALL), "I see no objects listed.", "empty")
    return Turn(c.phrase(COUNT_ALL), _counted(c.world.here()), "count_all")


def _see(things: list[Thing], where: str) -> str:
    return f"{where[0].upper() + where[1:]} I see {_the(things)}." if things else f"I see nothing {where}."


def at_position(c: Context) -> Turn | None:
    world, rng = c.world, c.rng
    if not world.things:
        return None
    put = [
        t.moved for t in world.here() if t.moved and t.moved != "on the table" and not t.moved.startswith(_RELATIONS)
    ]
    if put and rng.random() < 0.5:
        phrase = rng.choice(put)
        found = [t for t in world.here() if t.moved == phrase]
        world.focus = found[0] if len(found) == 1 else None
        return Turn(c.phrase(AT_POSITION, p=phrase), _see(found, phrase), "where_after_action")
    if world.grid:
        used = [t.place for t in world.things if t.place]
        target = rng.choice(used) if used and rng.random() < 0.7 else rng.choice(world.all_places())
        phrase = f"at the {target}"
    else:
        used = [t.place for t in world.things if t.place]
        target = rng.choice(used) if used and rng.random() < 0.8 else c.words.draw("spot")
        phrase = target
        if any(target != u and (target in u or u in target) for u in used):
            return None
    found = world.at(target)
    world.focus = found[0] if len(found) == 1 else None
    user = c.phrase(AT_POSITION, p=phrase)
    return Turn(user, _see(found, phrase), "at_position", literal=not found)


def relation(c: Context) -> Turn | None:
    world = c.world
    thing = any_thing(c)
    if thing is None or thing.given or thing is world.holding:
        return None
    reference = refer(c, thing)
    text = c.phrase(RELATION)
    word, block = text.split(" :: ")
    user = block.replace("{o}", reference.text)

    def complete(chosen: Thing) -> tuple[str, str]:
        world.focus = None
        found = world.related(word, chosen)
        if found is None:
            return f"I do not know what is {word} the {chosen.name}.", "relation"
        return (
            f"{word.capitalize()} the {chosen.name} I see {_the(found)}."
            if found
            else f"I see nothing {word} the {chosen.name}."
        ), "relation"

    if len(reference.things) > 1:
        return Turn(user, ask_which(c, reference, complete), "ambiguous")
    reply, label = complete(reference.thing)
    return Turn(user, reply, label)


def side(c: Context) -> Turn | None:
    if not c.world.grid or not c.world.things:
        return None
    word, user = c.phrase(SIDE).split(" :: ")
    c.world.focus = None
    phrase = f"on the {word}" if word in ("left", "right") else f"at the {word}"
    return Turn(user, _see(c.world.side(word), phrase), "side")


def _two(c: Context, grid: bool) -> tuple[Thing, Thing] | None:
    options = [t for t in c.world.things if not t.given and (not grid or t.cell)]
    return tuple(c.rng.sample(options, 2)) if len(options) >= 2 else None


def compare_colour(c: Context) -> Turn | None:
    """Two objects of different kinds, each named by a kind that occurs once."""
    options = [t for t in c.world.things if len(c.world.find(kind=t.kind)) == 1]
    if len(options) < 2:
        return None
    first, second = c.rng.sample(options, 2)
    c.world.focus = None
    same = first.colour == second.colour
    answer = (
        f"Yes, both are {first.colour}."
        if same
        else f"No, the {first.kind} is {first.colour} and the {second.kind} is {second.colour}."
    )
    return Turn(c.phrase(COMPARE_COLOUR, x=first.kind, y=second.kind), answer, "compare_colour")


def compare_position(c: Context) -> Turn | None:
    pair = _two(c, grid=True)
    if pair is None:
        return None
    first, second = pair
    one, two = refer(c, first, exact=True), refer(c, second, exact=True)
    way, user = c.phrase(COMPARE_POSITION).split(" :: ")
    c.world.focus = None
    axis, sign = {
        "further left": (1, 1),
        "further right": (1, -1),
        "closer to the front": (0, 1),
        "closer to the back": (0, -1),
    }[way]
    difference = sign * (first.cell[axis] - second.cell[axis])
    winner = first if difference < 0 else second
    answer = (
        f"The {winner.name} is {way}." if difference else f"Neither: the {first.name} and the {second.name} are level."
    )
    return Turn(user.replace("{x}", one.text).replace("{y}", two.text), answer, "compare_position")


def holding(c: Context) -> Turn:
    held = c.world.holding
    c.world.focus = held
    return Turn(
        c.phrase(HOLDING), f"I am holding the {held.name}." if held else "I am not holding anything.", "holding"
    )


def user_name_tell(c: Context) -> Turn:
    person = c.words.draw("person")
    c.world.user_name = person
    return Turn(c.phrase(USER_NAME_TELL, n=person), f"Nice to meet you, {person}.", "user_name", literal=True)


def user_name_ask(c: Context) -> Turn:
    known = c.world.user_name
    return Turn(
        c.phrase(USER_NAME_ASK), f"Your name is {known}." if known else "You have not told me your name.", "user_name"
    )
