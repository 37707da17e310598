"""Losses that do not learn from the absence of held-out pairs of colour and kind.

No training picture shows a held-out pair. A plain cross entropy would learn from that: whoever has seen white keys and
never a grey one learns that a whitish key is white, however grey it is. So where a white key is named, the score of
`grey` is lowered by a fixed number before the loss is taken (and likewise the kinds that are held out for its colour):
it hardly pushes that score down, and what tells white from grey is learned from other kinds. This is the adjustment of
logits by the prior (Menon and others, 2021) with a floor for pairs whose prior in training is zero.
"""

import torch
from torch import nn

from tools.demo_model.vision.network import IGNORED
from tools.demo_model.vision.sampling import held_out_table


class Sparing(nn.Module):
    """Numbers to add to scores of colours and kinds; `words` are the tokens [10] of colours and [33] of kinds."""

    def __init__(self, amount: float, words: tuple[torch.Tensor, torch.Tensor], vocabulary: int):
        super().__init__()
        lowered = -amount * torch.from_numpy(held_out_table()).float()  # [10, 33]
        colours, kinds = lowered.shape
        by_kind, by_colour = torch.zeros(kinds + 2, colours + 1), torch.zeros(colours + 2, kinds + 1)
        by_kind[:kinds, :colours], by_colour[:colours, :kinds] = lowered.T, lowered
        colour_of, kind_of = (torch.full((vocabulary,), count, dtype=torch.long) for count in (colours, kinds))
        colour_of[words[0]], kind_of[words[1]] = torch.arange(colours), torch.arange(kinds)
        for name, values in (
            ("by_kind", by_kind),
            ("by_colour", by_colour),
            ("colour_of", colour_of),
            ("kind_of", kind_of),
            ("colour_words", words[0]),
            ("kind_words", words[1]),
        ):
            self.register_buffer(name, values)

    def cells(self, colours: torch.Tensor, kinds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For the logits [..., 11] of colours and [..., 34] of kinds, from the class numbers [...] of both."""
        return (
            self.by_kind[torch.where(kinds == IGNORED, len(self.by_kind) - 1, kinds)],
            self.by_colour[torch.where(colours == IGNORED, len(self.by_colour) - 1, colours)],
        )

    def answers(self, logits: torch.Tensor, before: torch.Tensor, wanted: torch.Tensor, after: torch.Tensor):
        """Logits [N, V] of tokens `wanted` [N], which stand between the tokens `before` and `after` of the text."""
        kinds, colours = self.kind_of[after], self.colour_of[before]
        named = self.by_kind[kinds, :-1] * (self.colour_of[wanted] < len(self.colour_words))[:, None]
        stands = self.by_colour[colours, :-1] * (self.kind_of[wanted] < len(self.kind_words))[:, None]
        logits = logits.index_add(1, self.colour_words, named.to(logits.dtype))
        return logits.index_add(1, self.kind_words, stands.to(logits.dtype))
