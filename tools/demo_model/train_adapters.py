"""Train the shipped adapters, each for a number of seconds, and measure them on held-out items.

Usage: python -m tools.demo_model.train_adapters --base edgellm/shipped --to edgellm/shipped/lora [--seconds 30]
The dialogues are those of the model's own training with the answers of each style (`styles.py`); only answers count.
"""

import argparse
import json
import multiprocessing
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from tools.demo_model.dialogue import dialogue
from tools.demo_model.documents import ANSWER, ROW, chat_codes
from tools.demo_model.evaluate import evaluation_items, greedy_matches
from tools.demo_model.lora import LoraLinear, add_adapter, export_adapter
from tools.demo_model.model import Model, load_model
from tools.demo_model.styles import STYLES, styled, styled_items
from tools.demo_model.train import rate_at
from tools.demo_model.vocabulary import END, START, load_vocabulary, render

_CHUNK = 500

Document = tuple[np.ndarray, np.ndarray]


def generate(arguments: tuple[Path, str, int]) -> dict[str, list[Document]]:
    """Some dialogues in every style: token ids [n] and whether each is part of an answer [n]."""
    base, seed, count = arguments
    tokenizer, rng = load_vocabulary(base), random.Random(seed)
    dialogues = []
    while len(dialogues) < count:
        messages = dialogue(rng, "train", rng.randint(2, 12))
        if len(messages) >= 3:
            dialogues.append(messages)
    return {style: encoded(tokenizer, [styled(each, style) for each in dialogues]) for style in STYLES}


def encoded(tokenizer: Tokenizer, dialogues: list[list[dict[str, str]]]) -> list[Document]:
    """The dialogues as `generate` gives them, cut to a row's length."""
    start, end = tokenizer.token_to_id(START), tokenizer.token_to_id(END)
    head = tokenizer.encode("assistant\n").ids
    found = []
    for encoding in tokenizer.encode_batch([render(messages) for messages in dialogues]):
        ids = np.asarray(encoding.ids, np.uint16)
        answers = chat_codes(ids, start, head, end) == ANSWER
        found.append((ids[:ROW], answers[:ROW]))
    return found


def all_documents(base: Path, seed: int, count: int, workers: int) -> dict[str, list[Document]]:
    """`count` dialogues in every style, generated side by side."""
    jobs = [(base, f"adapters {seed} {index}", _CHUNK) for index in range(-(-count // _CHUNK))]
    documents: dict[str, list[Document]] = {style: [] for style in STYLES}
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for part in pool.imap_unordered(generate, jobs):
            for style, found in part.items():
                documents[style] += found
    return documents


def batches(documents: list[Document], tokens: int, rng: random.Random) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Endless batches of dialogues of like length, padded to the longest: ids and answers [B, T], B * T <= tokens."""
    order = sorted(range(len(documents)), key=lambda index: len(documents[index][0]))
    groups, group = [], []
    for index in order:
        if group and (len(group) + 1) * len(documents[index][0]) > tokens:
            groups.append(group)
            group = []
        group.append(index)
    groups.append(group)
    while True:
        rng.shuffle(groups)
        for group in groups:
            width = max(len(documents[index][0]) for index in group)
            ids, answers = np.zeros((len(group), width), np.int64), np.zeros((len(group), width), bool)
            for row, index in enumerate(group):
                length = len(documents[index][0])
                ids[row, :length], answers[row, :length] = documents[index]
            yield ids, answers


def train(model: Model, documents: list[Document], arguments: argparse.Namespace, device: str) -> tuple[dict, int]:
    """The adapted layers after training, and how many steps it took."""
    adapted: dict[str, LoraLinear] = add_adapter(model, arguments.rank, arguments.alpha)
    parameters = [parameter for layer in adapted.values() for parameter in (layer.a, layer.b)]
    optimizer = torch.optim.AdamW(parameters, lr=0.0, betas=(0.9, 0.95), weight_decay=0.01)
    begin, step, shown = time.time(), 0, 0.0
    for ids, answers in batches(documents, arguments.tokens, random.Random(arguments.seed)):
        elapsed = (time.time() - begin) / arguments.seconds
        progress = step / arguments.steps if arguments.steps else elapsed
        if progress >= 1:
            break
        tokens, counted = torch.from_numpy(ids).to(device), torch.from_numpy(answers[:, 1:]).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            hidden = model(tokens[:, :-1])[counted]
            loss = F.cross_entropy(model.logits(hidden).float(), tokens[:, 1:][counted])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(progress, arguments.peak, 0.05, 0.6)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if time.time() - shown > 5 or step == 1:
            shown = time.time()
            print(f"  {shown - begin:5.1f} s step {step} loss {loss.item():.4f}", flush=True)
    return adapted, step


def exact_match(model: Model, base: Path, style: str, seed: int, count: int, device: str) -> float:
    """Percent of held-out items that greedy decoding answers right, in the style."""
    items = styled_items(evaluation_items(seed, count), style)
    right = greedy_matches(model, load_vocabulary(base), items, device, 200_000 if device == "cuda" else 16_384)
    return round(100 * sum(right) / len(right), 2)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, required=True, help="the model directory")
    parser.add_argument("--to", type=Path, required=True, help="the folder that gets a folder for each adapter")
    parser.add_argument("--styles", nargs="+", choices=sorted(STYLES), default=sorted(STYLES))
    parser.add_argument("--seconds", type=float, default=30.0, help="training time of each adapter")
    parser.add_argument("--steps", type=int, help="stop after so many steps instead")
    parser.add_argument("--dialogues", type=int, default=60_000)
    parser.add_argument("--tokens", type=int, default=98_304, help="tokens of a step")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=16)
    parser.add_argument("--peak", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=31)
    parser.add_argument("--workers", type=int, default=max(1, multiprocessing.cpu_count() - 2))
    parser.add_argument("--items", type=int, default=20, help="held-out items a skill")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "adapters.json")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    begin = time.time()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    documents = all_documents(arguments.base, arguments.seed, arguments.dialogues, arguments.workers)
    count = sum(len(ids) for ids, _ in documents["json"])
    print(f"{arguments.dialogues} dialogues, {count / 1e6:.1f} M tokens after {time.time() - begin:.0f} s", flush=True)
    records = {}
    for style in arguments.styles:
        print(style, flush=True)
        model, started = load_model(arguments.base, device).train(), time.time()
        adapted, steps = train(model, documents[style], arguments, device)
        seconds = round(time.time() - started, 1)
        export_adapter(adapted, arguments.to / style, arguments.rank, arguments.alpha)
        match = exact_match(model.eval(), arguments.base, style, 77003, arguments.items, device)
        records[style] = {"steps": steps, "seconds": seconds, "exact_match_percent": match}
        print(f"  {steps} steps in {seconds} s, exact match {match} %", flush=True)
    record = {
        "name": "adapters",
        "device": f"one {torch.cuda.get_device_name()}" if device == "cuda" else "CPU cores",
        "rank": arguments.rank,
        "alpha": arguments.alpha,
        "dialogues": arguments.dialogues,
        "tokens_per_step": arguments.tokens,
        "peak": arguments.peak,
        "seed": arguments.seed,
        "items_per_skill": arguments.items,
        "evaluation_seed": 77003,
        "adapters": records,
    }
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
