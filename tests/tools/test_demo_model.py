"""The generator of the shipped model's training and evaluation data: reproducible, cleanly split, right."""

import json
import random
import re
from pathlib import Path

import pytest

from tools.demo_model import actions_text, questions_text
from tools.demo_model.dialogue import Dialogue, dialogue
from tools.demo_model.evaluate import SOURCES, evaluation_items
from tools.demo_model.grammar import expand, phrasings
from tools.demo_model.smalltalk import intents
from tools.demo_model.words import LISTS, held_out_words, listed

SHIPPED = Path(__file__).parents[2] / "edgellm" / "shipped"
BLOCKS = [
    text
    for module in (questions_text, actions_text)
    for name, text in vars(module).items()
    if name.isupper() and not name.startswith("_") and isinstance(text, str)
]


@pytest.fixture(scope="module")
def items() -> list[dict]:
    return evaluation_items(5, 12)


def actions_in(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_expand_closes_up_spaces():
    assert expand("go (to|over to|) {o}") == ["go to {o}", "go over to {o}", "go {o}"]
    assert set(expand("(a (b|c)|d)")) == {"a b", "a c", "d"}


def test_same_seed_same_dialogue():
    first, again = (dialogue(random.Random("seed 3"), "train", 12) for _ in range(2))
    assert first == again
    assert first != dialogue(random.Random("seed 4"), "train", 12)
    assert evaluation_items(9, 2) == evaluation_items(9, 2)


def test_phrasings_are_split_and_held_out_ones_use_known_words():
    held_out = 0
    for block in [*BLOCKS, *(block for block, _ in intents())]:
        train = {text for group in phrasings(block, "train") for text in group}
        evaluation = {text for group in phrasings(block, "eval") for text in group}
        known = {word for text in train for word in text.replace(",", " ").split()}
        assert train and not train & evaluation
        assert all(known.issuperset(text.replace(",", " ").split()) for text in evaluation)
        held_out += len(evaluation)
    assert held_out > 500


def test_held_out_words_never_occur_in_training_scenes():
    for category in LISTS:
        assert not set(listed(category, "train")) & set(listed(category, "eval"))
        assert len(listed(category, "eval")) >= 0.1 * len(LISTS[category])
    for index in range(300):
        talk = Dialogue(random.Random(index), "train")
        words = {word for thing in talk.world.things for word in thing.name.split()}
        assert not words & held_out_words()
        assert talk.world.name not in listed("name", "eval")


def test_items_cover_every_skill_and_end_with_the_user(items):
    assert {item["skill"] for item in items} == set(SOURCES)
    for item in items:
        roles = [message["role"] for message in item["messages"]]
        assert roles[-1] == "user" and item["accepted"]
        assert roles[roles[0] == "system" :: 2] == ["user"] * len(roles[roles[0] == "system" :: 2])


def test_every_action_is_one_line_of_canonical_json(items):
    count = 0
    for item in items:
        for answer in item["accepted"]:
            found = actions_in(answer)
            assert len(found) <= 1 and len(answer.splitlines()) <= 2
            if found:
                count += 1
                assert answer.splitlines()[1] == json.dumps(found[0], ensure_ascii=False)
                assert next(iter(found[0])) == "action"
    assert count > 100


def test_answers_name_only_objects_of_the_scene():
    """Objects in actions and in "I see ..." answers are objects that the system prompt lists."""
    for index in range(400):
        talk = Dialogue(random.Random(f"scene {index}"), "eval")
        names = {thing.name for thing in talk.world.things}
        for _ in range(8):
            talk.turn()
        for message in talk.messages:
            if message["role"] == "assistant":
                for action in actions_in(message["content"]):
                    assert {action[key] for key in ("object", "target") if key in action} <= names
                listing = re.match(r"I see (the .*?)(, so there (is|are) (\d+))?\.$", message["content"])
                if listing:
                    seen = re.split(r", the | and the ", listing[1].removeprefix("the "))
                    assert set(seen) <= names
                    assert listing[4] is None or int(listing[4]) == len(seen)


def test_answers_agree_with_a_plain_reading_of_the_scene():
    """Positions, counts and neighbours in answers against the lines of a bullet system prompt, read with a regular
    expression and nothing of the generator's own state."""
    rows, columns = {"front": 0, "middle": 1, "back": 2}, {"left": 0, "centre": 1, "right": 2}
    checked = 0
    for index in range(400):
        talk = Dialogue(random.Random(f"reading {index}"), "eval")
        if not talk.world.grid or not talk.world.things:
            continue
        system = "\n".join(f"- {thing.name}: {thing.place}" for thing in talk.world.things)
        cells = {}
        for name, place in re.findall(r"^- (.*): (.*)$", system, re.M):
            row, column = place.split() if " " in place else ("middle", "centre")
            column = column.replace("center", "centre")
            cells[name] = rows[row], columns[column]
        for skill in ("where", "relation", "count_all", "side"):
            turn = talk.turn(SOURCES[skill][0])
            if turn is None or turn.label != skill:
                continue
            answer = turn.answer.replace("center", "centre")
            if match := re.match(r"The (.*) is at the (.*)\.$", answer):
                place = match[2] if " " in match[2] else "middle centre"
                assert cells[match[1]] == (rows[place.split()[0]], columns[place.split()[1]])
                checked += 1
            elif match := re.match(r"(Left|Right|In front) of the (.*?) I see the (.*)\.$", answer):
                row, column = cells[match[2]]
                test = {"Left": lambda c, k=column: c[1] < k, "Right": lambda c, k=column: c[1] > k}.get(
                    match[1], lambda c, k=row: c[0] < k
                )
                assert re.split(r", the | and the ", match[3]) == [name for name, cell in cells.items() if test(cell)]
                checked += 1
            elif match := re.search(r"so there (?:is|are) (\d+)", answer):
                assert int(match[1]) == len(cells)
                checked += 1
    assert checked > 300


def test_shipped_chat_template_equals_the_training_format():
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from tools.demo_model.vocabulary import render

    template = json.loads((SHIPPED / "tokenizer_config.json").read_text())["chat_template"]
    messages = dialogue(random.Random(2), "train", 4)
    rendered = ImmutableSandboxedEnvironment().from_string(template)
    for flag in (False, True):
        assert rendered.render(messages=messages, add_generation_prompt=flag) == render(messages, flag)


def test_shipped_tokenizer_encodes_any_text_and_splits_digits():
    from tools.demo_model.vocabulary import SPECIAL_TOKENS, load_vocabulary

    tokenizer = load_vocabulary(SHIPPED)
    text = "Grüße 你好 🤖 \x00\x7f \t 1024%"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("1024").ids) == 4
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert sum(token.startswith("<|reserved_") for token in SPECIAL_TOKENS) >= 32
