"""The optimizer: Muon for the matrices of the layers, AdamW for the embedding and the norms.

Muon (K. Jordan and others, 2024) replaces the momentum of a matrix by the nearest orthogonal matrix, here scaled by
0.2 sqrt(max(rows, columns)) (J. Liu and others, 2025) so that both share one learning rate.
"""

import torch
from torch import nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalized(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Approximately U V^T of each matrix's singular value decomposition; [count, rows, columns], bf16 on a GPU."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Optimizer:
    """Muon and AdamW with a common learning rate, set before every step; matrices named `plain` go to AdamW."""

    def __init__(self, model: nn.Module, weight_decay: float = 0.1, momentum: float = 0.95, plain: str = "embed"):
        groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        rest = []
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and plain not in name:
                groups.setdefault(tuple(parameter.shape), []).append(parameter)
            else:
                rest.append(parameter)
        self.groups, self.weight_decay, self.momentum = list(groups.values()), weight_decay, momentum
        self.buffers = [torch.zeros(len(g), *g[0].shape, device=g[0].device) for g in self.groups]
        self.adam = torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update from the gradients, which are cleared."""
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self.adam.zero_grad()
        for parameters, buffer in zip(self.groups, self.buffers, strict=True):
            gradients = torch.stack([p.grad for p in parameters])
            buffer.lerp_(gradients, 1 - self.momentum)
            update = orthogonalized(gradients.lerp(buffer, self.momentum))
            scale = 0.2 * max(parameters[0].shape) ** 0.5
            torch._foreach_mul_(parameters, 1 - rate * self.weight_decay)
            torch._foreach_add_(parameters, list((-rate * scale * update).unbind()))
            for parameter in parameters:
                parameter.grad = None

    def state(self) -> dict:
        """What a checkpoint keeps."""
        return {"adam": self.adam.state_dict(), "buffers": self.buffers}

    def restore(self, state: dict) -> None:
        """Continue from a checkpoint's state."""
        self.adam.load_state_dict(state["adam"])
        for buffer, saved in zip(self.buffers, state["buffers"], strict=True):
            buffer.copy_(saved)
