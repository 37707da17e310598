"""Trains an EAGLE-3 head for a language model on answers that the model gives itself, in SpecForge's layout.

Usage: python -m tools.heads.train_eagle3 BASE TO --prompts FILE.jsonl.xz --held-out FILE ... --work DIR
       [--answer-minutes 4] [--train-minutes 4] [--draft-vocabulary 8192] [--inner COLUMNS] [--answers FILE]
       [--processes 3 --engines 4 --gpus 0 1] [--minutes 7]

BASE is a checkpoint as published (config.json, tokenizer, safetensors) or a GGUF file, TO the folder of the head:
`edgellm build BASE DIR --draft TO`. Prompts are those of `tools.heads.prompts`; what is held out (JSON lines with
`turns` or `prompt`) is never asked, not by the model itself either. Answers are made by this runtime, on a GPU if any,
in processes of their own, each with some engines side by side: a step of a small model leaves most of a GPU free.
Training takes PyTorch and transformers; with `--minutes` it lasts as long as the answers leave of these. All of it is
recorded in TO/training.json: the command, times, the log, digests.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from tools.bench.provenance import provenance
from tools.bench.published_quality import as_checkpoint
from tools.heads.answers import Share, answer_side_by_side, build_engines, read_documents
from tools.heads.prompts import held_out_runs, read_lines, turns_of
from tools.heads.settings import Asking, Course

#: Options that are fields of `Asking` or `Course`, of the same names and defaults.
_OPTIONS = {
    "--answer-minutes": "at most so long",
    "--answer-count": "at most so many answers",
    "--answer-tokens": "of an answer, at most",
    "--prompt-tokens": "longer prompts are left out",
    "--own-prompts": "share of prompts that the model writes",
    "--greedy": "share of answers that are not drawn",
    "--temperature": "of the others",
    "--train-minutes": "so long",
    "--optimizer-steps": "so many, in place of minutes",
    "--batch-tokens": "of a batch, padding included",
    "--steps": "tokens that a chain guesses ahead",
    "--decay": "weight of a step relative to the one before",
    "--peak": "highest learning rate",
    "--seed": "of answers, and of the training",
}


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", type=Path)
    parser.add_argument("to", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="folder for the base's files, answers and weights")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--held-out", type=Path, nargs="*", default=[])
    parser.add_argument("--answers", type=Path, help="take the answers of this file, and ask nothing")
    parser.add_argument("--backend", default="auto", help="of the answers")
    parser.add_argument("--processes", type=int, default=1, help="that answer side by side")
    parser.add_argument("--engines", type=int, default=1, help="of each of these processes")
    parser.add_argument("--gpus", nargs="+", help="of the processes in turn, as CUDA_VISIBLE_DEVICES names them")
    parser.add_argument("--minutes", type=float, default=0.0, help="of all: training has what answers leave, if more")
    parser.add_argument("--draft-vocabulary", type=int, default=8192)
    parser.add_argument("--inner", type=int, help="inner columns of the head [default: four times its width]")
    defaults = {**asdict(Asking()), **asdict(Course())}
    for name, text in _OPTIONS.items():
        default = defaults[name[2:].replace("-", "_")]
        parser.add_argument(name, type=type(default), default=default, help=f"{text} [%(default)s]")
    arguments = parser.parse_args(given)
    if (arguments.prompts is None) == (arguments.answers is None):
        parser.error("expected either --prompts or --answers")
    return arguments


def chosen(kind: Any, arguments: argparse.Namespace) -> Any:
    """An `Asking` or `Course` of the command line."""
    return kind(**{each.name: getattr(arguments, each.name) for each in fields(kind)})


def make_answers(arguments: argparse.Namespace, base: Path) -> Path:
    """Answer the prompts in processes of their own, which leave the GPU's memory to the training."""
    count, asking = arguments.processes * arguments.engines, chosen(Asking, arguments)
    asking = replace(asking, answer_count=-(-asking.answer_count // count))
    texts = [turns_of(line)[0] for line in read_lines(arguments.prompts)]
    held_out, engines = held_out_runs(arguments.held_out), arguments.work / "engines"
    build_engines(base, engines, asking)
    parts = [arguments.work / f"answers-{number}.jsonl" for number in range(count)]
    shares = []
    for number, part in enumerate(parts):
        part.unlink(missing_ok=True)
        shares.append(Share(texts[number::count], replace(asking, seed=asking.seed + number), part))
    context, processes = multiprocessing.get_context("spawn"), []
    for number in range(arguments.processes):
        gpu = arguments.gpus[number % len(arguments.gpus)] if arguments.gpus else None
        given = (engines, arguments.backend, gpu, held_out, shares[number :: arguments.processes])
        processes.append(context.Process(target=answer_side_by_side, args=given))
        processes[-1].start()
    for process in processes:
        process.join()
    whole = [part for part in parts if part.exists()]
    print(f"{len(whole)} of {count} engines answered", flush=True)  # one that failed has said why
    answers, written = arguments.work / "answers.jsonl", "".join(part.read_text(encoding="utf-8") for part in whole)
    if not written:
        raise SystemExit("there are no answers: every engine failed, or had no time for one")
    answers.write_text(written, encoding="utf-8")
    return answers


def main(given: Sequence[str] | None = None) -> None:
    """Answers, training, export; prints what each takes."""
    arguments, began = parse(given), time.perf_counter()
    arguments.work.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {**provenance(), "base_sha256": _sha256(arguments.base)}
    base = arguments.base
    if base.is_file():
        base = arguments.work / "base"
        shutil.rmtree(base, ignore_errors=True)
        as_checkpoint(arguments.base, base, False)
    from tools.heads.training import check_base, train_head  # loads PyTorch, which the processes that answer need not

    check_base(base)
    answers = arguments.answers or make_answers(arguments, base)
    answered = time.perf_counter()
    course, sizes = chosen(Course, arguments), (arguments.draft_vocabulary, arguments.inner)
    left = arguments.minutes - (answered - began) / 60
    course = replace(course, train_minutes=max(course.train_minutes, left))
    record |= {
        "asking": asdict(chosen(Asking, arguments)),
        "course": asdict(course),
        "answers_sha256": _sha256(answers),
    }
    record |= train_head(base, read_documents(answers), sizes, course, arguments.to)
    record["sha256"] = _sha256(arguments.to / "model.safetensors")
    ended = time.perf_counter()
    record["seconds"] = {"answers": round(answered - began, 1), "head": round(ended - answered, 1)}
    (arguments.to / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"held-out hits {record['held_out_hits']}; {record['sha256']}; seconds {record['seconds']}", flush=True)


def _sha256(path: Path) -> str:
    """The digest of a file; of a folder that of its safetensors, in order."""
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
