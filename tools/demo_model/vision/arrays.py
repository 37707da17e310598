"""The few operations that NumPy and PyTorch name differently, so that one renderer serves both."""

from typing import Any

import numpy as np


class NumpyArrays:
    """Random numbers from a seed, on the CPU."""

    def __init__(self, seed: int):
        self.xp = np
        self._random = np.random.default_rng(seed)

    def uniform(self, *shape: int) -> Any:
        """Uniform numbers in [0, 1), float32."""
        return self._random.random(shape, dtype=np.float32)

    def normal(self, *shape: int) -> Any:
        """Standard normal numbers, float32."""
        return self._random.standard_normal(shape, dtype=np.float32)

    def floats(self, values: np.ndarray) -> Any:
        """The values as float32."""
        return np.asarray(values, np.float32)

    def integers(self, values: np.ndarray) -> Any:
        """The values as indices."""
        return np.asarray(values, np.int64)


class TorchArrays:
    """Random numbers from a seed, on a device of PyTorch."""

    def __init__(self, seed: int, device: str):
        import torch

        self.xp, self.device = torch, device
        self._generator = torch.Generator(device).manual_seed(seed)

    def uniform(self, *shape: int) -> Any:
        """Uniform numbers in [0, 1), float32."""
        return self.xp.rand(shape, generator=self._generator, device=self.device)

    def normal(self, *shape: int) -> Any:
        """Standard normal numbers, float32."""
        return self.xp.randn(shape, generator=self._generator, device=self.device)

    def _moved(self, values: np.ndarray) -> Any:
        tensor = self.xp.from_numpy(np.ascontiguousarray(values))
        if tensor.numel() and str(self.device).startswith("cuda"):
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)

    def floats(self, values: np.ndarray) -> Any:
        """The values as float32."""
        return self._moved(np.asarray(values, np.float32))

    def integers(self, values: np.ndarray) -> Any:
        """The values as indices."""
        return self._moved(np.asarray(values, np.int64))
