"""The shipped model's eyes: what is drawn, what is asked about it, what is held out, and how it is written down."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from tools.demo_model.vision.arrays import NumpyArrays
from tools.demo_model.vision.dialogues import PICTURE, SOURCES, seen_dialogue, seen_items
from tools.demo_model.vision.documents import LENGTH, PICTURES, PICTURES_OF_ROWS, encode_row, group, render_seen
from tools.demo_model.vision.kinds import COLOURS, KINDS, STRANGERS
from tools.demo_model.vision.layout import NOTHING, ROWS, cells_of, first_row, token_tables
from tools.demo_model.vision.renderer import SIDE, Objects, draw_objects, render
from tools.demo_model.vision.samples import SCENES, picture, scene_cells
from tools.demo_model.vision.sampling import held_out_table, sample_cells
from tools.demo_model.vision.scenes import ROWS_COLUMNS, held_out_pair
from tools.demo_model.vocabulary import load_vocabulary

SHIPPED = Path(__file__).parents[2] / "edgellm" / "shipped"
TILE = 64


@pytest.fixture(scope="module")
def items() -> list[dict]:
    return seen_items(3, 10, novel=0.5)


@pytest.fixture(scope="module")
def tokenizer():
    return load_vocabulary(SHIPPED)


def one_of_each(colour: int, cell: int = 4) -> np.ndarray:
    """A scene for each kind, with one object of that kind."""
    cells = np.full((len(KINDS), 2, 9), NOTHING, np.uint8)
    cells[:, 0, cell], cells[:, 1, cell] = colour, np.arange(len(KINDS))
    return cells


def tiles(cells: np.ndarray, seed: int = 1) -> tuple[np.ndarray, np.ndarray, Objects]:
    arrays = NumpyArrays(seed)
    objects = Objects(cells, arrays)
    drawn, origins = draw_objects(objects, arrays.uniform(len(cells)), arrays, TILE, SIDE)
    return drawn, origins, objects


def test_polygons_of_all_kinds_run_clockwise():
    """A polygon that runs the other way has no inside, and its part would be missing."""
    grid = np.linspace(-1.1, 1.1, 111)
    x, y = np.meshgrid(grid, grid)
    for name, look in (KINDS | STRANGERS).items():
        for number, (shape, _) in enumerate(look.parts):
            assert (shape(np, x, y) < 0).any(), f"part {number} of {name} is nowhere"


def test_every_kind_is_drawn_in_its_colour_and_fits_its_tile():
    names = list(COLOURS)
    for colour, rgb in enumerate(COLOURS.values()):
        drawn, _, _ = tiles(one_of_each(colour))
        alpha = drawn[:, 3]
        covered = (alpha > 0.5).mean((1, 2))
        assert (covered > 0.03).all() and (covered < 0.75).all()
        border = np.concatenate((alpha[:, 0], alpha[:, -1], alpha[:, :, 0], alpha[:, :, -1]), 1)
        assert border.max() < 0.05
        # The hue of what is painted in the object's colour: most pixels are nearest to it, shades of it included.
        table = np.array(list(COLOURS.values()))
        for kind, tile in enumerate(drawn):
            pixels = tile[:3, tile[3] > 0.9].T
            nearest = np.linalg.norm(pixels[:, None] - table[None], axis=2).argmin(1)
            own = np.mean(nearest == colour)
            shaded = np.mean(np.abs(pixels - np.array(rgb)).max(1) < 0.45)
            assert shaded > 0.4 and own > 0.12, f"{names[colour]} {list(KINDS)[kind]}: {own:.2f}, {shaded:.2f}"


def test_objects_stand_on_their_cells():
    """The middle of what is drawn is nearest to the middle of the object's own cell, whatever the random numbers."""
    for cell in range(9):
        drawn, origins, _ = tiles(one_of_each(1, cell), seed=cell)
        weight = drawn[:, 3] / drawn[:, 3].sum((1, 2), keepdims=True)
        y = (weight.sum(2) * (np.arange(TILE) + 0.5)).sum(1) + origins[:, 0]
        x = (weight.sum(1) * (np.arange(TILE) + 0.5)).sum(1) + origins[:, 1]
        rows = np.digitize(y / SIDE, (0.36, 0.65))
        columns = np.digitize(x / SIDE, (0.36, 0.64))
        assert (rows * 3 + columns == cell).all()


def test_pictures_are_repeatable_whole_steps_of_the_asked_size():
    cells = sample_cells(np.random.default_rng(3), 4, held_out_table())
    first, again, other = (render(cells, NumpyArrays(seed)) for seed in (5, 5, 6))
    assert first.shape == (4, 3, SIDE, SIDE) and first.dtype == np.float32
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert np.array_equal(first, np.round(first)) and first.min() >= 0 and first.max() <= 255
    assert render(cells, NumpyArrays(5), 2 * SIDE).shape == (4, 3, 2 * SIDE, 2 * SIDE)
    nothing = np.full((1, 2, 9), NOTHING, np.uint8)
    assert render(nothing, NumpyArrays(1)).std() > 0


def test_random_scenes_hold_what_they_may():
    held_out = held_out_table()
    assert 0.08 < held_out.mean() < 0.22 and held_out.any(1).all()
    for only in (False, True):
        cells = sample_cells(np.random.default_rng(1), 2000, held_out, only)
        full = cells[:, 1] != NOTHING
        assert ((cells[:, 0] == NOTHING) == ~full).all()
        assert (held_out[cells[:, 0][full], cells[:, 1][full]] == only).all()
        for scene, mask in zip(cells, full, strict=True):
            pairs = [tuple(pair) for pair in scene[:, mask].T]
            assert len(set(pairs)) == len(pairs)
        if not only:
            assert np.bincount(full.sum(1), minlength=10).min() > 20


def test_training_dialogues_never_show_a_held_out_pair():
    for index in range(150):
        seen = seen_dialogue(random.Random(f"training {index}"), "train", 8, 1 + index % 3)
        assert 1 <= len(seen.worlds) <= 3
        assert sum(message["content"].count(PICTURE) for message in seen.messages) == len(seen.worlds)
        for world in seen.worlds:
            assert not any(held_out_pair(thing.colour, thing.kind) for thing in world.things)
            order = [ROWS_COLUMNS.index(thing.cell) for thing in world.things]
            assert order == sorted(set(order)) and len({thing.name for thing in world.things}) == len(order)


def test_items_cover_every_skill_and_show_held_out_pairs(items):
    assert {item["skill"] for item in items} == set(SOURCES)
    things = [thing for item in items for world in item["worlds"] for thing in world.things]
    share = np.mean([held_out_pair(thing.colour, thing.kind) for thing in things])
    assert 0.4 < share < 0.6
    for item in items:
        roles = [message["role"] for message in item["messages"]]
        pictures = sum(message["content"].count(PICTURE) for message in item["messages"])
        assert roles[-1] == "user" and pictures == len(item["worlds"])
        assert pictures == 1 or item["skill"] == "next_picture"
        first = next(message for message in item["messages"] if message["role"] == "user")
        assert first["content"].startswith(PICTURE)
        told = " ".join(message["content"] for message in item["messages"] if message["role"] == "system")
        assert not any(thing.name in told for world in item["worlds"] for thing in world.things)


def _names(text: str) -> list[str]:
    return re.split(r", the | and the ", text.removeprefix("the "))


def test_answers_agree_with_the_cells_that_are_drawn():
    """Answers against the arrays that the renderer draws from, by plain reading of cells and columns."""
    colours, kinds = list(COLOURS), list(KINDS)
    rows, columns = ("back", "middle", "front"), ("left", "centre", "right")
    checked = dict.fromkeys(("list", "count", "where", "relation", "colour", "action", "missing"), 0)
    for item in seen_items(4, 40):
        if len(item["messages"]) > 2:
            continue  # earlier turns may have moved things
        cells = cells_of(item["worlds"][0])
        names = {c: f"{colours[cells[0, c]]} {kinds[cells[1, c]]}" for c in range(9) if cells[1, c] != NOTHING}
        places = {
            name: "centre" if cell == 4 else f"{rows[cell // 3]} {columns[cell % 3]}" for cell, name in names.items()
        }
        answer, skill = item["accepted"][0], item["skill"]
        if skill == "list" and names:
            seen = re.split(r", an? | and an? ", re.match(r"I see an? (.*)\.$", answer)[1])
            assert seen == list(names.values())
            checked["list"] += 1
        elif match := re.match(r"I see (the .*), so there (?:is|are) (\d+)\.$", answer):
            seen = _names(match[1])
            assert int(match[2]) == len(seen) and seen == [name for name in names.values() if name in seen]
            if skill == "count_all":
                assert seen == list(names.values())
            checked["count"] += 1
        elif match := re.match(r"The (.*) is at the (.*)\.$", answer):
            assert places[match[1]] == match[2]
            checked["where"] += 1
        elif match := re.match(r"(Left|Right) of the (.*?) I see (the .*)\.$", answer):
            column = {name: cell % 3 for cell, name in names.items()}
            sign = -1 if match[1] == "Left" else 1
            near = [name for name in names.values() if (column[name] - column[match[2]]) * sign > 0]
            assert _names(match[3]) == near
            checked["relation"] += 1
        elif skill == "colour" and (match := re.match(r"The (.*) is (.*)\.$", answer)):
            assert f"{match[2]} {match[1]}" in names.values()
            checked["colour"] += 1
        elif "\n{" in answer:
            action = json.loads(answer.splitlines()[1])
            assert {action[key] for key in ("object", "target") if key in action} <= set(names.values())
            checked["action"] += 1
        elif match := re.match(r"I do not see an? (.*)\.$", answer):
            assert not any(f" {name} ".endswith(f" {match[1]} ") for name in names.values())
            checked["missing"] += 1
    assert min(checked.values()) >= 5 and sum(checked.values()) > 150, checked


def test_layout_has_a_row_for_every_word(tokenizer):
    tables = token_tables(lambda text: tokenizer.encode(text).ids)
    assert len(tables["empty"]) == len(tables["filled"]) == ROWS
    assert len(tables["colours"]) == len(COLOURS) and len(tables["kinds"]) == len(KINDS)
    assert len({*tables["colours"], *tables["kinds"]}) == len(COLOURS) + len(KINDS)
    row = first_row(8)
    assert tokenizer.decode(list(tables["filled"][row : row + 7])).split() == ["-", ":", "front", "right"]
    assert first_row(9) <= ROWS


def test_training_rows_hold_pictures_and_answers(tokenizer):
    tokens, answers, cells = group(tokenizer, random.Random(6))
    image = tokenizer.token_to_id(PICTURE)
    assert tokens.shape == answers.shape == (64, LENGTH) and cells.shape == (PICTURES, 2, 9)
    counts = (tokens == image).sum(1)
    assert list(counts) == [ROWS * pictures for pictures in PICTURES_OF_ROWS]
    assert not (answers & (tokens == image)).any() and answers.any(1).all()
    seen = seen_dialogue(random.Random(8), "train", 3)
    row, wanted = encode_row(tokenizer, seen)
    said = [message["content"] for message in seen.messages if message["role"] == "assistant"]
    assert tokenizer.decode(list(row[wanted]), skip_special_tokens=True) == "".join(said)


def test_the_chat_template_gives_the_text_of_training():
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    template = ImmutableSandboxedEnvironment().from_string(
        json.loads((SHIPPED / "tokenizer_config.json").read_text())["chat_template"]
    )
    for index in range(20):
        messages = seen_dialogue(random.Random(index), "train", 6, 1 + index % 3).messages
        parts = []
        for message in messages:
            text = message["content"].replace(PICTURE, "")
            images = [{"type": ("image", "image_url")[index % 2]}] * message["content"].count(PICTURE)
            parts.append(message | {"content": [*images, {"type": "text", "text": text}] if images else text})
        rendered = template.render(messages=parts, add_generation_prompt=True)
        assert rendered.replace(PICTURE, PICTURE * ROWS) == render_seen(messages, True)


def test_sample_scenes_are_drawn_as_described():
    for seed, names in SCENES.values():
        cells = scene_cells(names)
        assert [bool(name) for name in names] == list(cells[0, 1] != NOTHING)
        assert picture(cells, seed, plain=True).shape == (2 * SIDE, 2 * SIDE, 3)
