"""What stands around the tokens of an image in a prompt, by family.

Images in parts are written out where the tokens of all parts are known: the marker that a chat template has for an
image becomes all of its tokens (`TextOfParts`). Gemma 3's are written into the text before (`image_writer`), since line
feeds become tokens together with the text around them, and so does what says that there are crops of one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from itertools import chain, repeat
from typing import NamedTuple

from edgellm.configs import installed
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.vision import VisionConfig
from edgellm.errors import EngineDirectoryError
from edgellm.text.tokenizer import Tokenizer, WriteImages


class PartTexts(NamedTuple):
    """The texts of a family, with {image} where a part's tokens stand: of a `tile` whose place is {row} and {column}
    from 1 on, behind a `row` of tiles, of the `whole` picture beside tiles, or `alone`; around all these `begin` and
    `end`, and `between` rows. The `number`, from 0 on, of a picture in the prompt comes before these, and the whole
    before the tiles where it is `whole_first`. Where the tokens of a picture come in rows (Pixtral), each is a row of
    one tile, and so is each crop (Gemma 3); {begin} and {end} are the tokens around an image that config.json names."""

    begin: str = ""
    end: str = ""
    tile: str = "{image}"
    row: str = ""
    whole: str = "{image}"
    alone: str = "{image}"
    between: str = ""
    number: str = ""
    whole_first: bool = False


_INTRODUCTION = "Here is the original image "
_SPECIAL = re.compile(r"<[^<>{}]+>|\[[A-Z_]+\]")


@cache
def part_texts() -> dict[str, PartTexts]:
    """Those of `configs/image_texts.yaml`, by the family of the vision encoder."""
    return {family: PartTexts(**texts) for family, texts in installed("image_texts").items()}


class TextOfParts:
    """Gives the ids of the texts around the parts of an image; any thread may ask."""

    def __init__(self, vision: VisionConfig, tokenizer: Tokenizer) -> None:
        """Raises EngineDirectoryError where the tokenizer lacks the token of an image, or those around one."""
        self._texts, self._token = part_texts()[vision.family], vision.image_token_id
        ids = {"image": self._token, "begin": vision.vision_start_token_id, "end": vision.vision_end_token_id}
        self._named = {name: tokenizer.id_to_token(each) for name, each in ids.items() if each is not None}
        self._encode = tokenizer.encode
        own = _SPECIAL.findall("".join(text for text in self._texts if isinstance(text, str)))
        missing = [text for text in dict.fromkeys(own) if tokenizer.token_to_id(text) is None]
        if missing or self._named["image"] is None:
            raise EngineDirectoryError(
                f"the tokenizer has not the tokens {', '.join([*missing, f'number {self._token}'])}, which stand in "
                "and around images: take tokenizer.json as it was published"
            )

    def around(self, rows: int, columns: int, has_whole: bool, number: int = 0) -> tuple[tuple[int, ...], ...]:
        """The ids before each part of an image of so many tiles, and the ids behind the last; the `number` counts the
        images of a prompt, from 0 on."""
        texts, named = self._texts, self._named
        tiles = [
            texts.between.format(**named) * (1 == column < row)
            + texts.tile.format(row=row, column=column, **named)
            + texts.row * (column == columns)
            for row in range(1, rows + 1)
            for column in range(1, columns + 1)
        ]
        whole = [(texts.whole if tiles else texts.alone).format(**named)] if has_whole else []
        parts = [*whole, *tiles] if texts.whole_first else [*tiles, *whole]
        written = "".join([texts.number.format(number=number), texts.begin, *parts, texts.end])
        ids = self._encode(written, add_special_tokens=False)
        ends = [place for place, each in enumerate(ids) if each == self._token]
        begins = [0, *(end + 1 for end in ends)]
        return tuple(tuple(ids[begin:end]) for begin, end in zip(begins, [*ends, len(ids)], strict=True))


def image_writer(directory: EngineDirectory, tokenizer: Tokenizer) -> WriteImages:
    """What makes of a text, a rendered chat template or a raw prompt, one that has an image's token for each image.

    Templates of Gemma 3 write the token before an image alone, for which the published processor writes two line feeds,
    that token, those of the image, the one behind it, and two line feeds: they become tokens together with the text
    around them. Where there are crops of the image, words come before. One that is followed by the image's token is
    left as it is. Raises EngineDirectoryError where the tokenizer lacks these tokens.
    """
    vision = directory.vision
    assert vision is not None  # for which texts are written
    if vision.config.family == "paligemma":
        return _begun_behind_images(directory, vision.config, tokenizer)
    if vision.config.family != "gemma3":
        return tokenizer.write_images
    ids = (vision.config.vision_start_token_id, vision.config.image_token_id, vision.config.vision_end_token_id)
    stand_for = "the beginning of an image, for a part of it and for its end"
    before, image, behind = _token_texts(directory, tokenizer, ids, stand_for)
    marker = re.compile(f"{re.escape(before)}({re.escape(image)})?")
    written = f"\n\n{before}{image}{behind}\n\n"

    def write(text: str, cropped: Sequence[bool]) -> str:
        words = chain((_INTRODUCTION * each for each in cropped), repeat(""))
        return marker.sub(lambda found: (next(words) + written, found[0])[bool(found[1])], text)

    return write


def _token_texts(
    directory: EngineDirectory, tokenizer: Tokenizer, ids: Sequence[int | None], stand_for: str
) -> list[str]:
    """The texts of tokens; EngineDirectoryError where the tokenizer lacks one of them."""
    texts = [text for each in ids if each is not None and (text := tokenizer.id_to_token(each)) is not None]
    if len(texts) < len(ids):
        raise EngineDirectoryError(
            f"{directory.path}: the tokenizer has not the tokens {', '.join(map(str, ids))}, which stand for "
            f"{stand_for}: take tokenizer.json as it was published"
        )
    return texts


def _begun_behind_images(directory: EngineDirectory, vision: VisionConfig, tokenizer: Tokenizer) -> WriteImages:
    """PaliGemma's: the token of a text's beginning stands behind the last image, a line feed behind the text, as the
    published processor writes them. A text that has the former there is left as it is."""
    ids = (vision.image_token_id, directory.config.bos_token_id)
    image, begin = _token_texts(directory, tokenizer, ids, "a part of an image and for the beginning of a text")

    def written(text: str, cropped: Sequence[bool]) -> str:
        images, marker, question = text.rpartition(image)
        return text if begin in question else f"{images}{marker}{begin}{question}\n"

    return written
