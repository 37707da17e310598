"""Exact match per visual skill on held-out scenes, pairs of colour and kind, and phrasings, with PyTorch.

Usage: python -m tools.demo_model.vision.evaluate --model edgellm/shipped [--count 50] [--seed 77005] [--show 2]

Scenes are drawn twice as large as the eyes see them and go through Pillow's resize, as a user's picture does."""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from tools.demo_model.model import load_model
from tools.demo_model.vision.dialogues import PICTURE, seen_items
from tools.demo_model.vision.export import EYES, load_eyes
from tools.demo_model.vision.items import drawn
from tools.demo_model.vision.reading import Examination
from tools.demo_model.vision.renderer import SIDE
from tools.demo_model.vision.scenes import NOVEL
from tools.demo_model.vocabulary import load_vocabulary


def load_shipped_eyes(directory: Path, out: int) -> torch.nn.Module:
    """The eyes of a published directory in PyTorch, fp32."""
    tensors = load_file(directory / "model.safetensors")
    state = {name.replace("model.", EYES, 1): value for name, value in tensors.items() if "post_layernorm" not in name}
    patch = f"{EYES}vision_tower.embeddings.patch_embedding.weight"
    state[patch] = state[patch].flatten(1)
    return load_eyes(state, out)


def as_seen(item: dict) -> torch.Tensor:
    """The item's pictures as the eyes get them [n, 3, 144, 144], values 0 to 255."""
    small = [Image.fromarray(each).resize((SIDE, SIDE), Image.Resampling.BICUBIC) for each in drawn(item)]
    return torch.from_numpy(np.stack(small).transpose(0, 3, 1, 2).astype(np.float32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="the model directory with `vision`")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=77005)
    parser.add_argument("--novel", type=float, default=NOVEL, help="share of objects of held-out colour and kind")
    parser.add_argument("--show", type=int, default=2, help="failures to print per skill")
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(arguments.model, device), load_vocabulary(arguments.model)
    eyes = load_shipped_eyes(arguments.model / "vision", model.d.hidden_size).to(device)
    items = seen_items(arguments.seed, arguments.count, novel=arguments.novel)
    with torch.no_grad():
        rows = torch.cat([eyes(as_seen(item).to(device))[1] for item in items])
    examination = Examination(items, tokenizer, device, batch=64 if device == "cuda" else 8)
    found = examination.exact_match(model, lambda numbers: rows[numbers], tokenizer.token_to_id(PICTURE))
    for skill, value in sorted(found.items(), key=lambda pair: pair[1]):
        print(f"{skill:20} {value:6.2f} %")
        wrong = [n for n, item in enumerate(items) if item["skill"] == skill and not examination.right[n]]
        for number in wrong[: arguments.show]:
            item = items[number]
            print(f"    {[thing.name + ' ' + thing.place for thing in item['worlds'][-1].things]}")
            print(f"    {item['messages'][-1]['content']!r}\n      want {item['accepted'][0]!r}")
    mean = round(100 * sum(examination.right) / len(items), 2)
    print(f"{'all':20} {mean:6.2f} %")
    if arguments.results:
        record = {
            "seed": arguments.seed,
            "novel": round(arguments.novel, 3),
            "items_per_skill": arguments.count,
            "exact_match_percent": found,
            "all": mean,
        }
        arguments.results.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
