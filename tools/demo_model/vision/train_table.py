"""Train the table of rows (table.py) through the frozen language model for a number of seconds.

Usage: python -m tools.demo_model.vision.train_table --base edgellm/shipped --work DIR [--seconds 75] [--device cuda:0]
Writes DIR/table.safetensors (fp32) and DIR/table.json. It needs no pictures, only dialogues, which worker processes
write to DIR/dialogues-SEED while it trains.
"""

import argparse
import json
import multiprocessing
import random
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from tools.demo_model.model import load_model
from tools.demo_model.train import rate_at
from tools.demo_model.vision.dialogues import PICTURE, seen_items
from tools.demo_model.vision.documents import GROUP, write_shards
from tools.demo_model.vision.feeding import Dialogues
from tools.demo_model.vision.layout import token_tables
from tools.demo_model.vision.reading import Examination, answer_loss
from tools.demo_model.vision.table import Table
from tools.demo_model.vocabulary import load_vocabulary


def start_writers(
    base: Path, work: Path, seed: int, workers: int, shards: int, groups: int, material: Path
) -> tuple[Path, list]:
    """Processes that write shards of dialogues; the folder and the processes."""
    folder = work / f"dialogues-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(
            target=write_shards, daemon=True, args=(base, folder, seed, n, workers, shards, groups, material)
        )
        for n in range(workers)
    ]
    for process in processes:
        process.start()
    return folder, processes


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, required=True, help="the model directory")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--material", type=Path, required=True, help="what prepare.py wrote")
    parser.add_argument("--seconds", type=float, default=75)
    parser.add_argument("--steps", type=int, help="stop after so many steps instead")
    parser.add_argument("--rows", type=int, default=256, help="dialogues of a step, a multiple of 64")
    parser.add_argument("--peak", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=41)
    parser.add_argument("--workers", type=int, default=max(1, multiprocessing.cpu_count() // 2 - 2))
    parser.add_argument("--groups", type=int, default=8, help="groups of 64 dialogues in a shard")
    parser.add_argument("--items", type=int, default=20, help="held-out items a skill")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    begin, device = time.time(), arguments.device
    cuda = device.startswith("cuda")
    arguments.work.mkdir(parents=True, exist_ok=True)
    folder, writers = start_writers(
        arguments.base, arguments.work, arguments.seed, arguments.workers, 4000, arguments.groups, arguments.material
    )
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    dtype = torch.bfloat16 if cuda else torch.float32
    model = load_model(arguments.base, device, dtype).requires_grad_(False)
    tokenizer = load_vocabulary(arguments.base)
    image = tokenizer.token_to_id(PICTURE)
    tables = token_tables(lambda text: tokenizer.encode(text).ids)
    table = Table(model.model.embed_tokens.weight, tables).to(device)
    examination = Examination(seen_items(11, arguments.items, novel=0.5), tokenizer, device)
    optimizer = torch.optim.AdamW(table.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.0)

    def examined() -> dict[str, float]:
        found = examination.exact_match(
            model, lambda n: table(torch.from_numpy(examination.cells[n]).to(device)).to(dtype), image
        )
        mean = sum(found.values()) / len(found)
        print(
            f"{time.time() - begin:6.1f} s exact match {mean:.1f} %, below 95: "
            f"{ {k: v for k, v in found.items() if v < 95} }",
            flush=True,
        )
        return found

    examined()
    compute = torch.compile(answer_loss) if cuda else answer_loss
    source = Dialogues(folder, arguments.rows // GROUP, random.Random(arguments.seed), device)
    step, shown, started, tested = 0, 0.0, time.time(), time.time()
    while True:
        progress = step / arguments.steps if arguments.steps else (time.time() - started) / arguments.seconds
        if progress >= 1:
            break
        tokens, answers, cells, *_ = source.batch()
        rows = table(torch.from_numpy(cells).to(device, non_blocking=True)).to(dtype)
        loss, right = compute(model, tokens, answers, rows, image)
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = rate_at(progress, arguments.peak, 0.03, 0.7)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if time.time() - shown > 5 or step in (1, 10):
            shown = time.time()
            print(
                f"{shown - begin:6.1f} s step {step} loss {loss.item():.4f} tokens right {100 * right.item():.2f} % "
                f"{step * arguments.rows / (shown - started):.0f} dialogues/s, {source.shards} shards",
                flush=True,
            )
        if time.time() - tested > 25:
            examined()
            tested = time.time()
    found = examined()
    for process in writers:
        process.terminate()
    save_file(
        {k: v.detach().float().cpu().contiguous() for k, v in table.state_dict().items()},
        arguments.work / "table.safetensors",
    )
    record = {
        "steps": step,
        "dialogues": step * arguments.rows,
        "seconds": round(time.time() - started, 1),
        "items_per_skill": arguments.items,
        "exact_match_percent": found,
    }
    (arguments.work / "table.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
