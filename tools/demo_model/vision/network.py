"""The vision encoder and its projector in PyTorch, with the tensor names of the published SigLIP and LLaVA layouts."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from tools.demo_model.vision.kinds import COLOURS, KINDS
from tools.demo_model.vision.layout import COLOUR_ROW, KIND_ROW, NOTHING, first_row

IGNORED = -100  # what cross entropy leaves out


@dataclass(frozen=True)
class Sizes:
    """Sizes of the encoder; names as in the published configuration."""

    hidden_size: int = 192
    intermediate_size: int = 768
    num_hidden_layers: int = 7
    num_attention_heads: int = 6
    image_size: int = 144
    patch_size: int = 16
    layer_norm_eps: float = 1e-6

    @property
    def patches(self) -> int:
        """Patches, and so rows, of a picture."""
        return (self.image_size // self.patch_size) ** 2


class Embeddings(nn.Module):
    """Patches as vectors, with learned positions."""

    def __init__(self, s: Sizes):
        super().__init__()
        self.patch = s.patch_size
        self.patch_embedding = nn.Linear(3 * s.patch_size**2, s.hidden_size)
        self.position_embedding = nn.Embedding(s.patches, s.hidden_size)
        nn.init.normal_(self.patch_embedding.weight, std=(3 * s.patch_size**2) ** -0.5)
        nn.init.normal_(self.position_embedding.weight, std=0.5)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        count, channels, side, _ = pixels.shape
        n = side // self.patch
        patches = pixels.view(count, channels, n, self.patch, n, self.patch).permute(0, 2, 4, 1, 3, 5)
        return self.patch_embedding(patches.reshape(count, n * n, -1)) + self.position_embedding.weight


class Attention(nn.Module):
    """Every patch sees every other."""

    def __init__(self, s: Sizes):
        super().__init__()
        self.heads = s.num_attention_heads
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(self, name, nn.Linear(s.hidden_size, s.hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, length, width = x.shape
        q, k, v = (
            layer(x).view(count, length, self.heads, -1).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(mixed.transpose(1, 2).reshape(count, length, width))


class FeedForward(nn.Module):
    def __init__(self, s: Sizes):
        super().__init__()
        self.fc1 = nn.Linear(s.hidden_size, s.intermediate_size)
        self.fc2 = nn.Linear(s.intermediate_size, s.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class Layer(nn.Module):
    def __init__(self, s: Sizes):
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(s.hidden_size, s.layer_norm_eps)
        self.self_attn = Attention(s)
        self.layer_norm2 = nn.LayerNorm(s.hidden_size, s.layer_norm_eps)
        self.mlp = FeedForward(s)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class Encoder(nn.Module):
    def __init__(self, s: Sizes):
        super().__init__()
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.num_hidden_layers))


class Tower(nn.Module):
    """Normalized pixels [M, 3, S, S] to the states after the last layer [M, patches, hidden]."""

    def __init__(self, s: Sizes):
        super().__init__()
        self.embeddings, self.encoder = Embeddings(s), Encoder(s)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(pixels)
        for layer in self.encoder.layers:
            x = layer(x)
        return x


class Projector(nn.Module):
    """Two layers from the encoder's width to the language model's."""

    def __init__(self, width: int, out: int):
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(width, out), nn.Linear(out, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_2(F.gelu(self.linear_1(x)))


class Eyes(nn.Module):
    """Pictures [M, 3, S, S] of values 0 to 255 to states [M, patches, hidden] and rows [M, patches, H]."""

    def __init__(self, sizes: Sizes, out: int):
        super().__init__()
        self.vision_tower = Tower(sizes)
        self.multi_modal_projector = Projector(sizes.hidden_size, out)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and "embedding" not in name:
                deep = (2 * sizes.num_hidden_layers) ** -0.5 if name.endswith(("out_proj.weight", "fc2.weight")) else 1
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5 * deep)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        nn.init.normal_(self.multi_modal_projector.linear_2.weight, std=0.2 * out**-0.5)

    def forward(self, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states = self.vision_tower((pictures - 127.5) / 127.5)
        return states, self.multi_modal_projector(states)


class Heads(nn.Module):
    """What stands on each cell, read from the states at its colour's and its kind's row: training only."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.colour, self.kind = nn.Linear(width, len(COLOURS) + 1), nn.Linear(width, len(KINDS) + 1)
        rows = torch.tensor([first_row(cell) for cell in range(9)])
        self.register_buffer("rows", rows, persistent=False)

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [M, 9, 11] and [M, 9, 34]; the last of each says that the cell is empty."""
        states = self.norm(states)
        return self.colour(states[:, self.rows + COLOUR_ROW]), self.kind(states[:, self.rows + KIND_ROW])


def cell_targets(cells: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Class numbers [M, 9] of colours and kinds for `Heads` from cells [M, 2, 9]; IGNORED where there is no name."""
    colours, kinds = cells.long().unbind(1)
    empty = kinds == NOTHING
    colours = colours.masked_fill(colours >= len(COLOURS), IGNORED).masked_fill(empty, len(COLOURS))
    kinds = kinds.masked_fill(kinds >= len(KINDS), IGNORED).masked_fill(empty, len(KINDS))
    return colours, kinds
