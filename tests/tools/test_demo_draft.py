"""The draft head of the shipped model: training sees what drafting will do, and the published layout comes out."""

import json
import random
from functools import partial

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

from tools.demo_model.documents import ANSWER, CONTEXT, FIRST  # noqa: E402
from tools.demo_model.draft_model import Draft, DraftDimensions, begin_from, export_draft, load_draft  # noqa: E402
from tools.demo_model.evaluate_draft import Simulation, Tree  # noqa: E402
from tools.demo_model.model import Dimensions, Model  # noqa: E402
from tools.demo_model.train import attend_within, document_attention  # noqa: E402
from tools.demo_model.unrolled import ChainAttention, attend_with_sum, predictable, unrolled_loss  # noqa: E402

SIZES = {"vocab_size": 50, "hidden_size": 32, "head_dim": 16, "intermediate_size": 48}
BASE = Dimensions(**SIZES, num_hidden_layers=8, num_attention_heads=2, num_key_value_heads=1)
HEAD = DraftDimensions(**SIZES, draft_vocab_size=20, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture
def models() -> tuple[Model, Draft]:
    torch.manual_seed(3)
    base, draft = Model(BASE), Draft(HEAD, torch.randperm(50)[:20])
    for parameter in (*base.parameters(), *draft.parameters()):
        parameter.data += 0.2 * torch.randn_like(parameter)
    return base.requires_grad_(False), draft


def chain_logits(base: Model, draft: Draft, ids: list[int], root: int, steps: int) -> list[torch.Tensor]:
    """What drafting computes at each step of a chain behind token `root` when the chain follows `ids`."""
    simulation, found = Simulation(base, draft, ids), []
    feature = simulation.hidden[:, root - 1 : root]
    keys, values = simulation.committed.keys[:, :, :root], simulation.committed.values[:, :, :root]
    for step in range(steps):
        found.append(draft.logits(feature[0, 0]))

        def attend(q, k, v):
            nonlocal keys, values
            keys, values = torch.cat((keys, k), dim=2), torch.cat((values, v), dim=2)
            return torch.nn.functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

        place = root + step
        rotation = tuple(part[place : place + 1] for part in simulation.rotation)
        embedded = base.model.embed_tokens(torch.tensor([[ids[root + step + 1]]]))
        feature = draft.midlayer(embedded, feature, rotation, attend)
    return found


def test_unrolled_training_is_what_drafting_computes(models):
    """The loss of two packed documents against one computed chain by chain with growing caches."""
    base, draft = models
    ids = torch.randint(50, (1, 24))
    codes = torch.full((1, 24), CONTEXT)
    codes[0, 0], codes[0, 13] = CONTEXT + FIRST, CONTEXT + FIRST
    codes[0, 5:11], codes[0, 15:24] = ANSWER, ANSWER
    steps, decay = 4, 0.7
    mask = document_attention((codes >= FIRST).cumsum(1), False)
    chain = ChainAttention(partial(attend_with_sum, mask, False))
    hidden, features = base.with_features(
        ids, HEAD.eagle_aux_hidden_state_layer_ids, partial(attend_within, mask, False)
    )
    read = base.logits, hidden, features, base.model.embed_tokens(ids)
    loss, found = unrolled_loss(draft, read, chain, codes, steps, decay)

    total, counts, rows = [0.0] * steps, [0] * steps, [0] * steps
    for begin, end in ((0, 13), (13, 24)):
        part = ids[0, begin:end].tolist()
        usable = predictable(codes)[0, begin:end].tolist()
        wanted = base.logits(base(torch.tensor([part])))[0]
        for root in range(1, len(part)):
            following = chain_logits(base, draft, part + [0] * (steps + 1), root, steps)
            for step in range(steps):
                place = root + step + 1
                if not all(usable[root : place + 1]) or place >= len(part):
                    break
                rows[step] += 1
                if not draft.t2d[wanted[place - 1].argmax()]:
                    break
                target = wanted[place - 1][draft.targets].softmax(-1)
                total[step] -= (target * following[step].log_softmax(-1)).sum()
                counts[step] += 1
    assert [count for _, count in found] == rows and counts[0] > 3 and counts[1] > 0
    each = [decay**step * value / max(1, count) for step, (value, count) in enumerate(zip(total, counts, strict=True))]
    assert torch.allclose(loss, sum(each) / sum(decay**step for step in range(steps)), rtol=1e-4)


def test_a_chain_is_the_narrowest_tree(models):
    base, draft = models
    ids = torch.randint(50, (20,)).tolist()
    with torch.no_grad():
        simulation = Simulation(base, draft, ids)
        chain = simulation.proposed(9, Tree(1, 4, 5))
        assert [parent for parent, _ in chain] == [-1, 0, 1, 2]
        tokens, part = [], ids[:10]
        for _ in range(4):
            following = chain_logits(base, draft, part + [0], 9, len(part) - 9)
            tokens.append(int(draft.targets[following[-1].argmax()]))
            part = part + tokens[-1:]
        assert [token for _, token in chain] == tokens


def test_tree_holds_the_likeliest_paths(models):
    """Against every path of the tree, scored one by one: K as wide as the vocabulary leaves nothing out."""
    base, draft = models
    ids = torch.randint(50, (12,)).tolist()
    with torch.no_grad():
        simulation = Simulation(base, draft, ids)
        nodes = simulation.proposed(7, Tree(20, 2, 31))
        first = chain_logits(base, draft, [*ids[:8], 0], 7, 1)[0].log_softmax(-1)
        paths = {(int(t),): float(s) for t, s in zip(draft.targets, first, strict=True)}
        for token, score in list(paths.items()):
            second = chain_logits(base, draft, [*ids[:8], token[0], 0], 7, 2)[1].log_softmax(-1)
            paths |= {(*token, int(t)): score + float(s) for t, s in zip(draft.targets, second, strict=True)}
    found = {(token,) if parent < 0 else (nodes[parent][1], token) for parent, token in nodes}
    assert found == set(sorted(paths, key=lambda path: -paths[path])[:30])


def test_perfect_and_useless_drafts_bound_the_acceptance(models):
    base, draft = models
    ids = torch.randint(50, (16,)).tolist()
    with torch.no_grad():
        simulation = Simulation(base, draft, ids)
        simulation.proposed = lambda root, tree: [(i - 1, t) for i, t in enumerate(ids[root + 1 : root + 6])]
        assert simulation.rounds(3, Tree(1, 5, 6)) == [6, 6]
        simulation.proposed = lambda root, tree: [(-1, 51)]
        assert simulation.rounds(3, Tree(1, 5, 6)) == [1] * 12


def test_published_layout(models, tmp_path):
    base, draft = models
    begin_from(draft, base.model.norm.weight, base.model.embed_tokens.weight)
    save_file({name: value.contiguous() for name, value in draft.state_dict().items()}, tmp_path / "draft.safetensors")
    export_draft(tmp_path / "draft.safetensors", tmp_path / "draft", HEAD, 2, 0)
    state = load_file(tmp_path / "draft" / "model.safetensors")
    shapes = {name: list(value.shape) for name, value in state.items()}
    assert shapes == {
        "fc.weight": [32, 96],
        "midlayer.input_layernorm.weight": [32],
        "midlayer.hidden_norm.weight": [32],
        "midlayer.post_attention_layernorm.weight": [32],
        "midlayer.self_attn.q_proj.weight": [64, 64],
        "midlayer.self_attn.k_proj.weight": [32, 64],
        "midlayer.self_attn.v_proj.weight": [32, 64],
        "midlayer.self_attn.o_proj.weight": [32, 64],
        "midlayer.mlp.gate_proj.weight": [48, 32],
        "midlayer.mlp.up_proj.weight": [48, 32],
        "midlayer.mlp.down_proj.weight": [32, 48],
        "norm.weight": [32],
        "lm_head.weight": [20, 32],
        "d2t": [20],
        "t2d": [50],
    }
    targets = torch.arange(20) + state["d2t"]
    assert state["d2t"].dtype == torch.int64 and state["t2d"].dtype == torch.bool
    assert targets.tolist() == state["t2d"].nonzero().squeeze(1).tolist()
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["eagle_aux_hidden_state_convention"] == "entered"
    loaded = load_draft(tmp_path / "draft")
    assert torch.allclose(loaded.lm_head.weight, base.model.embed_tokens.weight[targets], atol=1e-2)


def test_taps_are_the_states_that_enter_their_layers(models):
    base, _ = models
    ids = torch.randint(50, (1, 7))
    entering = {}
    for index in (2, 4, 5):
        base.model.layers[index].register_forward_pre_hook(lambda _, inputs, i=index: entering.update({i: inputs[0]}))
    _, features = base.with_features(ids, (2, 4, 5))
    assert torch.equal(features, torch.cat([entering[index] for index in (2, 4, 5)], dim=-1))


def test_continuations_end_where_the_text_ends():
    from tools.demo_model.continuations import continued

    torch.manual_seed(1)
    base = Model(BASE)
    prompts = [[random.Random(i).randrange(50) for _ in range(3 + i)] for i in range(4)]
    generator = torch.Generator().manual_seed(2)
    greedy = continued(base, prompts, 9, 1.0, generator, ends=set())
    for prompt, new in zip(prompts, greedy, strict=True):
        ids = list(prompt)
        for token in new:
            assert base.logits(base(torch.tensor([ids]))[:, -1]).argmax() == token
            ids.append(token)
        assert len(new) == 9
    cut = continued(base, prompts, 9, 1.0, generator, ends={greedy[0][4]})
    assert cut[0] == greedy[0][: greedy[0].index(greedy[0][4]) + 1]


def test_draft_vocabulary_is_what_answers_use_most(tmp_path):
    import numpy as np

    from tools.demo_model.train_draft import frequent_answer_tokens

    tokens = np.array([[7, 7, 7, 7, 3, 3, 9, 5, 5, 5]], np.uint16)
    codes = np.array(
        [[CONTEXT + FIRST, CONTEXT, CONTEXT, ANSWER, ANSWER, ANSWER, ANSWER, CONTEXT, ANSWER, ANSWER]], np.uint8
    )
    np.savez(tmp_path / "00000.npz", tokens=tokens, codes=codes)
    found = frequent_answer_tokens(tmp_path, 1, 3, 50, np.array([9, 9, 9], np.uint16))
    assert found.tolist() == [9, 3, 5]


def test_continuations_replace_the_last_rows_of_a_batch():
    import numpy as np

    from tools.demo_model.train_draft import mixed_batches

    source = iter([(np.full((5, 4), 1), np.full((5, 4), 2))])
    texts = np.full((3, 4), 7), np.full((3, 4), 8)
    tokens, codes = next(mixed_batches(source, texts, 2, np.random.default_rng(0)))
    assert tokens[:, 0].tolist() == [1, 1, 1, 7, 7] and codes[:, 0].tolist() == [2, 2, 2, 8, 8]


def test_model_card_tells_of_a_draft_head_where_there_is_one():
    from tools.demo_model.model_card import draft_text

    training = {"parameters": 1_987_840, "tokens": 2e6, "optimizer_steps": 3, "minutes": 4, "device": "x", "chain": 6}
    text = draft_text(training, {"seed": 5, "prompts": 8, "chain of 5": {"mean acceptance length": 3.456}})
    assert "1.99 million" in text and "| chain of 5 | 3.46 |" in text and "$" not in text
