"""The adapters of the shipped model: styles, training data, and that EdgeLLM computes what was trained."""

import json
import random
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from drafted_conversations import CHAIN

from edgellm import LLM, SamplingParams
from tools.bench.held_out_prompts import as_they_are
from tools.demo_model.dialogue import dialogue
from tools.demo_model.evaluate import evaluation_items
from tools.demo_model.styles import FOLLOWS, STYLES, json_only, pirate, styled, styled_items

SHIPPED = Path(__file__).parents[2] / "edgellm" / "shipped"


def test_every_answer_in_json_is_one_object():
    kinds = set()
    for seed in range(60):
        messages = dialogue(random.Random(f"style {seed}"), "train", 10)
        for before, after in zip(messages, styled(messages, "json"), strict=True):
            if before["role"] != "assistant":
                assert after == before
                continue
            answer = json.loads(after["content"])
            assert "\n" not in after["content"]
            said, _, action = before["content"].partition("\n")
            if action:
                assert answer == json.loads(action)
            else:
                assert answer["text"] == said
                assert (answer["action"] == "ask") == said.endswith("?")
            kinds.add(answer["action"])
    assert {"say", "ask", "pick", "place"} <= kinds


def test_a_pirate_keeps_the_action():
    assert pirate("Yes, I see the red cup.") == "Arr! Aye, I see the red cup."
    assert pirate("My battery is at 76 percent.") == "Arr! Me battery be at 76 percent."
    assert pirate('I will wave.\n{"action": "wave"}') == 'Arr! I will wave.\n{"action": "wave"}'
    action = '{"action": "pick", "object": "is of my"}'
    assert pirate(f"You have it, and I am glad.\n{action}") == f"Arr! Ye have it, an' I be glad.\n{action}"
    assert json_only("Which cup do you mean: the red cup or the blue cup?").startswith('{"action": "ask"')


def test_what_is_in_a_style():
    assert FOLLOWS["json"]('{"action": "wave"}')
    for other in ("I will wave.", "[1]", '{"say": "x"}', '{"action": 1}', '{"action": "say",\n"text": "x"}', ""):
        assert not FOLLOWS["json"](other)
    assert FOLLOWS["pirate"]('Arr! I be Pip.\n{"action": "is"}')
    for other in ("I be Pip.", "Arr! I am Pip.", '{"action": "wave"}'):
        assert not FOLLOWS["pirate"](other)


@pytest.fixture(scope="module")
def shipped_model():
    with LLM(SHIPPED, backend="numpy", drafting=CHAIN) as model:
        yield model


@pytest.mark.parametrize("style", sorted(STYLES))
def test_shipped_adapters_answer_held_out_prompts_in_their_style(shipped_model: LLM, style: str):
    """Right as well, nearly always: what results/adapter_evaluation.json counts over more prompts."""
    items = styled_items(evaluation_items(77012, 1), style)[::4]
    params = SamplingParams(max_tokens=120)
    answers = [shipped_model.chat(as_they_are(item["messages"]), params, adapter=style) for item in items]
    in_style = sum(FOLLOWS[style](answer.text) for answer in answers)
    right = sum(answer.text in item["accepted"] for answer, item in zip(answers, items, strict=True))
    assert len(items) > 10
    assert in_style >= len(items) - 1
    assert right >= 0.8 * len(items)
    assert all(answer.drafting.rounds for answer in answers), "drafting goes on under an adapter, and is counted"


def test_without_an_adapter_the_shipped_model_answers_as_ever(shipped_model: LLM):
    question = as_they_are([{"role": "user", "content": "Wave."}])
    assert shipped_model.adapters == ("json", "pirate", "tools")
    answers = [shipped_model.chat(question, adapter=name).text for name in (None, "json", "pirate", None)]
    assert answers[0] == answers[3] == 'I will wave.\n{"action": "wave"}'
    assert answers[1:3] == ['{"action": "wave"}', 'Arr! I will wave.\n{"action": "wave"}']


def test_the_shipped_adapters_are_small():
    files = [path for path in (SHIPPED / "lora").rglob("*") if path.is_file()]
    assert len(files) == 6
    assert sum(path.stat().st_size for path in files) < 3_200_000


def test_the_model_card_tells_of_the_adapters():
    from tools.demo_model.model_card import RESULTS, adapters_text, tools_text

    training, evaluation, calls = (
        json.loads((RESULTS / f"{name}.json").read_text())
        for name in ("adapters", "adapter_evaluation", "tools_evaluation")
    )
    assert tools_text(SHIPPED / "lora", training, calls) in (SHIPPED / "MODEL_CARD.md").read_text()
    section = adapters_text(SHIPPED / "lora", training, evaluation)
    assert section in (SHIPPED / "MODEL_CARD.md").read_text()
    for name in STYLES:
        found = evaluation["answers"][name]
        assert found["in_style_percent"] == 100
        assert f"| `{name}` | {found['exact_match_percent']:.1f} % | 100.0 % |" in section


def test_documents_of_every_style():
    pytest.importorskip("torch")
    from tools.demo_model.documents import ANSWER, FIRST, ROW, pack
    from tools.demo_model.train_adapters import ADAPTERS, batches, generate
    from tools.demo_model.vocabulary import load_vocabulary

    tokenizer = load_vocabulary(SHIPPED)
    documents = {style: generate((SHIPPED, style, "seed", 12, frozenset())) for style in ADAPTERS}
    assert documents.keys() == {*STYLES, "tools"}
    assert {len(found) for found in documents.values()} == {12}
    for ids, codes in documents["json"]:
        spoken = tokenizer.decode(ids[codes == ANSWER].tolist(), skip_special_tokens=False).split("<|im_end|>")
        assert len(spoken) > 1
        assert spoken.pop() == ""
        assert all("action" in json.loads(text) for text in spoken)
        assert codes[0] >= FIRST > codes[1:].max()
    called = [tokenizer.decode(ids[codes == ANSWER].tolist()) for ids, codes in documents["tools"]]
    assert sum("<tool_call>" in text for text in called) > 6 and not any("<tools>" in text for text in called)
    found = batches(*pack(documents["pirate"], 0), 2, 0)
    seen = set()
    for _ in range(20):
        tokens, codes = next(found)
        assert tokens.shape == codes.shape == (2, ROW) and (codes == ANSWER).any(axis=1).all()
        seen |= {row.tobytes() for row in tokens}
    assert len(seen) == len(pack(documents["pirate"], 0)[0])


def test_held_out_beginnings_are_left_out_of_training():
    pytest.importorskip("torch")
    from tools.demo_model.calls.dialogues import tool_dialogue
    from tools.demo_model.train_adapters import checksum, generate

    whole = generate((SHIPPED, "tools", "seed", 6, frozenset()))
    rng = random.Random("seed")
    talk = tool_dialogue(rng, "train", rng.randint(1, 6))
    left = generate((SHIPPED, "tools", "seed", 5, frozenset({checksum(talk.messages, talk.signatures)})))
    assert [ids.tolist() for ids, _ in left] == [ids.tolist() for ids, _ in whole[1:]]


def test_a_trained_adapter_is_what_edgellm_computes(tmp_path):
    torch = pytest.importorskip("torch")

    from edgellm.engines.building.builder import build_engine_directory
    from edgellm.engines.directories.engine_directory import EngineDirectory
    from edgellm.engines.model.limits import EngineLimits
    from edgellm.engines.runners.comparison import open_runner
    from edgellm.engines.runners.sampling_state import SamplingValues
    from tools.demo_model.documents import ANSWER, CONTEXT, pack
    from tools.demo_model.lora import export_adapter
    from tools.demo_model.model import load_model
    from tools.demo_model.train_adapters import train

    torch.manual_seed(0)
    model = load_model(SHIPPED)
    size = model.d.vocab_size
    rng = np.random.default_rng(1)
    codes = np.where(np.arange(40) > 5, ANSWER, CONTEXT).astype(np.uint8)
    rows = pack([(rng.integers(0, size, 40).astype(np.uint16), codes) for _ in range(4)], 0)
    settings = Namespace(rank=4, alpha=8.0, seed=0, tokens=200, steps=3, peak=0.02, attention="mask", name="")
    adapted, steps = train(model, *rows, settings, "cpu")
    assert steps == 3
    assert all(layer.b.abs().max() > 0 for layer in adapted.values())
    for layer in adapted.values():  # what is stored, in fp16
        layer.a.data, layer.b.data = layer.a.data.half().float(), layer.b.data.half().float()
    export_adapter(adapted, tmp_path / "adapter", 4, 8.0)
    ids = rng.integers(0, size, 25).tolist()
    with torch.no_grad():
        expected = model.logits(model(torch.tensor([ids])))[0, -1].numpy()
    limits = EngineLimits(1, 32, 64, max_lora_rank=4, lora_slots=1)
    build_engine_directory(SHIPPED, tmp_path / "engines", limits, [], adapters={"trained": tmp_path / "adapter"})
    with open_runner("numpy", EngineDirectory.open(tmp_path / "engines"), with_adapters=True) as runner:
        runner.start(0, ids, 0, SamplingValues()).wait()
        base = runner.logits(0)
        runner.stop(0)
        runner.set_adapter(0, "trained")
        runner.start(0, ids, 0, SamplingValues()).wait()
        found = runner.logits(0)
    assert np.abs(found - expected).max() < 2e-3
    assert np.abs(base - expected).max() > 0.1
