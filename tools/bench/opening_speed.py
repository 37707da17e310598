"""From the start of a process to its first token, and the memory it takes: packed models beside dense ones.

    python tools/bench/opening_speed.py [llama-1b:float16 llama-8b:int4 llama-8b:q4_k_m ...] [--draft float16]

Each model has random weights; it is written and built once. Kernels are compiled and files are in the page cache before
the starts that count. One of q4_k_m is a GGUF file, opened as it is: `first_start_seconds` is from the start of a
process that knows nothing of it, digest and engine directory included, to its first token; with compilation of the
kernels it is `compiling_start_seconds`. `host_mib`: the largest sum of a process's own pages, without those of mapped
files. `device_mib`: by how much less memory of the GPU is free at the peak than before, without a context
(`context_mib`). `plan_mib` is what the runtime planned, `account_mib` by how much less was free after each kind of
call, one inside another counting for the outer one, then after opening and after an answer, without a context.
`load_seconds` are those of reading the weights to the device, without the kernels that are compiled or loaded behind
them, at `load_gb_per_s` of their files; `seconds_of` says what the thread that does so did or waited for (`own`), and
what those beside it took in all, in pairs with the seconds of a processor (`threads`); `bounds_gb_per_s` are those of 1
GiB of such a file as the driver copies it, through pinned buffers, and of pinned memory alone. `--starts 0` measures
the rest of it alone.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from shutil import rmtree
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from as_device import parse, python
from neighbour import resting
from opening_seconds import OpeningSeconds, bounds
from provenance import provenance, report
from random_checkpoint import write_in_a_process
from random_gguf import write_random_gguf

from edgellm.engines.model.limits import KV_CACHES
from edgellm.hub.directories import local_directory
from edgellm.kernels.user_paths import user_cache_directory

_CONTEXT_ALONE = (
    "import pycuda.driver as d; d.init(); c = d.Device(0).make_context(); print(flush=True); input(); c.pop()"
)
_SAMPLE_SECONDS = 0.005


class DeviceMemory:
    """The GPU's free memory, as a context of this process sees it."""

    def __init__(self) -> None:
        from pycuda import driver

        driver.init()
        self._driver, self._context = driver, driver.Device(0).retain_primary_context()
        self._context.push()

    def close(self) -> None:
        """Leave it: the driver aborts a process that ends in a context."""
        self._context.pop()

    def free_mib(self) -> float:
        """Now."""
        return self._driver.mem_get_info()[0] / 2**20

    def context_mib(self) -> float:
        """What a context of another process takes that does nothing."""
        before = self.free_mib()
        command = [sys.executable, "-c", _CONTEXT_ALONE]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process.stdout.read(1)
        taken = before - self.free_mib()
        process.communicate(b"\n")
        return taken


def prepared(
    work: Path, shape: str, weights: str, layers: Sequence[str], draft: str | None, kv_cache: str, head: str
) -> Path:
    """The engine directory of a random model, built with a context of 4,096; of so many `layers`, if a number is
    given."""
    name = "-".join((shape, weights, *layers))
    checkpoint, engines = work / name, work / f"{name}-{head}-{draft}-engines"
    head_folder = work / f"{shape}-draft"
    if not (checkpoint / "model.safetensors").exists():
        beside = ["--draft", str(head_folder)] if draft else []
        count = [option for number in layers for option in ("--layers", number)]
        write_in_a_process(checkpoint, "--shapes", shape, "--weights", weights, *count, *beside)
    command = [*python(), "-m", "edgellm", "build", str(checkpoint), str(engines), "--force", "--weights", "link"]
    command += ["--kv-capacity", "4096", "--kv-cache", kv_cache, "--head", head]
    if draft:
        kind = "as-published" if draft == "float16" else draft
        command += ["--draft", str(head_folder), "--draft-weights", kind]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return engines


def opened_gguf(work: Path, shape: str) -> tuple[Path, Path]:
    """A GGUF file, and the engine directory that is made of it in the user's cache."""
    file = work / f"{shape}-q4_k_m.gguf"
    if not file.exists():
        began, unfinished = time.perf_counter(), file.with_suffix(".part")
        write_random_gguf(unfinished, shape).rename(file)
        print(f"{file}: {file.stat().st_size:,} bytes written in {time.perf_counter() - began:.1f} s", flush=True)
    return file, local_directory(file)


def start_anew(opened: Path, engines: Path, device: DeviceMemory, *more: str) -> float:
    """Seconds to the first token after a directory in the cache was removed, all digests, and folders `more`."""
    for folder in (engines, *(user_cache_directory() / name for name in ("digests", *more))):
        rmtree(folder, ignore_errors=True)
    return start(opened, device)["first_token_seconds"]


def start(engines: Path, device: DeviceMemory) -> dict[str, float]:
    """One process that answers: seconds to the first byte of its answer, and its largest memory."""
    command = [*python(), "-m", "edgellm", "generate", "--raw", "hello", "--max-tokens", "64", "--model", str(engines)]
    free, host, least, first = device.free_mib(), 0.0, device.free_mib(), 0.0
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    while process.poll() is None:
        host, least = max(host, own_mib(process.pid)), min(least, device.free_mib())
        if select.select([process.stdout], [], [], _SAMPLE_SECONDS)[0]:
            if not os.read(process.stdout.fileno(), 1 << 16):
                break
            first = first or time.perf_counter() - began
    if process.wait():
        raise SystemExit("edgellm generate failed")
    return {"first_token_seconds": first, "host_mib": host, "device_mib": free - least}


def own_mib(process: int) -> float:
    """Of a process that runs: pages that belong to no file."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:  # it has just ended
        return 0.0
    kib = next((line.split()[1] for line in lines if line.startswith("RssAnon")), "0")
    return int(kib) / 1024


def accounted(engines: Path, device: DeviceMemory, context: float) -> dict[str, Any]:
    """What a process of its own finds with `account`."""
    free = device.free_mib() - context
    command = [*python(), __file__, "--account", str(engines)]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
    taken = {stage: free - left for stage, left in found.pop("free_mib").items()}
    return found | {"account_mib": found["account_mib"] | taken}


def account(engines: Path) -> dict[str, Any]:
    """Of a model that is opened and answers here: its plan, what calls took of the memory, how much was left, and how
    long weights took, and why."""
    from pycuda import driver

    from edgellm.engines.backends.cuda_backend import CudaBackend
    from edgellm.requests import Request
    from edgellm.runtime import SpecDecodeRuntime
    from edgellm.sampling_params import SamplingParams

    spent = OpeningSeconds()
    taken, inside = dict[str, float](), []

    def free() -> float:
        return driver.mem_get_info()[0] / 2**20

    def watch(name: str) -> None:
        function = getattr(CudaBackend, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            if inside:
                return function(*arguments, **named)
            inside.append(name)
            before = free()
            try:
                return function(*arguments, **named)
            finally:
                inside.pop()
                taken[name] = taken.get(name, 0.0) + before - free()

        setattr(CudaBackend, name, watched)

    for name in ("_load", "load_engine", "check_memory", "load_weights", "zeros_side_by_side", "zeros", "empty"):
        watch(name)
    watch("capture")
    with spent.watching(), SpecDecodeRuntime(engines, drafting="auto") as runtime:
        opened, plan = free(), getattr(runtime._runner, "base", runtime._runner).memory_plan
        runtime.handle_request(Request(prompt="hello", params=SamplingParams(max_tokens=64)))
        left = {"opened": opened, "answered": free()}
    seconds = sum(spent.own.values()) - spent.own["kernels"]
    files = {each.resolve() for each in engines.rglob("*") if each.suffix in (".safetensors", ".gguf")}
    return {
        "plan_mib": {name: size / 2**20 for name, size in plan.items.items()} | {"total": plan.total / 2**20},
        "account_mib": taken,
        "free_mib": left,
        "load_seconds": seconds,
        "load_gb_per_s": sum(each.stat().st_size for each in files) / 1e9 / seconds,
        "seconds_of": {"own": spent.own, "threads": spent.others},
        "bounds_gb_per_s": bounds(max(files, key=lambda file: file.stat().st_size)),
    }


def main() -> None:
    """The whole of the tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models", nargs="*", default=["llama-1b:float16", "llama-8b:int4"], help="SHAPE:WEIGHTS[:LAYERS]"
    )
    parser.add_argument("--draft", choices=("float16", "int4"), help="with an EAGLE-3 head of such weights")
    parser.add_argument("--head", default="as-published", help="the head of the packed models")
    parser.add_argument("--kv-cache", choices=KV_CACHES, default="compute")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edgellm-opening")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--account", type=Path, metavar="ENGINES", help="of what `account_mib` is made, alone")
    arguments = parse(parser)
    if arguments.account is not None:
        print(json.dumps(account(arguments.account)))
        return
    arguments.work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("EDGELLM_CACHE_DIR", str(arguments.work / "cache"))  # what is forgotten is nobody's
    device = DeviceMemory()
    results: dict[str, Any] = {**provenance(), "context_mib": device.context_mib()}
    with resting():  # each process that is measured has its own neighbour
        for model in arguments.models:
            shape, weights, *layers = model.split(":")
            head = arguments.head if weights == "int4" else "as-published"
            if weights == "q4_k_m":
                opened, engines = opened_gguf(arguments.work, shape)
            else:
                engines = prepared(arguments.work, shape, weights, layers, arguments.draft, arguments.kv_cache, head)
                opened = engines
            context = results["context_mib"]
            accounts = accounted(engines, device, context)  # which compiles the kernels, too
            if opened != engines:
                accounts["first_start_seconds"] = start_anew(opened, engines, device)
                accounts["compiling_start_seconds"] = start_anew(opened, engines, device, "kernels")
            starts = [start(opened, device) for _ in range(arguments.starts)]
            results[model] = accounts | accounted(engines, device, context)
            if starts:
                results[model] |= {
                    "first_token_seconds": min(each["first_token_seconds"] for each in starts),
                    "host_mib": max(each["host_mib"] for each in starts),
                    "device_mib": max(each["device_mib"] for each in starts) - context,
                }
            print(f"{model}: {json.dumps(results[model])}", flush=True)
    device.close()
    report(results, arguments.output)


if __name__ == "__main__":
    main()
