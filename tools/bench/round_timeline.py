"""When each kernel of an EAGLE round begins and ends, with the shapes of Llama-3.2-1B: where a round's time goes.

    python tools/bench/round_timeline.py [--work DIRECTORY] [--plan "tree 10/6/60"] [--output TIMELINE.txt]

PyTorch's profiler takes the times. `--as orin` and the like: see `as_device.py`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import neighbour
from as_device import parse
from random_model import random_runner
from round_bench import RoundBench, plans_of, prepare
from simulated_acceptance import schedule

ROUNDS = 4


def main() -> None:
    """Write one line a kernel of the last of some rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edgellm-eagle-bench")
    parser.add_argument("--plan", default="tree 10/6/60")
    parser.add_argument("--output", type=Path)
    arguments = parse(parser)
    from torch.profiler import ProfilerActivity, profile

    _, directory = prepare(arguments.work)
    plan = next(plan for plan in plans_of(directory) if plan.name == arguments.plan)
    with random_runner(directory) as runner:
        bench = RoundBench(runner)
        lengths = schedule(4.24, plan.steps)
        bench.fill(lengths)
        launch = bench.graph(plan)
        bench.fill(lengths)
        runner.round(1, plan).wait()
        with profile(activities=[ProfilerActivity.CUDA]) as record:
            for _ in range(ROUNDS):
                launch()
            runner.backend.synchronize()
    events = [event for event in record.events() if event.device_type.name == "CUDA"]
    events = [event for event in events if neighbour.KERNEL not in event.name]
    events.sort(key=lambda event: event.time_range.start)
    one = events[-(len(events) // ROUNDS) :]
    first, last_end = one[0].time_range.start, one[0].time_range.start
    lines = [f"{len(one)} kernels in {one[-1].time_range.end - first:.1f} us", "   begin    span  idle before"]
    for event in one:
        begin, end = event.time_range.start, event.time_range.end
        lines.append(f"{begin - first:8.1f} {end - begin:7.1f} {begin - last_end:7.1f}  {event.name}")
        last_end = max(last_end, end)
    text = "\n".join(lines) + "\n"
    if arguments.output:
        arguments.output.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
