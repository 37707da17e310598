"""Train the model for a number of minutes, generating its documents meanwhile.

Usage: python -m tools.demo_model.train --work DIR --minutes 8 [--resume]
DIR is the directory written by prepare.py; shards, checkpoint.pt and model.safetensors (fp32) are written there.
"""

import argparse
import json
import multiprocessing
import queue
import random
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tools.demo_model.documents import FIRST, ROW, WEIGHTS, load_material, write_shard
from tools.demo_model.model import Dimensions, Model
from tools.demo_model.optimizer import Optimizer


def generate_shards(work: Path, folder: Path, seed: int, worker: int, workers: int, options: dict) -> None:
    """Worker process: shards worker, worker + workers, ... The first ones hold more open text than later ones."""
    material = load_material(work)
    material.emphasis = options["emphasis"]
    torch.set_num_threads(1)
    for index in range(worker, options["shards"], workers):
        text_share = options["text"][index >= 0.6 * options["shards"]]
        write_shard(material, folder / f"{index:05d}.npz", f"{seed} {index}", options["documents"], text_share)


def batches(
    folder: Path, rows: int, rng: random.Random, done: threading.Event
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Endless batches of rows: new shards in order as they appear, earlier ones again where none is new."""
    seen: list[Path] = []
    tokens, codes = np.empty((0, ROW), np.uint16), np.empty((0, ROW), np.uint8)
    while not done.is_set():
        while len(tokens) < rows and not done.is_set():
            fresh = sorted(set(folder.glob("*.npz")) - set(seen))
            if not fresh and not seen:
                time.sleep(0.2)
                continue
            path = fresh[0] if fresh else rng.choice(seen)
            if fresh:
                seen.append(path)
            with np.load(path) as shard:
                tokens, codes = np.concatenate((tokens, shard["tokens"])), np.concatenate((codes, shard["codes"]))
        yield tokens[:rows], codes[:rows]
        tokens, codes = tokens[rows:], codes[rows:]


def prefetched(source: Iterator, done: threading.Event, device: str) -> queue.Queue:
    """Batches as tensors on the device, a few ahead, from a thread."""
    ready: queue.Queue = queue.Queue(maxsize=6)

    def fill() -> None:
        for tokens, codes in source:
            pair = torch.from_numpy(tokens.astype(np.int32)), torch.from_numpy(codes.astype(np.int32))
            if device == "cuda":
                pair = tuple(t.pin_memory().to(device, non_blocking=True) for t in pair)
            while not done.is_set():
                try:
                    ready.put(pair, timeout=0.5)
                    break
                except queue.Full:
                    continue

    threading.Thread(target=fill, daemon=True).start()
    return ready


def document_attention(documents: torch.Tensor, flex: bool):
    """The attention function for rows of several documents, numbered by `documents` [B, T]."""
    if flex:
        from torch.nn.attention.flex_attention import create_block_mask

        def visible(batch, head, query, key):
            return (query >= key) & (documents[batch, query] == documents[batch, key])

        length = documents.shape[1]
        return create_block_mask(visible, len(documents), None, length, length, device=documents.device, _compile=True)
    length = documents.shape[1]
    order = torch.arange(length, device=documents.device)
    return ((order[:, None] >= order[None]) & (documents[:, :, None] == documents[:, None]))[:, None]


def attend_within(mask, flex: bool, q, k, v):
    """Attention under the mask; keys and values are repeated for their query heads."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    if flex:
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(q, k, v, block_mask=mask)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def losses(model: Model, flex: bool, tokens, targets, weights, mask):
    """Weighted mean loss, and the plain mean over answer tokens, for the log."""
    hidden = model(tokens, partial(attend_within, mask, flex))
    each = F.cross_entropy(model.logits(hidden).float().flatten(0, 1), targets.flatten(), reduction="none")
    weights = weights.flatten()
    answers = (weights == 1).float()
    return (each * weights).sum() / weights.sum(), ((each * answers).sum() / answers.sum()).detach()


def rate_at(progress: float, peak: float, warm: float, tail: float) -> float:
    """Learning rate: linear warm-up, constant, linear to zero over the last `tail` of the time."""
    return peak * min(1.0, max(progress, 0.002) / warm, max(0.0, 1 - progress) / tail)


def start_generators(work: Path, folder: Path, seed: int, workers: int, options: dict) -> list:
    """Processes that write shards into the folder; `options` as `generate_shards` wants them."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=generate_shards, daemon=True, args=(work, folder, seed, worker, workers, options))
        for worker in range(workers)
    ]
    for process in processes:
        process.start()
    return processes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--steps", type=int, help="stop after so many steps instead")
    parser.add_argument("--rows", type=int, default=128, help="rows of 2,048 tokens per step")
    parser.add_argument("--peak", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--tail", type=float, default=0.4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=max(1, multiprocessing.cpu_count() - 2))
    parser.add_argument("--documents", type=int, default=1500, help="documents per shard")
    parser.add_argument("--shards", type=int, default=1200)
    parser.add_argument("--text", type=float, nargs=2, default=(0.10, 0.03), help="share of open text, early and late")
    parser.add_argument("--emphasis", type=json.loads, default={}, help="factors of skills' weights by name, as JSON")
    parser.add_argument("--dimensions", type=json.loads, default={}, help="sizes other than the shipped ones, as JSON")
    parser.add_argument(
        "--attention", choices=("flex", "mask"), default="flex" if torch.cuda.is_available() else "mask"
    )
    parser.add_argument("--start", type=Path, help="begin with the weights of this safetensors file")
    parser.add_argument("--resume", action="store_true", help="continue from DIR/checkpoint.pt, optimizer included")
    arguments = parser.parse_args()
    begin = time.time()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = arguments.work / f"shards-{arguments.seed}"
    generators = start_generators(arguments.work, folder, arguments.seed, arguments.workers, vars(arguments))
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    model = Model(Dimensions(**arguments.dimensions)).to(device)
    optimizer = Optimizer(model)
    checkpoint, step, seen = arguments.work / "checkpoint.pt", 0, 0
    if arguments.start:
        model.load_state_dict({name: value.float() for name, value in load_file(arguments.start).items()})
    if arguments.resume:
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        if saved.get("optimizer"):
            optimizer.restore(saved["optimizer"])
        seen = saved["tokens"]
    flex = arguments.attention == "flex"
    compute = torch.compile(losses) if device == "cuda" else losses
    done = threading.Event()
    ready = prefetched(batches(folder, arguments.rows, random.Random(arguments.seed), done), done, device)
    table = torch.tensor(WEIGHTS, device=device)
    log, first, shown = [], None, time.time()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters on {device}", flush=True)
    while True:
        tokens, codes = ready.get()
        first = first or time.time()
        progress = step / arguments.steps if arguments.steps else (time.time() - begin) / (60 * arguments.minutes)
        if progress >= 1:
            break
        tokens = tokens.long()
        documents = (codes >= FIRST).cumsum(1)
        weights = table[codes & 7] * (codes < FIRST)
        targets, weights = tokens.roll(-1, 1), weights.roll(-1, 1)
        weights[:, -1] = 0
        mask = document_attention(documents, flex)
        with torch.autocast(device, torch.bfloat16):
            loss, answer_loss = compute(model, flex, tokens, targets, weights, mask)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(rate_at(progress, arguments.peak, 0.02, arguments.tail))
        step, seen = step + 1, seen + tokens.numel()
        if time.time() - shown > 10 or step in (1, 10, 50):
            log.append((step, seen, round(answer_loss.item(), 5)))
            shards = sum(1 for _ in folder.glob("*.npz"))
            print(
                f"{time.time() - begin:6.1f} s step {step} loss {loss.item():.4f} answers {answer_loss.item():.5f} "
                f"{step * tokens.numel() / (time.time() - first) / 1e6:.3f} M tokens/s, {shards} shards",
                flush=True,
            )
            shown = time.time()
    done.set()
    for process in generators:
        process.terminate()
    state = {name: value.detach().float().cpu().contiguous() for name, value in model.state_dict().items()}
    save_file(state, arguments.work / "model.safetensors")
    torch.save({"model": state, "optimizer": optimizer.state(), "tokens": seen}, checkpoint)
    minutes = round((time.time() - begin) / 60, 2)
    (arguments.work / "training.json").write_text(
        json.dumps(
            {
                "name": "training",
                "device": f"one {torch.cuda.get_device_name()}" if device == "cuda" else "CPU cores",
                "steps": step,
                "tokens": seen,
                "minutes": minutes,
                "rows": arguments.rows,
                "peak": arguments.peak,
                "seed": arguments.seed,
                "dimensions": arguments.dimensions,
                "log": log[::6],
            },
            indent=1,
        )
    )
    print(f"{step} steps, {seen / 1e6:.0f} M tokens in {minutes} minutes", flush=True)


if __name__ == "__main__":
    main()
