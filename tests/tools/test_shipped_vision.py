"""The shipped model sees its sample scenes, through the runtime on NumPy."""

import json
from pathlib import Path

import pytest

from edgellm import LLM, SamplingParams
from tools.demo_model.vision.kinds import KINDS
from tools.demo_model.vision.samples import SCENES
from tools.demo_model.words import article, join

SHIPPED = Path(__file__).parents[2] / "edgellm" / "shipped"
SCENE_FOLDER = SHIPPED / "scenes"
SYSTEM = (SHIPPED / "system_prompt_image.txt").read_text().strip()

pytestmark = pytest.mark.skipif(not (SHIPPED / "vision").exists(), reason="the shipped model has no vision encoder")


@pytest.fixture(scope="module")
def llm():
    with LLM(SHIPPED, backend="numpy") as opened:
        yield opened


def asked(llm: LLM, scene: str, question: str) -> str:
    picture = {"type": "image", "image": str(SCENE_FOLDER / f"{scene}.png")}
    content = [picture, {"type": "text", "text": question}]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]
    return llm.chat(messages, SamplingParams(max_tokens=160)).text


@pytest.mark.parametrize("scene", sorted(SCENES))
def test_what_is_on_a_sample_scene(llm: LLM, scene: str):
    names = [name for name in SCENES[scene][1] if name]
    assert asked(llm, scene, "What do you see?") == f"I see {join([article(name) for name in names])}."
    counted = join([f"the {name}" for name in names])
    assert asked(llm, scene, "How many objects are there?") == f"I see {counted}, so there are {len(names)}."


def test_places_actions_and_what_is_not_there(llm: LLM):
    assert asked(llm, "breakfast", "Where is the banana?") == "The yellow banana is at the back right."
    assert asked(llm, "study", "What colour is the clock?") == "The clock is black."
    sentence, action = asked(llm, "workshop", "Please pick up the hammer.").splitlines()
    assert sentence == "I will pick up the orange hammer."
    assert json.loads(action) == {"action": "pick", "object": "orange hammer"}
    assert asked(llm, "toys", "Give me the hat.") == "I do not see a hat."


@pytest.mark.parametrize(
    "question",
    ["What is in the picture?", "What do you see in this image?", "Describe the image.", "What does this photo show?"],
)
def test_questions_that_name_the_picture(llm: LLM, question: str):
    assert asked(llm, "toys", question) == asked(llm, "toys", "What do you see?")


def test_what_is_asked_about_is_not_there(llm: LLM):
    assert asked(llm, "study", "What is left of the banana?") == "I do not see a banana."
    assert asked(llm, "toys", "Is there a hat in the photo?") == "No, I do not see a hat."


def test_a_later_picture_of_a_chat_is_told_apart(llm: LLM):
    session = llm.create_session(SYSTEM, SamplingParams(max_tokens=160))

    def said(question: str, scene: str | None = None) -> str:
        picture = [{"type": "image", "image": str(SCENE_FOLDER / f"{scene}.png")}] if scene else []
        return session.send([*picture, {"type": "text", "text": question}]).text

    for scene in ("toys", "workshop", "breakfast", "study"):
        names = [article(name) for name in SCENES[scene][1] if name]
        assert said("What do you see?", scene) == f"I see {join(names)}."
        assert said("Where is the pyramid?") == (
            "The white pyramid is at the front centre." if scene == "toys" else "I do not see a pyramid."
        )


def test_published_tensors_are_those_of_the_record():
    from safetensors.numpy import load_file

    tensors = load_file(SHIPPED / "vision" / "model.safetensors")
    assert {tensor.dtype.name for tensor in tensors.values()} == {"float16"}
    trained = sum(tensor.size for name, tensor in tensors.items() if "post_layernorm" not in name)
    results = Path(__file__).parents[2] / "tools" / "demo_model" / "results" / "eyes_training.json"
    assert {stage["parameters"] for stage in json.loads(results.read_text())["stages"]} == {trained}


def test_drafted_answers_about_a_picture_are_plain_ones(llm: LLM):
    with LLM(SHIPPED, backend="numpy", drafting=None) as plain:
        question = "Put the book next to the lamp."
        assert asked(llm, "study", question) == asked(plain, "study", question)


def test_the_system_prompts_describe_one_robot():
    from tools.demo_model.system_prompt import DEFAULT_SYSTEM_PROMPT, PICTURE_SYSTEM_PROMPT

    assert SYSTEM == PICTURE_SYSTEM_PROMPT and DEFAULT_SYSTEM_PROMPT.startswith(PICTURE_SYSTEM_PROMPT)
    assert not any(kind in SYSTEM for kind in KINDS)


def test_everything_that_ships_is_small():
    files = [path for path in SHIPPED.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) < 36_000_000
    assert all(path.stat().st_size < 60_000 for path in SCENE_FOLDER.glob("*.png"))
    assert sorted(path.stem for path in SCENE_FOLDER.glob("*.png")) == sorted(SCENES)
