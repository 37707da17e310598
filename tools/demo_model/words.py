"""Words of the scenes: own lists, part of them held out, and an open pool of rare and invented words for training.

Training must teach copying from the system prompt, so most training scenes mix listed words with words that the model
can hardly have seen: rare words of the open text and words put together from syllables.
"""

import functools
import random
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tools.demo_model.grammar import held_out_word

COLOURS = """red blue green yellow black white orange purple pink brown grey gray silver golden turquoise violet beige
cream crimson scarlet navy teal olive maroon lilac amber bronze copper ivory indigo magenta cyan coral mint lavender
tan ruby charcoal peach lime plum khaki mustard rose striped spotted wooden glass metal plastic transparent shiny tiny
large small long short round square paper tartan checked/dark blue/light blue/dark green/light green/pale yellow
/bright red/sky blue/light brown/dark grey/matte black"""
KINDS = """cup ball box book pen pencil bowl plate spoon fork mug bottle jar key coin cube block brick button ring
clock watch phone lamp candle brush comb sponge towel sock shoe hat glove scarf bag purse wallet card dice domino
marble puzzle robot doll bear car train truck bus boat plane kite drum whistle bell hammer wrench screwdriver nail
screw bolt nut washer tape ruler eraser stapler notebook folder envelope stamp magnet battery cable plug switch sensor
motor wheel gear lever valve pipe tube funnel bucket basket tray crate tin can drawer pot pan lid kettle teapot apple
pear banana lemon peach plum cherry grape carrot potato tomato onion pepper egg cookie cake muffin pretzel leaf
flower acorn pebble stone shell feather pinecone cork bead ribbon string zipper thimble needle spool badge medal
trophy flag map globe compass camera lens mirror vase coaster napkin straw bookmark figurine cone cylinder pyramid
prism disc token chip/toy car/toy boat/coffee mug/tea cup/water bottle/paper clip/glue stick/rubber duck/tennis ball
/building block/teddy bear/alarm clock/egg timer/pepper mill/salt shaker/memory card/remote control/light bulb/golf ball
/chess piece/playing card/bottle cap/test tube/hex key/circuit board"""
CONTAINERS = """bowl box cup mug basket tray drawer jar bucket tin crate bag pot pan bin can vase kettle teapot purse
envelope bottle tube/coffee mug/tea cup""".replace("\n", " ")
NAMES = """Pip Robbie Momo Ada Max Nova Otto Luna Bolt Pixel Widget Sprocket Tilly Benny Coco Dot Echo Fizz Gizmo Hugo
Iris Juno Kiki Leo Milo Nemo Oscar Polly Quincy Rusty Sunny Toby Uma Vega Wally Xena Yoyo Ziggy Astro Beep Chip Daisy
Ember Finn Gus Hazel Ivy Jasper Koko Lola Maple Nibbles Olive Pepper Remy Sparky Tango Ursa Violet Winston Zara Alfie
Basil Clover Dexter Elmo Flora Ginger Henry Indigo Jolly Kit Lenny Mabel Newton Orion Penny Rex Scout Teddy Tess Vera
Wren Yuki Zeno Arlo Bruno Cleo Dara Enzo Freya Greta Harpo Igor Jett Kepler Linus Mika Nora Opal Pascal Ravi Sasha/R2
/Arm 3/Unit 7/Mister Bean/Lady Lovelace/Doctor Watt/Robo Jim/Captain Nut/TB-4/Little Joe"""
PEOPLE = """Anna Tom Maria Sam Ben Lucy David Emma Noah Olga Peter Rosa Simon Tina Victor Wendy Yara Alice Bob Carla
Daniel Elena Felix Grace Hannah Ivan Julia Karl Laura Martin Nina Oliver Paula Robert Sarah Theo Ursula Vincent Amir
Aisha Chen Diego Fatima Hiro Ingrid Jamal Kofi Leila Mei Nadia Omar Priya Raj Sofia Tariq Wei Zoe Lars Pavel Amara"""
PLACES = """the kitchen table/the workbench/the desk in the study/the dining table/the lab bench/the coffee table
/the reception desk/the table by the window/the teacher's desk/the long table in the hall/the table in the living room
/the bench in the garage/the counter of the shop/the children's table/the packing station/the table in the library
/the garden table/the work table in the basement/the meeting room table/the picnic table/the desk of the office
/the test stand/the sorting table/the kitchen counter/the bedside table/the table in room 12/the round table
/the craft table/the bar counter/the help desk/the nursery table/the repair bench/the corner table/the potting bench
/the kitchen island/the drawing table/the tool bench/the side table/the balcony table/the display table/lab 3
/Anna's desk/room 204/station 5/the museum desk/the school lab/the ship's galley/the hotel lobby/the attic desk
/the music room/the tea table/the chess table/the greenhouse bench/the canteen/the workshop/the kitchen/the office
/the laboratory/the living room/the classroom/a small desk/a wooden table/a table in Berlin/my brother's desk"""
SPOTS = """beside the lamp/near the window/next to the laptop/behind the monitor/under the shelf/by the door/at the edge
/near the wall/on the shelf/in the drawer/beside the keyboard/next to the printer/by the sink/under the clock
/near the plant/on the top shelf/on the bottom shelf/at the far end/in the corner/beside the toolbox/on the tray
/on the mat/next to the charger/behind the speaker/in slot 1/in slot 2/in slot 3/in slot 4/on shelf A/on shelf B
/in bin 5/in bin 6/at station 2/at x 12 y 30/at x 40 y 8/at x 25 y 17/at x 3 y 44/on the left tray/on the right tray
/near the radio/by the socket/on the windowsill/under the lamp/beside the telephone/at the top/in the green area
/near the stairs/by the fruit stand/next to the cooker/on the blue mat/at marker 1/at marker 2/at marker 9"""
GRID_ROWS = ("front", "middle", "back")
GRID_COLUMNS = ("left", "centre", "right")
_ONSETS = [
    "b",
    "bl",
    "br",
    "c",
    "ch",
    "cl",
    "cr",
    "d",
    "dr",
    "f",
    "fl",
    "fr",
    "g",
    "gl",
    "gr",
    "h",
    "j",
    "k",
    "kl",
    "kr",
    "l",
    "m",
    "n",
    "p",
    "pl",
    "pr",
    "qu",
    "r",
    "s",
    "sh",
    "sk",
    "sl",
    "sm",
    "sn",
    "sp",
    "st",
    "str",
    "t",
    "th",
    "tr",
    "v",
    "w",
    "z",
]
_VOWELS = ["a", "e", "i", "o", "u", "a", "e", "i", "o", "ai", "ee", "oo", "ou"]
_CODAS = [
    "b",
    "ck",
    "d",
    "f",
    "g",
    "l",
    "m",
    "n",
    "nd",
    "ng",
    "nk",
    "nt",
    "p",
    "r",
    "rk",
    "rt",
    "s",
    "sh",
    "st",
    "t",
    "x",
    "zz",
] + [""] * 8
_UNSUITABLE = re.compile(
    r"^(u|eu|one$|onc|hono|hour|heir|herb)|nigg|negro|rape|sex|slut|whore|bitch|bastard|damn|fuck|shit|piss|penis|kill"
    r"|murder|corpse|suicid|slave|jew|gyps|savage|naked|breast|harlot|drunk|hang|hell|satan|nazi|ass$|arse|cock|prick"
    r"|ing$|ly$|ed$|s$|^(a|an|the|and|or|one|thing|object|it|you|i|nothing|anything|left|right|front|back|behind)$"
)


def _listed(text: str) -> tuple[str, ...]:
    """Words of a list; entries after the first `/` are separated by `/` and may hold several words."""
    head, *several = text.replace("\n", " ").split("/")
    return tuple(dict.fromkeys(head.split() + [entry.strip() for entry in several]))


def _entries(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(entry.strip() for entry in text.replace("\n", " ").split("/")))


LISTS: dict[str, tuple[str, ...]] = {
    "colour": _listed(COLOURS),
    "kind": _listed(KINDS),
    "name": _listed(NAMES),
    "person": _listed(PEOPLE),
    "place": _entries(PLACES),
    "spot": _entries(SPOTS),
}
CONTAINER_KINDS = frozenset(_listed(CONTAINERS))


@functools.cache
def listed(category: str, split: str) -> tuple[str, ...]:
    """The words of a category for a split; a fifth of each list (by checksum) is only ever used for evaluation."""
    return tuple(word for word in LISTS[category] if held_out_word(word, 5) == (split == "eval"))


def invented_word(rng: random.Random) -> str:
    """A made-up lower-case word of one to three syllables, never one of the listed words that are held out."""
    while True:
        count = rng.choice((1, 2, 2, 2, 3))
        word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + (rng.choice(_CODAS)) for _ in range(count))
        if 3 <= len(word) <= 11 and suitable(word):
            return word


def suitable(word: str) -> bool:
    """Whether an open word may stand for a colour, kind or name: not rude, regular article, not held out."""
    return not _UNSUITABLE.search(word) and word not in held_out_words()


@functools.lru_cache(maxsize=1)
def held_out_words() -> frozenset[str]:
    """Every single word that occurs in a held-out colour, kind, name or person: kept out of the open pool."""
    return frozenset(
        part.lower()
        for category in ("colour", "kind", "name", "person")
        for word in listed(category, "eval")
        for part in word.split()
    ) - frozenset(
        part.lower() for category in ("colour", "kind") for word in listed(category, "train") for part in word.split()
    )


def open_pool(texts: Iterable[str], limit: int = 20_000) -> list[str]:
    """Rare, plain lower-case words of the given texts, most frequent first."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(re.findall(r"(?<![\w'-])[a-z]{3,10}(?![\w'-])", text))
    return [word for word, count in counts.most_common() if 3 <= count <= 3000 and suitable(word)][:limit]


class Words:
    """Draws words for one document: `split` is "train" or "eval"; `pool` the open words (training only)."""

    def __init__(self, rng: random.Random, split: str, pool: tuple[str, ...] = ()):
        self.rng, self.split, self.pool = rng, split, pool
        self.open_share = rng.choice((0.0, 0.3, 0.6, 1.0)) if split == "train" else rng.choice((0.0, 0.0, 0.4))

    def _open_word(self) -> str:
        if self.split == "train" and self.pool and self.rng.random() < 0.6:
            return self.rng.choice(self.pool)
        return invented_word(self.rng)

    def draw(self, category: str) -> str:
        """One colour, kind, name, person, place or spot."""
        rng = self.rng
        if (rng.random() < self.open_share and category != "spot") or (category == "spot" and rng.random() < 0.3):
            return self._open_entry(category)
        # The evaluation mixes words never trained on with trained ones in new combinations.
        split = "eval" if self.split == "eval" and (category in ("name", "place") or rng.random() < 0.6) else "train"
        return rng.choice(listed(category, split))

    def _open_entry(self, category: str) -> str:
        rng, word = self.rng, self._open_word()
        if category in ("name", "person"):
            return word.capitalize()
        if category == "place":
            other = self._open_word()
            return rng.choice(
                (
                    f"the {word} table",
                    f"the {word} {other}",
                    f"{word.capitalize()}'s desk",
                    f"the {word}",
                    f"the {word} in the {other}",
                    f"{word} {rng.randrange(1, 100)}",
                )
            )
        if category == "spot":
            return rng.choice(
                (
                    f"beside the {word}",
                    f"near the {word}",
                    f"on the {word}",
                    f"in the {word}",
                    f"by the {word}",
                    f"under the {word}",
                    f"in {word} {rng.randrange(1, 100)}",
                    f"at x {rng.randrange(100)} y {rng.randrange(100)}",
                    f"behind the {word}",
                )
            )
        return word if rng.random() < 0.93 else f"{word} {self._open_word()}"

    def number(self, low: int, high: int) -> int:
        """A number in [low, high]; those that leave 3 when divided by 7, but 10, are held out from training."""
        while True:
            value = self.rng.randint(low, high)
            held_out = value % 7 == 3 and value != 10
            if held_out if self.split == "train" else not held_out and self.rng.random() < 0.5:
                continue
            return value


def read_pool(path: Path | None) -> tuple[str, ...]:
    """The open word pool written by `prepare.py`, one word a line; empty without a file."""
    return tuple(path.read_text().split()) if path and path.exists() else ()


def article(phrase: str) -> str:
    """The phrase with its indefinite article, by its first letter (open words that break the rule are not used)."""
    return f"{'an' if phrase[0].lower() in 'aeiou' else 'a'} {phrase}"


def plural(kind: str) -> str:
    """The regular plural, as users will type it."""
    if kind.endswith(("s", "x", "z", "ch", "sh")):
        return kind + "es"
    if kind.endswith("y") and kind[-2] not in "aeiou":
        return kind[:-1] + "ies"
    return kind + "s"


def join(items: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]
