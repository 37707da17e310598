"""The language model learns to read pictures: low-rank changes (lora.py), merged in the end, that leave text as it was.

What the frozen model lacks no embedding of a picture can give it: it never met a second list of objects, nor questions
that say `photo` or `describe`. So its layers may change a little, and on dialogues without pictures are held to the
distributions and the states of the model that they began with (distillation).

Usage: python -m tools.demo_model.vision.language --base edgellm/shipped --changes DIR/eyes.language.safetensors
    --to DIR/model.safetensors
"""

import argparse
import hashlib
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tools.demo_model.lora import add_adapter
from tools.demo_model.model import load_model
from tools.demo_model.train import rate_at

DRAFT_TAPS = (2, 4, 5)  # layers whose entering states the draft head reads


def digest(base: Path) -> str:
    """SHA-256 of a directory's weights, by which changes know the model that they are for."""
    return hashlib.sha256((base / "model.safetensors").read_bytes()).hexdigest()


class Language:
    """A frozen language model (`before`), its copy with low-rank changes (`model`), and their optimizer."""

    def __init__(self, base: Path, rank: int, device: str):
        self.base = digest(base)
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
        """Write the changes (fp32), and for which model they are."""
        tensors = {
            f"{name}.{kind}": values.detach().cpu().contiguous()
            for name, layer in self.adapted.items()
            for kind, values in (("a", layer.a), ("b", layer.b))
        }
        save_file(tensors, path, metadata={"base": self.base})

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, required=True, help="the model directory that training began with")
    parser.add_argument("--changes", type=Path, required=True, help="what training wrote")
    parser.add_argument("--to", type=Path, required=True, help="the weights to write")
    arguments = parser.parse_args()
    with safe_open(arguments.changes, "pt") as file:
        wanted = (file.metadata() or {}).get("base")
    if wanted != (found := digest(arguments.base)):
        raise SystemExit(f"the changes are for a model with digest {wanted}, and {arguments.base} has {found}")
    changed = merged(load_file(arguments.base / "model.safetensors"), load_file(arguments.changes))
    save_file(changed, arguments.to, metadata={"format": "pt"})
    arguments.to.chmod(0o644)


if __name__ == "__main__":
    main()
