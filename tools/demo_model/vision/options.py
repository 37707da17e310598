"""Options of the eyes' training."""

import argparse
import json
import multiprocessing
from pathlib import Path

import torch


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the eyes for a number of minutes")
    parser.add_argument("--base", type=Path, required=True, help="the model directory")
    parser.add_argument("--table", type=Path, help="the table's weights, by train_table (default: the words alone)")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--material", type=Path, required=True, help="what prepare.py wrote")
    parser.add_argument("--name", default="eyes", help="name of the files that are written")
    parser.add_argument("--minutes", type=float, default=8.0, help="wall-clock time, preparation included")
    parser.add_argument("--steps", type=int, help="stop after so many steps instead")
    parser.add_argument("--seeing", type=float, default=0.5, help="share of the time before dialogues begin")
    parser.add_argument("--pictures", type=int, default=1024, help="pictures of a step")
    parser.add_argument("--unnamed", type=float, default=0.35, help="share of objects in a colour without a name")
    parser.add_argument("--strange", type=float, default=0.1, help="share of objects of a kind without a name")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--doubled", type=int, default=5, help="one in so many draws is twice as large, and shrunk")
    parser.add_argument("--ahead", type=int, default=4, help="steps whose pictures are drawn at once")
    parser.add_argument(
        "--rows", type=int, default=128, help="dialogues of a step in the second part, a multiple of 64"
    )
    parser.add_argument("--peak", type=float, default=3e-3)
    parser.add_argument("--tail", type=float, default=0.5, help="share of the time in which the rate falls to zero")
    parser.add_argument("--rows-weight", type=float, default=1.0, help="weight of the rows' distance from the table")
    parser.add_argument("--words-weight", type=float, default=2.0, help="weight of the language model's own loss")
    parser.add_argument("--sizes", type=json.loads, default={}, help="sizes other than the shipped ones, as JSON")
    parser.add_argument("--seed", type=int, default=51)
    parser.add_argument("--workers", type=int, default=max(1, multiprocessing.cpu_count() // 2 - 2))
    parser.add_argument("--shards", type=int, default=600, help="shards of dialogues to write")
    parser.add_argument("--groups", type=int, default=8, help="groups of 64 dialogues in a shard")
    parser.add_argument("--probes", type=int, default=1024, help="pictures of which the heads name everything")
    parser.add_argument("--items", type=int, default=40, help="held-out items a skill at the end")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--spare", type=float, default=4.0, help="what scores of held-out pairs are lowered by")
    parser.add_argument("--rank", type=int, default=32, help="of the language model's changes; 0: it stays as it is")
    parser.add_argument("--language-peak", type=float, default=1e-3, help="highest learning rate of these changes")
    parser.add_argument("--plain-weight", type=float, default=8.0, help="weight of text that must stay as it was")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--resume", action="store_true", help="continue from DIR/NAME.safetensors, if there")
    return parser.parse_args()
