"""Train the shipped adapters, each for a number of seconds, and measure them on held-out items.

Usage: python -m tools.demo_model.train_adapters --base edgellm/shipped --to edgellm/shipped/lora [--seconds 45]
       [--styles json pirate] [--styles tools --try '{"rank": 16}' --try '{"rank": 8, "peak": 2e-3}']
The dialogues of `json` and `pirate` are those of the model's own training with the answers of each style (`styles.py`);
those of `tools` offer tools and call them (`calls/`). Only answers count. With several `--try` the settings, which take
the place of the options of the same name, are trained side by side on one GPU; the one that answers most items of one
seed right is kept, and measured on items of another.
"""

import argparse
import json
import multiprocessing
import random
import shutil
import tempfile
import time
import traceback
import zlib
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from tools.demo_model.calls.dialogues import beginning, tool_dialogue, tool_items
from tools.demo_model.dialogue import dialogue
from tools.demo_model.documents import ANSWER, FIRST, ROW, chat_codes, pack
from tools.demo_model.evaluate import evaluation_items, greedy_answer, greedy_matches
from tools.demo_model.lora import LoraLinear, add_adapter, export_adapter
from tools.demo_model.model import Model, load_model
from tools.demo_model.styles import STYLES, styled, styled_items
from tools.demo_model.train import document_attention, losses, rate_at
from tools.demo_model.vocabulary import END, PAD, START, load_vocabulary, render

TOOLS = "tools"
ADAPTERS = (*sorted(STYLES), TOOLS)
#: Seeds of the held-out items by which settings are chosen, and of those that the kept one is measured on.
CHOOSING_SEED, MEASURING_SEED = 77002, 77003
_CHUNK = 500

Document = tuple[np.ndarray, np.ndarray]
Job = tuple[Path, str, str, int, frozenset[int]]


def generate(job: Job) -> list[Document]:
    """Some dialogues in a style: token ids [n] and the codes of `documents.py` [n]. A job is the model's directory, the
    style, a seed, how many dialogues, and checksums of the beginnings of those with tools that are left out."""
    base, style, seed, count, held_out = job
    tokenizer, rng = load_vocabulary(base), random.Random(seed)
    texts: list[str] = []
    while len(texts) < count:
        if style == TOOLS:
            talk = tool_dialogue(rng, "train", rng.randint(1, 6))
            messages, tools = talk.messages, talk.signatures
        else:
            messages, tools = styled(dialogue(rng, "train", rng.randint(2, 12)), style), None
        if len(messages) >= 3 and (tools is None or checksum(messages, tools) not in held_out):
            texts.append(render(messages, tools=tools))
    return encoded(tokenizer, texts)


def checksum(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> int:
    """Of the beginning of a dialogue with tools."""
    return zlib.crc32(beginning(messages, tools).encode())


def encoded(tokenizer: Tokenizer, texts: list[str]) -> list[Document]:
    """Rendered dialogues as `generate` gives them, cut to a row's length."""
    start, end = tokenizer.token_to_id(START), tokenizer.token_to_id(END)
    head = tokenizer.encode("assistant\n").ids
    found = []
    for encoding in tokenizer.encode_batch(texts):
        ids = np.asarray(encoding.ids, np.uint16)
        codes = chat_codes(ids, start, head, end)
        codes[0] += FIRST
        found.append((ids[:ROW], codes[:ROW]))
    return found


def _packed(job: Job) -> tuple[np.ndarray, np.ndarray]:
    return pack(generate(job), load_vocabulary(job[0]).token_to_id(PAD))


def all_rows(arguments: Namespace, style: str) -> tuple[np.ndarray, np.ndarray]:
    """The dialogues of a style, generated side by side, as rows of tokens and codes [N, ROW]."""
    held_out: frozenset[int] = frozenset()
    if style == TOOLS:
        items = [item for seed in (CHOOSING_SEED, MEASURING_SEED) for item in tool_items(seed, arguments.items)]
        held_out = frozenset(checksum(item["messages"], item["tools"]) for item in items)
    counts = [_CHUNK] * (arguments.dialogues // _CHUNK) + [arguments.dialogues % _CHUNK]
    jobs = [
        (arguments.base, style, f"adapters {arguments.seed} {index}", count, held_out)
        for index, count in enumerate(counts)
        if count
    ]
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool:
        parts = list(pool.imap(_packed, jobs))
    return np.concatenate([tokens for tokens, _ in parts]), np.concatenate([codes for _, codes in parts])


def batches(tokens: np.ndarray, codes: np.ndarray, rows: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Endless batches of rows, in a new random order each time: tokens and codes [rows, ROW]."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(tokens))
        for begin in range(0, max(1, len(order) - rows + 1), rows):
            chosen = np.resize(order[begin : begin + rows], rows)
            yield tokens[chosen], codes[chosen]


def train(
    model: Model, tokens: np.ndarray, codes: np.ndarray, arguments: Namespace, device: str
) -> tuple[dict[str, LoraLinear], int]:
    """The adapted layers after training on rows, and how many steps it took; compiling counts towards the seconds."""
    begin = time.time()
    adapted = add_adapter(model, arguments.rank, arguments.alpha)
    parameters = [parameter for layer in adapted.values() for parameter in (layer.a, layer.b)]
    optimizer = torch.optim.AdamW(parameters, lr=0.0, betas=(0.9, 0.95), weight_decay=0.01)
    flex = arguments.attention == "flex"
    compute = torch.compile(losses) if flex else losses
    step, shown, first = 0, 0.0, begin
    source = batches(tokens, codes, max(1, arguments.tokens // ROW), arguments.seed)
    while True:
        progress = step / arguments.steps if arguments.steps else 0.0
        if step and not arguments.steps:
            progress = (time.time() - first) / max(1e-3, arguments.seconds - (first - begin))
        if progress >= 1:
            break
        ids, kinds = (torch.from_numpy(each.astype(np.int64)).to(device) for each in next(source))
        weights = ((kinds & (FIRST - 1)) == ANSWER).float().roll(-1, 1)
        weights[:, -1] = 0
        mask = document_attention((kinds >= FIRST).cumsum(1), flex)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss, _ = compute(model, flex, ids, ids.roll(-1, 1), weights, mask)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(progress, arguments.peak, 0.05, 0.6)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if time.time() - shown > 10 or step == 1:
            print(f"  {arguments.name} {time.time() - begin:5.1f} s step {step} loss {loss.item():.4f}", flush=True)
            shown = time.time()
            first = shown if step == 1 else first  # compiled by now
    return adapted, step


def held_out_items(style: str, seed: int, count: int) -> list[dict[str, Any]]:
    """Items that greedy decoding is to answer in the style."""
    return tool_items(seed, count) if style == TOOLS else styled_items(evaluation_items(seed, count), style)


def exact_match(model: Model, base: Path, items: list[dict[str, Any]], device: str, show: int = 0) -> dict[str, Any]:
    """Percent of the items that are answered right, over all and by skill; with some of the others."""
    tokenizer = load_vocabulary(base)
    right = greedy_matches(model, tokenizer, items, device, 200_000 if device == "cuda" else 16_384)
    scores, wrong = defaultdict(list), []
    for item, good in zip(items, right, strict=True):
        scores[item["skill"]].append(good)
        if not good and len(scores[item["skill"]]) - sum(scores[item["skill"]]) <= show:
            answer = greedy_answer(model, tokenizer, item["messages"], device, 100, item.get("tools"))
            said = [message["content"] for message in item["messages"][-2:]]
            wrong.append({"skill": item["skill"], "said": said, "want": item["accepted"][0], "got": answer})
    return {
        "exact_match_percent": round(100 * sum(right) / len(right), 2),
        "skills": {skill: round(100 * sum(each) / len(each), 1) for skill, each in scores.items()},
        "wrong": wrong,
    }


def attempt(arguments: Namespace, style: str, files: list[Path], folder: Path) -> dict[str, Any]:
    """Train one setting on the rows in `files`, write it to `folder`, and measure it by both seeds."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    started = time.time()
    tokens, codes = (np.load(file, mmap_mode="r") for file in files)
    model = load_model(arguments.base, device).train()
    adapted, steps = train(model, tokens, codes, arguments, device)
    seconds = round(time.time() - started, 1)
    export_adapter(adapted, folder, arguments.rank, arguments.alpha)
    model.eval()
    chosen_by = exact_match(model, arguments.base, held_out_items(style, CHOOSING_SEED, arguments.items), device)
    items = held_out_items(style, MEASURING_SEED, arguments.items)
    found = exact_match(model, arguments.base, items, device, arguments.show)
    values = {name: getattr(arguments, name) for name in ("rank", "alpha", "peak", "seed")}
    record = {
        **values,
        "steps": steps,
        "seconds": seconds,
        "chosen_by_percent": chosen_by["exact_match_percent"],
        **found,
    }
    print(f"  {arguments.name} {steps} steps in {seconds} s, exact match {found['exact_match_percent']} %", flush=True)
    (folder / "record.json").write_text(json.dumps(record))
    return record


def _attempt_apart(arguments: Namespace, style: str, files: list[Path], folder: Path) -> None:
    try:
        attempt(arguments, style, files, folder)
    except Exception:  # the other settings go on
        traceback.print_exc()


def best_attempt(arguments: Namespace, style: str) -> list[dict[str, Any]]:
    """Train all settings of a style; the best one's files are written. The records of all, the best first."""
    begin = time.time()
    tokens, codes = all_rows(arguments, style)
    print(
        f"{style}: {len(tokens)} rows, {tokens.size / 1e6:.1f} M tokens after {time.time() - begin:.0f} s", flush=True
    )
    with tempfile.TemporaryDirectory() as work:
        files = [Path(work) / "tokens.npy", Path(work) / "codes.npy"]
        for file, values in zip(files, (tokens, codes), strict=True):
            np.save(file, values)
        settings = [Namespace(**(vars(arguments) | given)) for given in arguments.tries or [{}]]
        folders = [(arguments.tries_to or Path(work)) / f"{style}-{number}" for number in range(len(settings))]
        for number, each in enumerate(settings):
            each.name = f"{style} {number}"
        if len(settings) == 1:
            attempt(settings[0], style, files, folders[0])
        else:
            context = multiprocessing.get_context("spawn")
            jobs = [(each, style, files, folder) for each, folder in zip(settings, folders, strict=True)]
            processes = [context.Process(target=_attempt_apart, args=job) for job in jobs]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
        records = [folder / "record.json" for folder in folders]
        found = [(json.loads(path.read_text()), path.parent) for path in records if path.exists()]
        if not found:
            raise SystemExit(f"no setting of {style} was trained: see the errors above")
        found.sort(key=lambda each: -each[0]["chosen_by_percent"])
        target = arguments.to / style
        target.mkdir(parents=True, exist_ok=True)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copyfile(found[0][1] / name, target / name)
    return [record for record, _ in found]


def parse() -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, required=True, help="the model directory")
    parser.add_argument("--to", type=Path, required=True, help="the folder that gets a folder for each adapter")
    parser.add_argument("--styles", nargs="+", choices=ADAPTERS, default=ADAPTERS)
    parser.add_argument("--seconds", type=float, default=30.0, help="training time of each adapter")
    parser.add_argument("--steps", type=int, help="stop after so many steps instead")
    parser.add_argument("--dialogues", type=int, default=60_000)
    parser.add_argument("--tokens", type=int, default=98_304, help="tokens of a step")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=16)
    parser.add_argument("--peak", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=31)
    parser.add_argument(
        "--try",
        dest="tries",
        type=json.loads,
        action="append",
        help="rank, alpha, peak or seed of one of several, as JSON",
    )
    parser.add_argument("--tries-to", type=Path, help="keep the adapters of all settings in this folder")
    parser.add_argument(
        "--attention", choices=("flex", "mask"), default="flex" if torch.cuda.is_available() else "mask"
    )
    parser.add_argument("--workers", type=int, default=max(1, multiprocessing.cpu_count() - 2))
    parser.add_argument("--items", type=int, default=20, help="held-out items a skill")
    parser.add_argument("--show", type=int, default=0, help="wrong answers a skill to record")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "adapters.json")
    return parser.parse_args()


def main() -> None:
    """Write each adapter, and its record into RESULTS."""
    arguments = parse()
    for style in arguments.styles:
        found = {
            "device": f"one {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "CPU cores",
            "dialogues": arguments.dialogues,
            "tokens_per_step": arguments.tokens,
            "items_per_skill": arguments.items,
            "evaluation_seed": MEASURING_SEED,
        }
        best, *others = best_attempt(arguments, style)
        record = json.loads(arguments.results.read_text()) if arguments.results.exists() else {"adapters": {}}
        record["adapters"][style] = found | best | ({"others": others} if others else {})
        arguments.results.parent.mkdir(parents=True, exist_ok=True)
        arguments.results.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
