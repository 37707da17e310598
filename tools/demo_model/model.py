"""The network in PyTorch for training and evaluation: a Qwen3 decoder with the published tensor names."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn


@dataclass(frozen=True)
class Dimensions:
    """Sizes of the network; the names are those of the published configuration."""

    vocab_size: int = 4096
    hidden_size: int = 320
    num_hidden_layers: int = 8
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 896
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


class Norm(nn.Module):
    """Root mean square normalization, computed in fp32."""

    def __init__(self, width: int, epsilon: float):
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(width)), epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.epsilon).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, d: Dimensions):
        super().__init__()
        self.d = d
        query, key = d.num_attention_heads * d.head_dim, d.num_key_value_heads * d.head_dim
        self.q_proj = nn.Linear(d.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(d.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(d.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, d.hidden_size, bias=False)
        self.q_norm, self.k_norm = Norm(d.head_dim, d.rms_norm_eps), Norm(d.head_dim, d.rms_norm_eps)

    def forward(self, x, rotation, attend):
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, -1, self.d.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, -1, self.d.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, -1, self.d.head_dim).transpose(1, 2)
        mixed = attend(rotate(q, rotation), rotate(k, rotation), v)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, d: Dimensions):
        super().__init__()
        self.gate_proj = nn.Linear(d.hidden_size, d.intermediate_size, bias=False)
        self.up_proj = nn.Linear(d.hidden_size, d.intermediate_size, bias=False)
        self.down_proj = nn.Linear(d.intermediate_size, d.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, d: Dimensions):
        super().__init__()
        self.input_layernorm = Norm(d.hidden_size, d.rms_norm_eps)
        self.self_attn = Attention(d)
        self.post_attention_layernorm = Norm(d.hidden_size, d.rms_norm_eps)
        self.mlp = FeedForward(d)

    def forward(self, x, rotation, attend):
        x = x + self.self_attn(self.input_layernorm(x), rotation, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, d: Dimensions):
        super().__init__()
        self.embed_tokens = nn.Embedding(d.vocab_size, d.hidden_size)
        self.layers = nn.ModuleList(Layer(d) for _ in range(d.num_hidden_layers))
        self.norm = Norm(d.hidden_size, d.rms_norm_eps)


class Model(nn.Module):
    """Token ids [B, T] to hidden states [B, T, H] (`forward`) and logits (`logits`); the head is the embedding."""

    def __init__(self, d: Dimensions):
        super().__init__()
        self.d, self.model = d, Decoder(d)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = (
                    (2 * d.num_hidden_layers) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                )
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, ids: torch.Tensor, attend=None) -> torch.Tensor:
        return self.with_features(ids, (), attend)[0]

    def with_features(self, ids: torch.Tensor, taps: tuple[int, ...], attend=None) -> tuple[torch.Tensor, torch.Tensor]:
        """Also the states that enter the layers `taps`, before any norm, side by side: [B, T, H], [B, T, taps * H]."""
        return self.from_embeddings(self.model.embed_tokens(ids), taps, attend)

    def from_embeddings(self, x: torch.Tensor, taps: tuple[int, ...] = (), attend=None):
        """`with_features` of embeddings [B, T, H], rows of pictures among them."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        rotation = rotations(x.shape[1], self.d, x.device)
        entering = []
        for layer in self.model.layers:
            entering.append(x)
            x = layer(x, rotation, attend or causal)
        features = torch.cat([entering[tap] for tap in taps], dim=-1) if taps else x.new_empty(0)
        return self.model.norm(x), features

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Plain causal attention [B, heads, T, D]; keys and values have fewer heads."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def rotations(length: int, d: Dimensions, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine [T, D/2] of the rotary position embedding, fp32."""
    inverse = d.rope_theta ** (-torch.arange(0, d.head_dim, 2, device=device, dtype=torch.float32) / d.head_dim)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * inverse[None]
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary embedding that pairs element i with element i + D/2."""
    cosine, sine = rotation
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)


def load_model(directory: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Model:
    """Read a Hugging Face directory of this layout."""
    config = json.loads((directory / "config.json").read_text())
    names = asdict(Dimensions()).keys()
    model = Model(Dimensions(**{name: config[name] for name in names}))
    model.load_state_dict(load_file(directory / "model.safetensors"))
    return model.to(device=device, dtype=dtype).eval()
