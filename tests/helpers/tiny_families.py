"""Tiny models of the families, and how closely a GPU must follow NumPy on them."""

from __future__ import annotations

FAMILIES = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False},
    "llama_biases": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {},
}
#: Largest difference of logits relative to the largest logit. Random weights amplify rounding more than trained ones.
TOLERANCES = {"float16": 0.03, "bfloat16": 0.2}
PROMPT = [(7 * index + 3) % 250 for index in range(40)]
