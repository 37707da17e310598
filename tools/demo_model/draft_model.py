"""The EAGLE-3 draft head in PyTorch, with the published tensor names (Y. Li and others, 2025).

One decoder layer that reads the base's hidden states at three depths (fused by `fc`) and the embedding of the token
that follows, in the base's own table. Entry i pairs feature i with token i+1 and predicts token i+2.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from tools.demo_model.model import FeedForward, Norm, rotate


@dataclass(frozen=True)
class DraftDimensions:
    """Sizes of the head; the names are those of the published configuration."""

    vocab_size: int = 4096
    draft_vocab_size: int = 2048
    hidden_size: int = 320
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 640
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] = (2, 4, 5)  # of the base's 8 layers: 2, N/2, N-3


class DraftAttention(nn.Module):
    """The projections; attention itself is the caller's, who keeps the keys and values."""

    def __init__(self, d: DraftDimensions):
        super().__init__()
        query, key = d.num_attention_heads * d.head_dim, d.num_key_value_heads * d.head_dim
        self.q_proj = nn.Linear(2 * d.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(2 * d.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(2 * d.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, d.hidden_size, bias=False)


class DraftLayer(nn.Module):
    """The decoder layer: its residual stream is the un-normed feature."""

    def __init__(self, d: DraftDimensions):
        super().__init__()
        self.head_dim = d.head_dim
        self.input_layernorm = Norm(d.hidden_size, d.rms_norm_eps)
        self.hidden_norm = Norm(d.hidden_size, d.rms_norm_eps)
        self.self_attn = DraftAttention(d)
        self.post_attention_layernorm = Norm(d.hidden_size, d.rms_norm_eps)
        self.mlp = FeedForward(d)

    def forward(self, embedding, feature, rotation, attend: Callable):
        batch, length, _ = feature.shape
        x = torch.cat((self.input_layernorm(embedding), self.hidden_norm(feature)), dim=-1)
        q, k, v = (
            projection(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for projection in (self.self_attn.q_proj, self.self_attn.k_proj, self.self_attn.v_proj)
        )
        mixed = attend(rotate(q, rotation), rotate(k, rotation), v)
        x = feature + self.self_attn.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return x + self.mlp(self.post_attention_layernorm(x))


class Draft(nn.Module):
    """`fuse` features [.., 3H] to [.., H]; `midlayer` makes the next feature of it; `logits` over the draft vocabulary.

    `d2t` [draft_vocab] holds offsets: target id = draft id + d2t[draft id]; `t2d` [vocab] is true for the targets.
    """

    def __init__(self, d: DraftDimensions, targets: torch.Tensor | None = None):
        super().__init__()
        self.d = d
        self.fc = nn.Linear(len(d.eagle_aux_hidden_state_layer_ids) * d.hidden_size, d.hidden_size, bias=False)
        self.midlayer = DraftLayer(d)
        self.norm = Norm(d.hidden_size, d.rms_norm_eps)
        self.lm_head = nn.Linear(d.hidden_size, d.draft_vocab_size, bias=False)
        targets = torch.arange(d.draft_vocab_size) if targets is None else targets.sort().values
        self.register_buffer("d2t", targets - torch.arange(d.draft_vocab_size))
        self.register_buffer("t2d", torch.zeros(d.vocab_size, dtype=torch.bool).index_fill(0, targets, True))
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.01 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02)

    @property
    def targets(self) -> torch.Tensor:
        """The target ids of the draft vocabulary [draft_vocab], ascending."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        return self.fc(features)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(hidden))


@torch.no_grad()
def begin_from(draft: Draft, norm: torch.Tensor, head: torch.Tensor) -> None:
    """Begin with the base's final `norm` [H], its `head` [vocab, H] for the draft vocabulary, and the last tap as the
    fused feature."""
    draft.norm.weight.copy_(norm)
    draft.lm_head.weight.copy_(head[draft.targets])
    draft.fc.weight[:, -draft.d.hidden_size :] += torch.eye(draft.d.hidden_size)


def configuration(d: DraftDimensions, eos_token_id: int, pad_token_id: int) -> dict:
    """config.json of the head."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "torch_dtype": "float16",
        **asdict(d),
        "eagle_aux_hidden_state_convention": "entered",
        "norm_before_residual": False,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": None,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
    }


def export_draft(weights: Path, target: Path, d: DraftDimensions, eos_token_id: int, pad_token_id: int) -> None:
    """Write `target`/model.safetensors (fp16; d2t int64, t2d bool) and config.json."""
    target.mkdir(parents=True, exist_ok=True)
    state = {
        name: (value.to(torch.float16) if value.is_floating_point() else value).contiguous()
        for name, value in load_file(weights).items()
    }
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)
    (target / "config.json").write_text(json.dumps(configuration(d, eos_token_id, pad_token_id), indent=2) + "\n")


def load_draft(directory: Path, device: str = "cpu") -> Draft:
    """Read a directory that `export_draft` wrote, in fp32."""
    config = json.loads((directory / "config.json").read_text())
    sizes = {name: config[name] for name in asdict(DraftDimensions())}
    sizes["eagle_aux_hidden_state_layer_ids"] = tuple(sizes["eagle_aux_hidden_state_layer_ids"])
    draft = Draft(DraftDimensions(**sizes))
    draft.load_state_dict(load_file(directory / "model.safetensors"))
    return draft.to(device).float().eval()


def attention_over(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention [B, heads, T, D] over keys and values of fewer heads under a bool mask [T, keys]."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
