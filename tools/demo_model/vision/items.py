"""Held-out questions about drawn scenes, for any program that answers messages with pictures."""

import json
import zlib

import numpy as np

from tools.demo_model.vision.dialogues import PICTURE, seen_items
from tools.demo_model.vision.layout import cells_of
from tools.demo_model.vision.samples import picture
from tools.demo_model.vision.scenes import NOVEL


def drawn(item: dict) -> list[np.ndarray]:
    """The pictures [288, 288, 3] uint8 of an item's scenes; their looks depend on the item's words alone."""
    seed = zlib.crc32(json.dumps(item["messages"]).encode())
    return [picture(cells_of(world)[None], seed + number) for number, world in enumerate(item["worlds"])]


def picture_items(seed: int, count_per_skill: int, novel: float = NOVEL) -> list[dict]:
    """Items {skill, messages, accepted}: contents with a picture are lists of parts, the picture an array."""
    items = seen_items(seed, count_per_skill, novel=novel)
    for item in items:
        shown = iter(drawn(item))
        for message in item["messages"]:
            if PICTURE in message["content"]:
                text = message["content"].replace(PICTURE, "")
                message["content"] = [{"type": "image", "image": next(shown)}, {"type": "text", "text": text}]
        del item["worlds"]
    return items
