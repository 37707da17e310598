"""Train the eyes for a number of minutes: first to see, then to be read by the frozen language model.

Usage: python -m tools.demo_model.vision.train --base edgellm/shipped --table DIR/table.safetensors --material MATERIAL
    --work DIR --minutes 8 [--resume] [--seeing 0.5] [--name eyes] [--rank 0]
The first part (`--seeing` of the time) shows random scenes: each cell's colour and kind are to be read from the
encoder's states, and the projector's rows are to be those of the table. The second adds dialogues about pictures, with
the language model's own loss, and low-rank changes of that model (language.py; none with `--rank 0`). Every minute
NAME.safetensors (fp32), NAME.language.safetensors and NAME.optimizer.pt are written to DIR, in the end NAME.json.
"""

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tools.demo_model.optimizer import Optimizer
from tools.demo_model.train import rate_at
from tools.demo_model.vision.arrays import TorchArrays
from tools.demo_model.vision.compiling import CompiledLayers
from tools.demo_model.vision.dialogues import PICTURE, seen_items
from tools.demo_model.vision.documents import GROUP
from tools.demo_model.vision.feeding import Dialogues
from tools.demo_model.vision.language import DRAFT_TAPS, Language
from tools.demo_model.vision.layout import token_tables
from tools.demo_model.vision.network import Sizes, cell_targets
from tools.demo_model.vision.options import parse
from tools.demo_model.vision.reading import Examination, spoken_loss, with_pictures
from tools.demo_model.vision.renderer import SIDE, render
from tools.demo_model.vision.sampling import held_out_table, sample_cells, with_strangers
from tools.demo_model.vision.seeing import Learner, seeing_loss
from tools.demo_model.vision.sparing import Sparing
from tools.demo_model.vision.table import Table
from tools.demo_model.vision.train_table import start_writers
from tools.demo_model.vocabulary import load_vocabulary

_RECORDED = """pictures rows peak tail seeing seed sizes unnamed strange weight_decay spare rank language_peak
plain_weight words_weight rows_weight"""


class Training:
    """Everything that the loop needs, made once."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments, self.begin = arguments, time.time()
        self.device = device = arguments.device
        self.cuda = device.startswith("cuda")
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        arguments.work.mkdir(parents=True, exist_ok=True)
        self.folder, self.writers = start_writers(
            arguments.base,
            arguments.work,
            arguments.seed,
            arguments.workers,
            arguments.shards,
            arguments.groups,
            arguments.material,
        )
        torch.manual_seed(arguments.seed)
        torch.set_float32_matmul_precision("high")
        self.language = Language(arguments.base, max(1, arguments.rank), device)
        self.model = self.language.model if arguments.rank else self.language.before
        tokenizer = load_vocabulary(arguments.base)
        self.image = tokenizer.token_to_id(PICTURE)
        self.table = Table(
            self.model.model.embed_tokens.weight, words := token_tables(lambda text: tokenizer.encode(text).ids)
        ).to(device)
        named = torch.from_numpy(words["colours"]).long(), torch.from_numpy(words["kinds"]).long()
        self.sparing = Sparing(arguments.spare, named, tokenizer.get_vocab_size()).to(device)
        if arguments.table:
            self.table.load_state_dict(load_file(arguments.table))
        self.table.requires_grad_(False)
        sizes = Sizes(**arguments.sizes)
        self.learner = Learner(sizes, self.model.d.hidden_size).to(device)
        self.optimizer = Optimizer(self.learner, arguments.weight_decay, plain="embed")
        if arguments.resume and self.path("safetensors").exists():
            self.restore()
        self.held_out = held_out_table()
        self.random = np.random.default_rng(arguments.seed)
        self.arrays = TorchArrays(arguments.seed, device)
        with torch.no_grad():
            rows = self.table(torch.from_numpy(sample_cells(self.random, 2048, self.held_out)).to(device))
            self.scale = (rows - rows.mean(0)).square().mean().item()
        self.directions = self.table.directions()
        layers = itertools.chain(self.learner.eyes.vision_tower.encoder.layers, self.model.model.layers)
        self.compiled = CompiledLayers(layers, self.cuda and not arguments.eager)
        self.examination = Examination(seen_items(11, arguments.items, novel=0.5), tokenizer, device)
        self.usual = Examination(seen_items(13, arguments.items), tokenizer, device)
        self.quick = Examination(seen_items(12, max(2, arguments.items // 3), novel=0.5), tokenizer, device)
        for each in (self.examination, self.usual, self.quick):
            each.pictures = self.draw(each.cells, TorchArrays(7, device), True)
        self.probes = {
            name: sample_cells(np.random.default_rng(8), arguments.probes, self.held_out, name == "held-out pairs")
            for name in ("trained pairs", "held-out pairs")
        }
        self.probe_pictures = {n: self.draw(c, TorchArrays(9, device), True) for n, c in self.probes.items()}

    def path(self, ending: str) -> Path:
        """A file of this run."""
        return self.arguments.work / f"{self.arguments.name}.{ending}"

    @torch.no_grad()
    def draw(self, cells: np.ndarray, arrays: TorchArrays, doubled: bool, paints=None) -> torch.Tensor:
        """Pictures of the cells, values 0 to 255 as bytes; `doubled`: drawn twice as large, and shrunk."""
        if not doubled:
            return render(cells, arrays, paints=paints, repeats=self.arguments.ahead).to(torch.uint8)
        shrunk = []
        for first in range(0, len(cells), 4096):
            part = slice(first, first + 4096)
            drawn = render(cells[part], arrays, 2 * SIDE, False, None if paints is None else paints[part], 2)
            shrunk.append(F.avg_pool2d(drawn, 2).round().to(torch.uint8))
        return torch.cat(shrunk)

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.time() - self.begin

    def save(self) -> None:
        """Write weights and optimizer."""
        state = {k: v.detach().float().cpu().contiguous() for k, v in self.learner.state_dict().items()}
        save_file(state, self.path("part"))
        self.path("part").rename(self.path("safetensors"))
        saved = self.optimizer.state()
        saved["buffers"] = [buffer.bfloat16() for buffer in saved["buffers"]]
        torch.save(saved, self.path("optimizer.pt"))
        self.language.save(self.path("language.safetensors"))

    def restore(self) -> None:
        """Continue from saved weights, and the optimizer where it was saved too."""
        self.learner.load_state_dict(load_file(self.path("safetensors"), device=self.device))
        if self.path("language.safetensors").exists():
            self.language.restore(self.path("language.safetensors"))
        if self.path("optimizer.pt").exists():
            self.optimizer.restore(torch.load(self.path("optimizer.pt"), map_location=self.device, weights_only=True))

    @torch.no_grad()
    def looked(self, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States and rows of pictures."""
        with torch.autocast(self.device.split(":")[0], torch.bfloat16, enabled=self.cuda):
            return self.learner.eyes(pictures.float())

    @torch.no_grad()
    def probe(self) -> dict[str, float]:
        """Percent of objects and of whole scenes that the heads name right."""
        found = {}
        for name, cells in self.probes.items():
            targets = cell_targets(torch.from_numpy(cells).to(self.device))
            guesses = [
                torch.stack([logits.argmax(-1) for logits in self.learner.heads(self.looked(part)[0].float())])
                for part in self.probe_pictures[name].split(256)
            ]
            colour, kind = torch.cat(guesses, 1)
            right = (colour == targets[0]) & (kind == targets[1])
            full = torch.from_numpy(cells[:, 1] != 255).to(self.device)
            found |= {
                f"objects of {name}": 100 * right[full].float().mean().item(),
                f"colours of {name}": 100 * (colour == targets[0])[full].float().mean().item(),
                f"kinds of {name}": 100 * (kind == targets[1])[full].float().mean().item(),
                f"scenes of {name}": 100 * right.all(1).float().mean().item(),
            }
        return {name: round(value, 2) for name, value in found.items()}

    def examined(self, examination: Examination) -> dict[str, float]:
        """Exact match per skill through the language model."""
        with self.autocast():
            return examination.exact_match(self.model, lambda n: self.looked(examination.pictures[n])[1], self.image)

    def report(self, examinations: dict[str, Examination]) -> dict:
        """Print and return how it goes."""
        self.learner.eval()
        record = {"seconds": round(self.elapsed(), 1), **self.probe()}
        print(f"{self.elapsed():6.1f} s seen {record}", flush=True)
        for name, examination in examinations.items():
            found = self.examined(examination)
            mean = round(sum(found.values()) / len(found), 2)
            record |= {f"exact_match_percent{name}": found, f"all{name}": mean}
            print(f"{self.elapsed():6.1f} s exact match{name} {mean} % {found}", flush=True)
        self.learner.train()
        return record

    def batches(self, source: Dialogues | None) -> Iterator[tuple]:
        """Endless (dialogues or None, cells, pictures) of single steps; the pictures of several are drawn at once."""
        arguments = self.arguments
        for number in itertools.count(1):
            told = [source.batch() if source else None for _ in range(arguments.ahead)]
            parts, paints = [], []
            for each in told:
                given = each[2] if each else np.empty((0, 2, 9), np.uint8)
                own = sample_cells(self.random, max(0, arguments.pictures - len(given)), self.held_out)
                painted = with_strangers(self.random, own, self.held_out, arguments.unnamed, arguments.strange)
                parts.append(np.concatenate((given, own)))
                paints.append(np.concatenate((np.zeros((len(given), 9, 3), np.float32), painted)))
            doubled = number % arguments.doubled == 0
            drawn = self.draw(np.concatenate(parts), self.arrays, doubled, np.concatenate(paints))
            pictures = drawn.split([len(part) for part in parts])
            yield from zip(told, parts, pictures, strict=True)

    def autocast(self) -> torch.autocast:
        """Products in bf16 on a GPU."""
        return torch.autocast(self.device.split(":")[0], torch.bfloat16, enabled=self.cuda)

    def step(self, told: tuple | None, cells: np.ndarray, pictures: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One step's losses, already differentiated: of names, of rows, share of cells named right, of answers, share
        of their tokens right, of text that changed, and of the states that the draft head reads there."""
        arguments, device = self.arguments, self.device
        placed = torch.from_numpy(cells).to(device, non_blocking=True)
        wanted, (colours, kinds) = self.table(placed), cell_targets(placed)
        log = torch.zeros(4, device=device)
        with self.autocast(), self.compiled.used():
            named, apart, rows, right = seeing_loss(
                self.learner, pictures.float(), wanted, self.scale, colours, kinds, self.directions, self.sparing
            )
            loss = named + arguments.rows_weight * apart
            if told:
                tokens, answers, given, plain, plain_answers = told
                embedded = with_pictures(self.model, tokens, rows[: len(given)], self.image)
                if arguments.rank:
                    embedded = torch.cat((embedded, self.model.model.embed_tokens(plain)))
                hidden, states = self.model.from_embeddings(embedded, DRAFT_TAPS)
                count = len(tokens)
                spoken, share = spoken_loss(self.model, hidden[:count], tokens, answers, self.sparing)
                loss = loss + arguments.words_weight * spoken
                log[0], log[1] = spoken.detach(), share
                if arguments.rank:
                    weights = 0.1 + 0.9 * plain_answers.float()
                    changed, moved = self.language.kept(plain, weights, hidden[count:], states[count:])
                    loss = loss + arguments.plain_weight * (changed + 2 * moved)
                    log[2], log[3] = changed.detach(), moved.detach()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.learner.parameters(), 1.0)
        return named.detach(), apart.detach(), right, *log

    def progress(self, step: int) -> float:
        """Share of the time, or of the steps, that is over; the final examination has its own time."""
        arguments = self.arguments
        if arguments.steps:
            return step / arguments.steps
        return (self.elapsed() - self.first) / max(1.0, 60 * arguments.minutes - self.first - self.reserve)

    def run(self) -> None:
        """The loop."""
        arguments, log, source, step = self.arguments, [], None, 0
        self.first, self.reserve = self.elapsed(), 15.0 if self.cuda else 0.0
        parameters = sum(p.numel() for p in self.learner.eyes.parameters())
        print(f"{self.first:6.1f} s ready, {parameters:,} parameters of the eyes on {self.device}", flush=True)
        shown = saved = tested = time.time()
        counted, batches = 0, self.batches(None)
        while (progress := self.progress(step)) < 1:
            if source is None and progress >= arguments.seeing:
                source = Dialogues(self.folder, arguments.rows // GROUP, random.Random(arguments.seed), self.device)
                batches = self.batches(source)
                print(f"{self.elapsed():6.1f} s dialogues begin with {source.shards} shards", flush=True)
            losses = self.step(*next(batches))
            self.optimizer.step(rate_at(progress, arguments.peak, 0.03, arguments.tail))
            if arguments.rank and source is not None:
                self.language.step(progress, arguments.language_peak, arguments.tail)
            step, counted = step + 1, counted + arguments.pictures
            if time.time() - shown > 6 or step in (1, 5, 20):
                values = [round(value.item(), 5) for value in losses]
                rate = counted / (time.time() - shown)
                log.append([step, round(self.elapsed(), 1), *values])
                names = ("cells' loss", "rows apart", "cells right", "answers' loss", "tokens right", "text", "states")
                told = ", ".join(f"{name} {value:.5g}" for name, value in zip(names, values, strict=True))
                print(f"{self.elapsed():6.1f} s step {step} {told}; {rate:.0f} pictures/s", flush=True)
                shown, counted = time.time(), 0
            if time.time() - tested > 40:
                log.append(self.report({"": self.quick} if progress > 0.15 else {}))
                tested = time.time()
            if time.time() - saved > 60:
                self.save()
                saved = time.time()
        self.save()
        record = {
            "name": arguments.name,
            "device": f"one {torch.cuda.get_device_name(self.device)}" if self.cuda else "CPU cores",
            "steps": step,
            "pictures_shown": step * arguments.pictures,
            "parameters": parameters,
            **{k: getattr(arguments, k) for k in _RECORDED.split()},
            "items_per_skill": arguments.items,
            "end": self.report({"": self.examination, " with usual pairs": self.usual}),
            "log": log,
        }
        record["minutes"] = round(self.elapsed() / 60, 2)
        self.path("json").write_text(json.dumps(record, indent=1) + "\n")
        for process in self.writers:
            process.terminate()
        print(f"{step} steps in {record['minutes']} minutes", flush=True)


if __name__ == "__main__":
    Training(parse()).run()
