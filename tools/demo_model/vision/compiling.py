"""Layers that are compiled one by one, which takes seconds where a whole network takes a minute."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


class CompiledLayers:
    """Layers of like shape whose `forward` is compiled code inside `used()`, and their own outside."""

    def __init__(self, layers: Iterable[nn.Module], wanted: bool):
        self._pairs = [(layer, torch.compile(layer.forward, dynamic=False)) for layer in layers] if wanted else []

    @contextmanager
    def used(self) -> Iterator[None]:
        """Training steps go here: their shapes do not change."""
        for layer, compiled in self._pairs:
            layer.forward = compiled
        try:
            yield
        finally:
            for layer, _ in self._pairs:
                del layer.forward
