"""Questions about what a camera sees now, each answered by its newest frame, and never by one from before.

Run it: python tools/examples/camera_loop.py [SOURCE] [--model ENGINE_DIR] [--seconds N]
SOURCE is what edgellm.Camera takes: a camera's number, a video, a pipeline; without one, sample scenes are shown.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path

from edgellm import LLM, SHIPPED_MODEL, Camera

QUESTIONS = ("What is on the table?", "How many objects are there?", "What is at the front left?")


def main() -> None:
    """Show answers as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", help="default: the shipped model's scenes, one after the other")
    parser.add_argument("--model", type=Path, help="default: the shipped model")
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    scenes = itertools.cycle(sorted((SHIPPED_MODEL / "scenes").glob("*.png")))
    source = scenes if options.source is None else int(options.source) if options.source.isdigit() else options.source
    end = time.perf_counter() + options.seconds
    with LLM(options.model) as llm, Camera(source, rate=30.0) as camera:
        watch = llm.watch(camera, QUESTIONS[0], every=0.5)
        for answer, question in zip(watch, itertools.cycle(QUESTIONS[1:] + QUESTIONS[:1]), strict=False):
            print(f"frame {answer.frame.number}, {answer.age:.2f} s old: {answer.question} {answer.text.strip()}")
            if time.perf_counter() > end:
                break
            watch.question = question
        print(*watch.notes, f"{camera.frames} frames came", sep="\n")


if __name__ == "__main__":
    main()
