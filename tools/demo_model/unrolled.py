"""Training-time test of EAGLE-3: the draft predicts several tokens ahead from its own output, as when drafting.

Row r of step s stands for the draft's entry r+s in a chain that was begun at row r. It sees the entries 0..r made of
the base's real features, and the entries r+1..r+s of its own chain, which stand in row r of the earlier steps. So no
mask is needed beyond the causal one of step 0, and keys of later steps count row by row.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from tools.demo_model.documents import ANSWER, FIRST, TEXT
from tools.demo_model.draft_model import Draft
from tools.demo_model.model import rotations

#: Places whose logits of the base are computed at a time: of 50,000 tokens they are 1.6 GB in float32.
_PLACES = 8192


def attend_with_sum(mask, flex: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple:
    """Attention [B, heads, T, D] and the logarithm of the sum of its exponentials [B, heads, T], fp32."""
    if flex:
        from torch.nn.attention.flex_attention import AuxRequest, flex_attention

        mixed, extra = flex_attention(q, k, v, block_mask=mask, return_aux=AuxRequest(lse=True))
        return mixed, extra.lse
    scores = (q @ k.mT).float() * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v, scores.logsumexp(-1)


class ChainAttention:
    """The attention function of all steps of one pass: keeps keys and values as they come."""

    def __init__(self, first: Callable[..., tuple]):
        """`first`: `attend_with_sum` for the mask of step 0."""
        self.first, self.keys, self.values = first, [], []

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        repeat = q.shape[1] // k.shape[1]
        self.keys.append(k.repeat_interleave(repeat, dim=1))
        self.values.append(v.repeat_interleave(repeat, dim=1))
        mixed, total = self.first(q, self.keys[0], self.values[0])
        if len(self.keys) == 1:
            return mixed
        own = [(q * key).sum(-1).float() * q.shape[-1] ** -0.5 for key in self.keys[1:]]
        shares = torch.stack((total.float(), *own), dim=-1).softmax(-1).to(v.dtype)
        return sum(shares[..., i : i + 1] * part for i, part in enumerate((mixed, *self.values[1:])))


def shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """x[:, r + by] at r; what has wrapped around at the end is never used."""
    return x.roll(-by, dims=1)


def predictable(codes: torch.Tensor) -> torch.Tensor:
    """Whether a token [B, T] is part of an answer or of open text, and not the first of its document."""
    kind = codes & (FIRST - 1)
    return ((kind == ANSWER) | (kind == TEXT)) & (codes < FIRST)


class Targets(NamedTuple):
    """What the base expects behind each place [B * T] whose next token can be predicted: the place's number among
    those (`rows`, 0 elsewhere), and of each of these its likeliest token (`best`), whether that is in the draft
    vocabulary (`known`), and the distribution over the draft vocabulary (`probabilities`, fp32)."""

    rows: torch.Tensor
    best: torch.Tensor
    known: torch.Tensor
    probabilities: torch.Tensor


@torch.no_grad()
def targets_of(draft: Draft, logits: Callable, hidden: torch.Tensor, codes: torch.Tensor) -> Targets:
    """`logits` of the base's last hidden states [B, T, H], where what follows is predictable: of all steps at once."""
    length = codes.shape[1]
    following = shifted(predictable(codes), 1) & (torch.arange(length, device=codes.device) + 1 < length)
    places = following.flatten().nonzero().squeeze(1)
    best, probabilities = [], []
    for some in places.split(_PLACES):
        wanted = logits(hidden.flatten(0, 1)[some]).float()
        best.append(wanted.argmax(-1))
        probabilities.append(wanted[:, draft.targets].softmax(-1))
    rows = torch.zeros(codes.numel(), dtype=torch.long, device=codes.device)
    rows[places] = torch.arange(len(places), device=codes.device)
    likeliest = torch.cat(best) if best else rows[:0]
    return Targets(rows, likeliest, draft.t2d[likeliest], torch.cat(probabilities) if best else hidden.new_empty(0))


def unrolled_loss(
    draft: Draft,
    base: tuple[Callable, torch.Tensor, torch.Tensor, torch.Tensor],
    attention: ChainAttention,
    codes: torch.Tensor,
    steps: int,
    decay: float,
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Mean over the steps (weights decay^s) of the cross entropy to the base's distribution over the draft vocabulary.

    `base`: its logits of hidden states, and of the tokens [B, T] the last hidden states, features and embeddings.
    Counted where the tokens so far and the one to predict belong to one answer and the base's likeliest tokens are in
    the draft vocabulary. Returns also (rows where the draft's likeliest token is the base's, rows) of each step.
    """
    logits_of, hidden, features, embedded = base
    targets = targets_of(draft, logits_of, hidden, codes)
    length = codes.shape[1]
    cosine, sine = rotations(length + steps, draft.d, codes.device)
    usable, order = predictable(codes), torch.arange(length, device=codes.device)
    alive = shifted(usable, 1)
    feature, total, found = draft.fuse(features), 0.0, []
    for step in range(steps):
        rotation = cosine[step : step + length], sine[step : step + length]
        feature = draft.midlayer(shifted(embedded, step + 1), feature, rotation, attention)
        alive = alive & shifted(usable, step + 2) & (order + step + 2 < length)
        rows = alive.flatten().nonzero().squeeze(1)
        wanted = targets.rows[rows + step + 1]  # a row's place in a later step stands so much later in its line
        known = targets.known[wanted]
        alive = alive.flatten().index_fill(0, rows[~known], False).view_as(alive)
        rows, wanted = rows[known], wanted[known]
        logits = draft.logits(feature.flatten(0, 1)[rows]).float()
        each = -(targets.probabilities[wanted] * logits.log_softmax(-1)).sum(-1)
        total = total + decay**step * each.sum() / max(1, len(each))
        found.append(((draft.targets[logits.argmax(-1)] == targets.best[wanted]).sum(), known.numel()))
    return total / sum(decay**step for step in range(steps)), found
