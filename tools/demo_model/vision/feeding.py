"""Batches of dialogues on the device, read ahead by a thread."""

import queue
import random
import threading
from pathlib import Path

import numpy as np
import torch

from tools.demo_model.vision.documents import shard_groups


class Dialogues:
    """Endless batches of `groups` (g) groups: tokens [64 g, 512], answers [64 g, 512], cells [PICTURES g, 2, 9], and
    tokens and answers [PLAIN_ROWS g, 512] of dialogues without pictures."""

    def __init__(self, folder: Path, groups: int, rng: random.Random, device: str):
        self.folder, self.device = folder, device
        self._ready: queue.Queue = queue.Queue(maxsize=8)
        source = shard_groups(folder, rng)

        def fill() -> None:
            while True:
                parts = zip(*(next(source) for _ in range(groups)), strict=True)
                tokens, answers, cells, plain, told = (np.concatenate(part) for part in parts)
                arrays = [torch.from_numpy(part.astype(np.int32)) for part in (tokens, plain)]
                arrays += [torch.from_numpy(part) for part in (answers, told)]
                if device.startswith("cuda"):
                    arrays = [array.pin_memory().to(device, non_blocking=True) for array in arrays]
                self._ready.put((arrays[0], arrays[2], cells, arrays[1], arrays[3]))

        threading.Thread(target=fill, daemon=True).start()

    @property
    def shards(self) -> int:
        """Shards written so far."""
        return sum(1 for _ in self.folder.glob("*.npz"))

    def batch(self) -> tuple[torch.Tensor, torch.Tensor, np.ndarray, torch.Tensor, torch.Tensor]:
        """The next batch; the cells stay on the host."""
        tokens, answers, cells, plain, told = self._ready.get()
        return tokens.long(), answers, cells, plain.long(), told
