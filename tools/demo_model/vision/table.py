"""A picture's rows as a table of learned vectors: what the frozen language model reads best, found without pictures.

The rows are a sum: what every picture has (`empty`), and for each object what its cell, colour and kind add. The
vectors begin as embeddings of the words in `layout.py` and are trained through the language model on scenes as they
are; the vision encoder then learns to give these rows from pixels.
"""

import numpy as np
import torch
from torch import nn

from tools.demo_model.vision.layout import CELL, COLOUR_ROW, HEAD, KIND_ROW, NOTHING, ROWS


class Table(nn.Module):
    """Cells [M, 2, 9] (colour and kind numbers, NOTHING where empty) to rows [M, 81, H]."""

    def __init__(self, embedding: torch.Tensor, tables: dict[str, np.ndarray]):
        super().__init__()
        embedding = embedding.detach().float()
        ids = {name: torch.as_tensor(values, device=embedding.device) for name, values in tables.items()}
        width = embedding.shape[1]
        empty, filled = embedding[ids["empty"]], embedding[ids["filled"]]
        self.empty = nn.Parameter(empty.clone())
        self.filled = nn.Parameter((filled - empty)[HEAD : HEAD + 9 * CELL].reshape(9, CELL, width).clone())
        line_break = embedding[ids["filled"]][HEAD + COLOUR_ROW]
        for name, row in (("colours", COLOUR_ROW), ("kinds", KIND_ROW)):
            words = embedding.new_zeros(len(ids[name]), CELL, width)
            words[:, row] = embedding[ids[name]] - line_break
            setattr(self, name, nn.Parameter(words))

    def forward(self, cells: torch.Tensor) -> torch.Tensor:
        cells = cells.long()
        full = (cells[:, 1] != NOTHING)[..., None, None]
        colours, kinds = (self._looked_up(table, cells[:, i]) for i, table in enumerate((self.colours, self.kinds)))
        added = torch.where(full, self.filled + colours + kinds, torch.zeros_like(self.filled))
        rows = torch.cat(
            (added.new_zeros(len(cells), HEAD, added.shape[-1]), added.flatten(1, 2), self.tail(added)), dim=1
        )
        return self.empty + rows

    def _looked_up(self, table: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """What has no name gets the mean of all that have one."""
        return torch.cat((table, table.mean(0, keepdim=True)))[numbers.clamp(max=len(table))]

    @torch.no_grad()
    def directions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Orthonormal directions [8, H, n] of each of a cell's rows in which colours differ, and in which kinds do."""
        found = []
        for table in (self.colours, self.kinds):
            apart = (table - table.mean(0)).transpose(0, 1)  # [8, count, H]
            found.append(
                torch.linalg.svd(apart, full_matrices=False)[2][:, : len(table) - 1].transpose(1, 2).contiguous()
            )
        return found[0], found[1]

    @staticmethod
    def tail(added: torch.Tensor) -> torch.Tensor:
        """Zeros for the rows after the last cell."""
        return added.new_zeros(len(added), ROWS - HEAD - 9 * CELL, added.shape[-1])
