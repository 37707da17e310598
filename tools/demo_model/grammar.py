"""Phrasings as small grammars: `(a|b|)` lists alternatives, `{slot}` is filled later.

A phrasing is one fully expanded line, slots unfilled. About a sixth of all phrasings are held out from training:
every phrasing of a line that begins with `~`, and those of other lines whose checksum says so. The split depends on the
text alone, so it never changes with a seed. A phrasing goes to training after all where it has a word that no training
phrasing of its block has, or where another line trains it: held-out phrasings are new ways to say known words.
"""

import functools
import random
import re
import zlib

HELD_OUT_ONE_IN = 6
_GROUP = re.compile(r"\(([^()]*)\)")


def held_out_word(text: str, one_in: int = HELD_OUT_ONE_IN) -> bool:
    """Whether a word or phrasing belongs to the evaluation: a fixed checksum of its text, modulo `one_in`."""
    return zlib.crc32(text.encode()) % one_in == 0


def expand(template: str) -> list[str]:
    """All strings that a template stands for, innermost groups first; doubled spaces are closed up."""
    match = _GROUP.search(template)
    if match is None:
        return [" ".join(template.split())]
    before, after = template[: match.start()], template[match.end() :]
    return [text for option in match.group(1).split("|") for text in expand(before + option + after)]


@functools.cache
def phrasings(block: str, split: str) -> tuple[tuple[str, ...], ...]:
    """The phrasings of a block of template lines that belong to `split` ("train" or "eval"), one tuple per line.

    Lines without a phrasing in the split are left out. `choose` picks a line first, then a phrasing within it, so that
    a line with many alternatives does not crowd out the others.
    """
    lines = [line.strip() for line in block.strip().splitlines() if line.strip()]
    options = [(line.startswith("~"), list(dict.fromkeys(expand(line.lstrip("~ "))))) for line in lines]
    known = {
        word
        for reserved, texts in options
        for text in texts
        if not (reserved or held_out_word(text))
        for word in text.replace(",", " ").split()
    }
    held = [
        {t for t in texts if (reserved or held_out_word(t)) and known.issuperset(t.replace(",", " ").split())}
        for reserved, texts in options
    ]
    trained = {text for (_, texts), out in zip(options, held, strict=True) for text in texts if text not in out}
    groups = []
    for (_, texts), out in zip(options, held, strict=True):
        wanted = tuple(t for t in texts if (t in out and t not in trained if split == "eval" else t not in out))
        if wanted:
            groups.append(wanted)
    return tuple(groups)


def choose(rng: random.Random, block: str, split: str) -> str:
    """One phrasing of the block from the split; a block with none held out falls back to the training phrasings."""
    groups = phrasings(block, split) or phrasings(block, "train")
    return rng.choice(rng.choice(groups))
