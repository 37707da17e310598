"""The decode step in PyTorch: the reference of speed (compiled, CUDA graphs engaged) and of results (float32)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    """One decoder layer on fused weights, its KV cache a buffer at a fixed address (else CUDA graphs are skipped)."""

    def __init__(self, index, config, weights, cache_k, cache_v):
        super().__init__()
        self.config = config
        prefix = f"model.layers.{index}."
        names = {
            "norm1": "input_layernorm.weight",
            "qkv": "self_attn.qkv_proj.weight",
            "o": "self_attn.o_proj.weight",
            "norm2": "post_attention_layernorm.weight",
            "gate_up": "mlp.gate_up_proj.weight",
            "down": "mlp.down_proj.weight",
        }
        for name, source in names.items():
            self.register_buffer(name, weights[prefix + source])
        self.register_buffer("k", cache_k)
        self.register_buffer("v", cache_v)
        for cache in (self.k, self.v):
            torch._dynamo.mark_static_address(cache)

    def norm(self, x, weight):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)).to(x.dtype) * weight

    def rotate(self, x, cos, sin):
        low, high = x.chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    def forward(self, x, position, mask, cos, sin):
        c = self.config
        batch = x.shape[0]
        qkv = F.linear(self.norm(x, self.norm1), self.qkv)
        qkv = qkv.view(batch, 1, c.num_heads + 2 * c.num_kv_heads, c.head_dim).transpose(1, 2)
        q, k, v = qkv.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], 1)
        self.k.index_copy_(2, position, self.rotate(k, cos, sin))
        self.v.index_copy_(2, position, v)
        a = F.scaled_dot_product_attention(self.rotate(q, cos, sin), self.k, self.v, attn_mask=mask, enable_gqa=True)
        x = x + F.linear(a.transpose(1, 2).reshape(batch, 1, -1), self.o)
        gate, up = F.linear(self.norm(x, self.norm2), self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)


class Decoder(nn.Module):
    """All layers, the last norm and the tied head; [B, 1, H] to float32 logits [B, 1, V]."""

    def __init__(self, config, weights, caches_k, caches_v):
        super().__init__()
        self.layers = nn.ModuleList(
            Layer(i, config, weights, caches_k[i], caches_v[i]) for i in range(config.num_layers)
        )
        self.register_buffer("norm_weight", weights["model.norm.weight"])
        self.register_buffer("head", weights["model.embed_tokens.weight"])

    def forward(self, x, position, mask, cos, sin):
        for layer in self.layers:
            x = layer(x, position, mask, cos, sin)
        return F.linear(self.layers[0].norm(x, self.norm_weight), self.head).float()
