"""EAGLE draft heads in PyTorch, written from their definition: whole paths, no cache, no fusion, one row after another.

Li et al. 2024 (EAGLE, EAGLE-2), Li et al. 2025 (EAGLE-3); EAGLE-3.1 norms the features and feeds back the normed
output. Tensors are named as the heads are published.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Head:
    """One head: its tensors below `layer` ("midlayer." or "layers.0."), and switches as `DraftConfig` names them."""

    tensors: dict[str, torch.Tensor]
    layer: str
    generation: str
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    theta: float
    embedding: torch.Tensor
    output_head: torch.Tensor
    norm_before_residual: bool = False
    feed_back_normed: bool = False

    def fused(self, features: torch.Tensor) -> torch.Tensor:
        """The base's features [T, F] as the hidden states [T, H] that the layer takes (EAGLE-3)."""
        hidden = self.embedding.shape[1]
        if "input_norm.weight" in self.tensors:
            features = self._norm(features, "input_norm.weight")
        if "fc_norm.0.weight" in self.tensors:
            parts = features.split(hidden, dim=-1)
            features = torch.cat([self._norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)], dim=-1)
        return self._fc(features)

    def run(self, hidden: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [T, draft vocabulary] and what each row feeds to the next step [T, H], rows at positions 0..T-1.

        `hidden` [T, H] are the base's last hidden states or the head's own (EAGLE-1), or what `fused` or the head
        itself gave (EAGLE-3); `tokens` [T] are those that they are paired with.
        """
        embeds = self.embedding[tokens]
        if self.generation == "1":
            residual = attended = self._fc(torch.cat((embeds, hidden), dim=-1))
        else:
            normed = self._norm(hidden, f"{self.layer}hidden_norm.weight")
            residual = normed if self.norm_before_residual else hidden
            attended = torch.cat((self._norm(embeds, f"{self.layer}input_layernorm.weight"), normed), dim=-1)
        out = residual + self._attention(attended)
        out = out + self._mlp(self._norm(out, f"{self.layer}post_attention_layernorm.weight"))
        if self.generation == "1":
            return out @ self.output_head.T, out
        normed = self._norm(out, "norm.weight")
        return normed @ self.output_head.T, normed if self.feed_back_normed else out

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        count, size, prefix = len(x), self.head_dim, f"{self.layer}self_attn."
        query = self._linear(x, f"{prefix}q_proj").view(count, self.heads, size)
        key = self._linear(x, f"{prefix}k_proj").view(count, self.kv_heads, size)
        value = self._linear(x, f"{prefix}v_proj").view(count, self.kv_heads, size)
        if f"{prefix}q_norm.weight" in self.tensors:
            query, key = self._norm(query, f"{prefix}q_norm.weight"), self._norm(key, f"{prefix}k_norm.weight")
        query, key = self._rotated(query), self._rotated(key)
        rows = []
        for t in range(count):
            heads = []
            for h in range(self.heads):
                group = h * self.kv_heads // self.heads
                scores = key[: t + 1, group] @ query[t, h] / size**0.5
                heads.append(scores.softmax(dim=0) @ value[: t + 1, group])
            rows.append(torch.cat(heads))
        return self._linear(torch.stack(rows), f"{prefix}o_proj")

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        """[T, heads, D]: element j turns with element j + D/2 by position * theta^(-2j/D)."""
        half = self.head_dim // 2
        frequencies = self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(len(x), dtype=torch.float64)[:, None] * frequencies
        cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (self._linear(x, f"{self.layer}mlp.{name}_proj") for name in ("gate", "up"))
        return self._linear(torch.nn.functional.silu(gate) * up, f"{self.layer}mlp.down_proj")

    def _fc(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x, "fc")

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        result = x @ self.tensors[f"{name}.weight"].T
        return result + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else result

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon) * self.tensors[name]
