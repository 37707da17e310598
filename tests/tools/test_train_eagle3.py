"""A head is trained on what its base wrote, and drafts for it: tiny random weights, real answers, on a CPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

from edgellm import LLM, DraftingConfig  # noqa: E402
from edgellm.engines.building.builder import build_engine_directory  # noqa: E402
from edgellm.engines.model.limits import EngineLimits  # noqa: E402
from tools.demo_model.draft_model import Draft, load_draft  # noqa: E402
from tools.demo_model.model import rotations  # noqa: E402
from tools.heads.answers import Document, read_documents  # noqa: E402
from tools.heads.train_eagle3 import main  # noqa: E402
from tools.heads.training import Base, batches, rows_of  # noqa: E402

sys.path.append(str(Path(__file__).parents[2] / "tools" / "goldens"))
from eagle_reference import Head  # noqa: E402

CHAIN = DraftingConfig(kind="chain", draft_steps=3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, make_checkpoint: Callable[..., Path]) -> Path:
    """A folder with a base of 8 layers, a head of 40 steps, and one of a single step at almost no learning rate."""
    torch.set_num_threads(1)  # tensors are tiny, and other tests run beside this one
    folder = tmp_path_factory.mktemp("head")
    make_checkpoint(folder / "base", num_hidden_layers=8, tie_word_embeddings=False)
    tensors = load_file(folder / "base" / "model.safetensors")
    for name, values in tensors.items():  # the next of 12 tokens follows from the last few: to be learned in seconds
        values.mul_(0.2 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0)
    tensors["lm_head.weight"][12:] *= 0.05
    save_file(tensors, folder / "base" / "model.safetensors")
    prompts = [json.dumps({"source": "a", "prompt": f"What is {number}?"}) for number in range(16)]
    (folder / "prompts.jsonl").write_text("\n".join(prompts))
    common = [str(folder / "base"), "--work", str(folder / "work"), "--steps", "3", "--batch-tokens", "512"]
    common += ["--draft-vocabulary", "200", "--inner", "96"]
    asked = ["--prompts", str(folder / "prompts.jsonl"), "--backend", "numpy", "--answer-tokens", "32"]
    asked += ["--prompt-tokens", "80", "--answer-count", "16", "--own-prompts", "0"]
    main([*common, str(folder / "trained"), *asked, "--optimizer-steps", "40", "--peak", "1e-2"])
    answers = str(folder / "work" / "answers.jsonl")
    main([*common, str(folder / "untrained"), "--answers", answers, "--optimizer-steps", "1", "--peak", "1e-9"])
    return folder


def tokens_a_round(folder: Path, name: str) -> float:
    """Of answers to the prompts that the head was trained on, which equal plain ones token for token."""
    engines = folder / f"engines-{name}"
    limits = EngineLimits(1, 16, 128, draft_top_k=4, draft_steps=3, verify_tree_size=12)
    build_engine_directory(folder / "base", engines, limits, [], draft=folder / name)
    with LLM(engines, backend="numpy", drafting=CHAIN) as llm:
        rounds = tokens = 0
        for document in read_documents(folder / "work" / "answers.jsonl")[:6]:
            for options in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 5}):
                prompt = document.ids[: document.first].tolist()
                llm.use_drafting(None)
                plain = llm.generate(prompt, max_tokens=24, **options)
                llm.use_drafting(CHAIN)
                drafted = llm.generate(prompt, max_tokens=24, **options)
                assert drafted.token_ids == plain.token_ids
                rounds += drafted.drafting.rounds
                tokens += len(drafted.token_ids) - 1 - drafted.drafting.plain_steps
    return tokens / rounds


def test_a_trained_head_drafts_more_and_changes_nothing(trained: Path) -> None:
    record = json.loads((trained / "trained" / "training.json").read_text())
    assert record["training"]["steps"] == 40 and record["answers"] == 16
    assert record["held_out_hits"] == []  # of 16 none is held out, which is not the same as no hits
    assert tokens_a_round(trained, "trained") > tokens_a_round(trained, "untrained") + 0.3


def test_the_layout_is_specforges(trained: Path) -> None:
    config = json.loads((trained / "trained" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] == 200
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    tensors = load_file(trained / "trained" / "model.safetensors")
    assert tensors["fc.weight"].shape == (64, 192) and tensors["lm_head.weight"].dtype == torch.float16
    targets = tensors["d2t"] + torch.arange(200)
    assert torch.equal(targets, tensors["t2d"].nonzero().squeeze(1))


def test_steps_are_those_of_the_reference(trained: Path) -> None:
    """Logits of what the base's features give, and of the step behind it, against the head by its definition."""
    base, draft = Base(trained / "base", "cpu"), load_draft(trained / "trained")
    tensors = {name: value.float() for name, value in load_file(trained / "trained" / "model.safetensors").items()}
    ids = torch.randint(320, (1, 12))
    _, features = base.read(ids)
    config = draft.d
    head = Head(
        tensors, "midlayer.", "3", config.num_attention_heads, config.num_key_value_heads, config.head_dim,
        config.rms_norm_eps, config.rope_theta, base.embedding, tensors["lm_head.weight"],
    )  # fmt: skip
    fused = head.fused(features[0, :-2])
    expected, own = head.run(fused, ids[0, 1:-1])
    hidden = torch.cat((fused, own[-1:]))
    behind, _ = head.run(hidden, ids[0, 1:])
    with torch.no_grad():
        found = two_steps(draft, base, features, ids)
    assert torch.allclose(found[0], expected[-1], atol=1e-3)
    assert torch.allclose(found[1], behind[-1], atol=1e-3)


def two_steps(draft: Draft, base: Base, features: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
    """Logits of the last row that has two tokens behind it, at the first and the second step of training."""
    from tools.demo_model.unrolled import ChainAttention, attend_with_sum

    length, found = ids.shape[1], []
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    attention = ChainAttention(lambda q, k, v: attend_with_sum(causal, False, q, k, v))
    cosine, sine = rotations(length + 2, draft.d, "cpu")
    feature = draft.fuse(features)
    for step in range(2):
        embedded = torch.nn.functional.embedding(ids.roll(-1 - step, 1), base.embedding)
        rotation = cosine[step : step + length], sine[step : step + length]
        feature = draft.midlayer(embedded, feature, rotation, attention)
        found.append(draft.logits(feature[0, length - 3]))
    return found


def test_a_model_without_a_head_to_be_is_refused_before_it_answers(trained: Path, tmp_path: Path) -> None:
    config = json.loads((trained / "base" / "config.json").read_text())
    capped = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "final_logit_softcapping": 30.0}
    wrong: dict[str, dict | None] = {
        "has no config.json": None,
        "logits are not": capped,
        "does not open": {"model_type": "of_nobody"},
        "multiple of 64": {"hidden_size": 72, "head_dim": 16},
    }
    for number, (expected, changes) in enumerate(wrong.items()):
        base = tmp_path / str(number)
        base.mkdir()
        if changes is not None:
            (base / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(SystemExit, match=expected):
            main([str(base), str(tmp_path / "head"), "--work", str(base), "--prompts", str(trained / "prompts.jsonl")])


def test_the_base_reads_what_transformers_enters_its_layers_with(trained: Path) -> None:
    base, entering = Base(trained / "base", "cpu"), {}
    for index in base.taps:
        layer = base.network.model.layers[index]
        layer.register_forward_pre_hook(lambda _, inputs, i=index: entering.update({i: inputs[0]}))
    ids = torch.randint(320, (2, 9))
    hidden, features = base.read(ids)
    assert torch.equal(features, torch.cat([entering[index] for index in (2, 4, 5)], dim=-1))
    assert torch.allclose(base.logits(hidden), base.network(ids).logits, atol=1e-4)


def test_batches_hold_every_document_once_and_pad_to_their_lengths() -> None:
    import random

    import numpy as np

    documents = [Document(np.arange(1, length + 1, dtype=np.int32), 2) for length in (5, 90, 31, 32, 33, 7)]
    found = list(batches(documents, 128, random.Random(1)))
    assert sorted(id(each) for batch in found for each in batch) == sorted(map(id, documents))
    for batch in found:
        ids, codes = rows_of(batch, "cpu")
        assert len(batch) == 1 or ids.numel() <= 128
        assert [int((row > 0).sum()) for row in ids] == [len(each.ids) for each in batch]
        assert (codes[:, 0] == 9).all() and ((codes == 2).sum(1) == (ids > 0).sum(1) - 2).all()
