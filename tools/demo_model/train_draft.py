"""Train the EAGLE-3 draft head of a model of this layout for a number of minutes.

Usage: python -m tools.demo_model.train_draft --work DIR --base DIR --to DIR [--minutes 4]
`--work` is the directory that prepare.py wrote, `--base` the model directory, `--to` the draft directory to be written.
"""

import argparse
import json
import multiprocessing
import random
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from tools.demo_model.continuations import continuation_rows
from tools.demo_model.documents import ANSWER, FIRST, load_material
from tools.demo_model.draft_model import Draft, DraftDimensions, begin_from, export_draft
from tools.demo_model.model import Model, load_model
from tools.demo_model.optimizer import Optimizer
from tools.demo_model.train import attend_within, batches, document_attention, prefetched, rate_at, start_generators
from tools.demo_model.unrolled import ChainAttention, attend_with_sum, unrolled_loss


def frequent_answer_tokens(folder: Path, shards: int, count: int, vocabulary: int, extra: np.ndarray) -> torch.Tensor:
    """The `count` ids most frequent in the answers of the first shards (waits for them) and in `extra` [n] ids."""
    counts = np.bincount(extra, minlength=vocabulary).astype(np.float64)
    for index in range(shards):
        path = folder / f"{index:05d}.npz"
        while not path.exists():
            time.sleep(0.2)
        with np.load(path) as shard:
            answers = shard["tokens"][(shard["codes"] & (FIRST - 1)) == ANSWER]
        counts += np.bincount(answers, minlength=vocabulary)
    order = np.argsort(-counts, kind="stable")
    share = 100 * counts[order[:count]].sum() / counts.sum()
    print(f"the draft vocabulary holds {share:.2f} % of the answers' tokens", flush=True)
    return torch.from_numpy(order[:count].copy())


def mixed_batches(source, texts: tuple[np.ndarray, np.ndarray], rows: int, rng: np.random.Generator):
    """Batches of dialogues with `rows` rows of continuations put in place of their last ones."""
    for tokens, codes in source:
        chosen = rng.integers(len(texts[0]), size=rows)
        kept = len(tokens) - rows
        yield np.concatenate((tokens[:kept], texts[0][chosen])), np.concatenate((codes[:kept], texts[1][chosen]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument(
        "--record", type=Path, help="file for the record of the training (default: in the work directory)"
    )
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--optimizer-steps", type=int, help="stop after so many steps instead")
    parser.add_argument("--rows", type=int, default=64, help="rows of 2,048 tokens per step")
    parser.add_argument("--steps", type=int, default=6, help="tokens that a chain predicts ahead")
    parser.add_argument("--decay", type=float, default=0.8, help="weight of a step relative to the one before")
    parser.add_argument("--peak", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--tail", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--workers", type=int, default=max(1, multiprocessing.cpu_count() - 2))
    parser.add_argument("--documents", type=int, default=1500, help="documents per shard")
    parser.add_argument("--shards", type=int, default=1200)
    parser.add_argument("--count", type=int, default=24, help="shards that the draft vocabulary is counted on")
    parser.add_argument("--text", type=float, nargs=2, default=(0.05, 0.05), help="share of open text, early and late")
    parser.add_argument("--continuations", type=int, default=2048, help="documents that the base continues")
    parser.add_argument("--length", type=int, default=160, help="tokens of a continuation")
    parser.add_argument("--dimensions", type=json.loads, default={}, help="sizes other than the shipped ones, as JSON")
    parser.add_argument(
        "--attention", choices=("flex", "mask"), default="flex" if torch.cuda.is_available() else "mask"
    )
    return parser.parse_args()


def base_and_draft(arguments: argparse.Namespace, folder: Path, device: str) -> tuple[Model, Draft, tuple]:
    """The frozen base, a new head for it, and the rows of the base's own text."""
    base = load_model(arguments.base, device).requires_grad_(False)
    material = load_material(arguments.work)
    with torch.autocast(device, torch.bfloat16):
        texts = continuation_rows(base, material, f"text {arguments.seed}", arguments.continuations, arguments.length)
    d = DraftDimensions(**arguments.dimensions)
    chosen = frequent_answer_tokens(folder, arguments.count, d.draft_vocab_size, d.vocab_size, texts[0][texts[1] > 1])
    draft = Draft(d, chosen)
    begin_from(draft, base.model.norm.weight.cpu(), base.model.embed_tokens.weight.cpu())
    return base, draft.to(device), texts


def main() -> None:
    arguments = parse()
    begin = time.time()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = arguments.work / f"shards-draft-{arguments.seed}"
    options = {**vars(arguments), "emphasis": {}}
    generators = start_generators(arguments.work, folder, arguments.seed, arguments.workers, options)
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    base, draft, texts = base_and_draft(arguments, folder, device)
    optimizer = Optimizer(draft, weight_decay=0.05, plain="lm_head")
    flex = arguments.attention == "flex"
    attend, attend_sum = (
        torch.compile(function) if flex and device == "cuda" else function
        for function in (attend_within, attend_with_sum)
    )
    done = threading.Event()
    source = batches(folder, arguments.rows, random.Random(arguments.seed), done)
    source = mixed_batches(source, texts, max(1, arguments.rows // 16), np.random.default_rng(arguments.seed))
    ready = prefetched(source, done, device)
    step, seen, shown, log = 0, 0, 0.0, []
    size = sum(p.numel() for p in draft.parameters())
    print(f"{size:,} parameters on {device}, ready after {time.time() - begin:.0f} s", flush=True)
    while True:
        tokens, codes = ready.get()
        elapsed = (time.time() - begin) / (60 * arguments.minutes)
        progress = step / arguments.optimizer_steps if arguments.optimizer_steps else elapsed
        if progress >= 1:
            break
        tokens = tokens.long()
        mask = document_attention((codes >= FIRST).cumsum(1), flex)
        with torch.autocast(device, torch.bfloat16):
            chain = ChainAttention(partial(attend_sum, mask, flex))
            with torch.no_grad():
                taps = draft.d.eagle_aux_hidden_state_layer_ids
                hidden, features = base.with_features(tokens, taps, partial(attend, mask, flex))
                embedded = base.model.embed_tokens(tokens).to(features.dtype)
            loss, found = unrolled_loss(
                draft, (base.logits, hidden, features, embedded), chain, codes, arguments.steps, arguments.decay
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step(rate_at(progress, arguments.peak, 0.02, arguments.tail))
        step, seen = step + 1, seen + tokens.numel()
        if time.time() - shown > 10 or step in (1, 10):
            shown = time.time()
            hits = [round(right.item() / max(1, count), 4) for right, count in found]
            log.append((step, round(loss.item(), 4), hits))
            print(f"{shown - begin:6.1f} s step {step} loss {loss.item():.4f} hits {hits}", flush=True)
    done.set()
    for process in generators:
        process.terminate()
    state = {name: value.detach().cpu().contiguous() for name, value in draft.state_dict().items()}
    save_file(state, arguments.work / "draft.safetensors")
    configuration = json.loads((arguments.base / "config.json").read_text())
    export_draft(
        arguments.work / "draft.safetensors",
        arguments.to,
        draft.d,
        configuration["eos_token_id"],
        configuration["pad_token_id"],
    )
    record = {
        "name": "draft head",
        "device": f"one {torch.cuda.get_device_name()}" if device == "cuda" else "CPU cores",
        "parameters": size,
        "optimizer_steps": step,
        "tokens": seen,
        "minutes": round((time.time() - begin) / 60, 2),
        "rows": arguments.rows,
        "peak": arguments.peak,
        "seed": arguments.seed,
        "chain": arguments.steps,
        "decay": arguments.decay,
        "log": log[::4],
    }
    (arguments.record or arguments.work / "training_draft.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"{step} steps, {seen / 1e6:.0f} M tokens in {record['minutes']} minutes", flush=True)


if __name__ == "__main__":
    main()
