"""The language model learns to read pictures: low-rank changes (lora.py), merged in the end, that leave text as it was.

What the frozen model lacks no embedding of a picture can give it: it never met a second list of objects, nor questions
that say `photo` or `describe`. So its layers may change a little, and on dialogues without pictures are held to the
distributions and the states of the model that they began with (distillation).
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tools.demo_model.lora import add_adapter
from tools.demo_model.model import load_model
from tools.demo_model.train import rate_at

DRAFT_TAPS = (2, 4, 5)  # layers whose entering states the draft head reads


class Language:
    """A frozen language model (`before`), its copy with low-rank changes (`model`), and their optimizer."""

    def __init__(self, base: Path, rank: int, device: str):
        self.before = load_model(base, device).requires_grad_(False)
        self.model = load_model(base, device)
        self.adapted = add_adapter(self.model, rank, 2 * rank)
        self.parameters = [each for layer in self.adapted.values() for each in (layer.a, layer.b)]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, betas=(0.9, 0.95), weight_decay=0.01)

    def kept(self, tokens, weights, found, changed) -> tuple[torch.Tensor, torch.Tensor]:
        """How far text [B, T] is from what it was, from the changed model's hidden states `found` [B, T, H] and the
        states `changed` that enter DRAFT_TAPS: the divergence of the next tokens' distributions, a mean weighted by
        `weights` [B, T], and the distance of the states that the draft head reads, as a share of their size."""
        with torch.no_grad():
            hidden, states = self.before.with_features(tokens, DRAFT_TAPS)
            wanted = self.before.logits(hidden).float().log_softmax(-1)
        guessed = self.model.logits(found).float().log_softmax(-1)
        divergence = F.kl_div(guessed, wanted, reduction="none", log_target=True).sum(-1)
        apart = (changed.float() - states.float()).square().mean() / states.float().square().mean()
        return (divergence * weights).sum() / weights.sum(), apart

    def step(self, progress: float, peak: float, tail: float) -> None:
        """One update from the gradients, which are cleared."""
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(progress, peak, 0.03, tail)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, path: Path) -> None:
        """Write the changes (fp32)."""
        tensors = {
            f"{name}.{kind}": values.detach().cpu().contiguous()
            for name, layer in self.adapted.items()
            for kind, values in (("a", layer.a), ("b", layer.b))
        }
        save_file(tensors, path)

    @torch.no_grad()
    def restore(self, path: Path) -> None:
        """Continue with changes that `save` wrote."""
        tensors = load_file(path)
        for name, layer in self.adapted.items():
            layer.a.copy_(tensors[f"{name}.a"])
            layer.b.copy_(tensors[f"{name}.b"])


def merged(weights: dict[str, torch.Tensor], changes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's tensors with the changes that `Language.save` wrote (alpha twice the rank) added; dtypes stay."""
    result = dict(weights)
    for name in sorted({each.rsplit(".", 1)[0] for each in changes}):
        tensor = f"{name}.weight"
        added = 2 * changes[f"{name}.b"].float() @ changes[f"{name}.a"].float()
        result[tensor] = (weights[tensor].float() + added).to(weights[tensor].dtype)
    return result
