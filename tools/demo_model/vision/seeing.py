"""What is trained, and the loss of pictures alone: what stands on each cell, and the rows of the table."""

import torch
import torch.nn.functional as F

from tools.demo_model.vision.layout import CELL, HEAD
from tools.demo_model.vision.network import IGNORED, Eyes, Heads, Sizes
from tools.demo_model.vision.sparing import Sparing


class Learner(torch.nn.Module):
    """All that is trained: the eyes that ship and the heads that do not."""

    def __init__(self, sizes: Sizes, width: int):
        super().__init__()
        self.eyes, self.heads = Eyes(sizes, width), Heads(sizes.hidden_size)


def without_unknown(apart: torch.Tensor, directions: torch.Tensor, unknown: torch.Tensor) -> torch.Tensor:
    """Rows' distances [M, 9, 8, H] less what lies in the directions [8, H, n] where a cell's name is unknown [M, 9]."""
    inside = torch.einsum("mcrn,rhn->mcrh", torch.einsum("mcrh,rhn->mcrn", apart, directions), directions)
    return apart - inside * unknown[:, :, None, None]


def seeing_loss(learner: Learner, pictures, rows_wanted, scale, colours, kinds, directions, sparing: Sparing):
    """Loss of what is named, of how far rows are from those wanted, the rows [M, 81, H], and the share of cells that
    are named right. What has no name is left out."""
    states, rows = learner.eyes(pictures)
    colour, kind = (logits.float() for logits in learner.heads(states))
    named = sum(
        F.cross_entropy((logits + spared).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        for logits, spared, targets in zip((colour, kind), sparing.cells(colours, kinds), (colours, kinds), strict=True)
    )
    apart = rows.float() - rows_wanted
    cells = apart[:, HEAD : HEAD + 9 * CELL].unflatten(1, (9, CELL))
    with torch.autocast(rows.device.type, enabled=False):
        for each, targets in zip(directions, (colours, kinds), strict=True):
            cells = without_unknown(cells, each, (targets == IGNORED).float())
    around = apart[:, :HEAD].square().sum() + apart[:, HEAD + 9 * CELL :].square().sum()
    distance = (cells.square().sum() + around) / apart.numel() / scale
    right = ((colour.argmax(-1) == colours) | (colours == IGNORED)) & ((kind.argmax(-1) == kinds) | (kinds == IGNORED))
    return named, distance, rows, right.float().mean().detach()
