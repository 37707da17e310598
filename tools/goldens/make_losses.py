"""Makes the golden files of `tests/goldens/losses` with transformers: losses over a text in strided windows.

    python tools/goldens/make_losses.py tests/goldens/losses

Needs torch and transformers as `make.py` does, of whose checkpoints in `tests/goldens/decoder` each folder names one.
`expected.json` holds the text's `token_ids`, and for each case window, stride, BOS token (null: none) and what
Hugging Face's guide to perplexity computes: the mean over all tokens of the loss that the model gives for labels, those
of tokens that an earlier window has counted being -100.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch
import transformers
from golden_folders import VERSIONS, golden_folder, write_folders
from variations import VOCABULARY

NAMES = ("llama_llama3", "qwen3")
TEXT_LENGTH = 150
#: Window, stride, BOS.
CASES = ((64, 32, None), (64, 63, None), (40, 7, None), (64, 32, 1), (64, 63, 1))


def make_losses(name: str, directory: Path) -> None:
    """Write what transformers computes with one checkpoint."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        golden_folder("decoder") / name, dtype=torch.float32, attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(NAMES.index(name))
    token_ids = torch.randint(3, VOCABULARY, (TEXT_LENGTH,), generator=generator).tolist()
    cases = [
        {"window": window, "stride": stride, "bos": bos, "loss": mean_loss(model, token_ids, window, stride, bos)}
        for window, stride, bos in CASES
    ]
    expected = {"base": name, "versions": VERSIONS, "token_ids": token_ids, "cases": cases}
    (directory / "expected.json").write_text(json.dumps(expected) + "\n")
    print(name, *(f"{case['loss']:.6f}" for case in cases))


def mean_loss(model: torch.nn.Module, token_ids: list[int], window: int, stride: int, bos: int | None) -> float:
    """The loop of the guide; with a BOS token each window begins with it, and has one token less of the text."""
    before = [] if bos is None else [bos]
    total, count, end = 0.0, 0, 0
    for begin in range(0, len(token_ids), stride):
        earlier, end = end, min(begin + window - len(before), len(token_ids))
        input_ids = torch.tensor([before + token_ids[begin:end]])
        labels = input_ids.clone()
        labels[:, : input_ids.size(1) - (end - earlier)] = -100
        counted = int((labels[:, 1:] != -100).sum())  # the model shifts labels by one
        with torch.no_grad():
            total += float(model(input_ids, labels=labels).loss.double()) * counted
        count += counted
        if end == len(token_ids):
            break
    assert count == len(token_ids) - 1 + len(before)
    return total / count


if __name__ == "__main__":
    write_folders(__doc__, {name: partial(make_losses, name) for name in NAMES})
