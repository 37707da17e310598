"""The draft head of the shipped model: training sees what drafting will do, and the published layout comes out."""

from functools import partial

import pytest

torch = pytest.importorskip("torch")

from tools.demo_model.documents import ANSWER, CONTEXT, FIRST  # noqa: E402
from tools.demo_model.draft_model import Draft, DraftDimensions  # noqa: E402
from tools.demo_model.evaluate_draft import Simulation  # noqa: E402
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
