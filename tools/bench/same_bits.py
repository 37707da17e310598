"""Whether kernels give the same bits as on other devices: digests of a run, compared with those of runs before.

    python -m tools.bench.same_bits FOLDER                 # of the GPU as it is
    python -m tools.bench.same_bits FOLDER --as orin       # the same as on a device
    python -m tools.bench.same_bits FOLDER --compare       # only compares what is there

Decode, verify, prefill of 16 and 200 tokens, and a draft's accept and propose, with random weights of several widths,
heads and dtypes: logits, hidden states and the KV rows that are written. Then answers of the shipped model, plain and
drafted, greedy and drawn. A step that the device sends to TensorRT is named and not compared. Each run writes
FOLDER/NAME.json. Exits with 1 where bits differ. Needs pycuda and a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from edgellm import LLM
from edgellm.drafting.config import DraftingConfig
from edgellm.engines.backends.cuda_device import CudaDevice, host_dtype
from edgellm.engines.backends.executors import planned_shapes
from edgellm.engines.backends.kernel_engine import KernelEngine
from edgellm.engines.backends.steps.launching import StepKernels
from edgellm.engines.backends.steps.table import kernel_choice
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.families.programs import ModelConfig, model_program
from edgellm.engines.model.config import DecoderConfig, DraftConfig
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.program import Program
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.bfloat16 import store_rounded
from edgellm.kernels.decode.linear import CudaDecodeKernels
from edgellm.kernels.decode.tiled_linear import CudaTiledKernels, capacity_of
from edgellm.kernels.launch import KernelModule
from edgellm.kernels.prefill.launcher import CudaPrefill
from edgellm.kernels.prefill.linear import CudaPromptLinear
from edgellm.opened_model import SHIPPED_MODEL
from tools.bench.as_device import measured_as, parse
from tools.bench.differences import SAMPLINGS, parameters
from tools.bench.drafting_equality import held_out_prompts
from tools.bench.provenance import provenance

ON_TENSORRT = "TensorRT: "
#: Hidden size, inner size, heads, KV heads and head size of models with few layers, and what else they have.
MODELS: dict[str, tuple[tuple[int, int, int, int, int], dict[str, bool]]] = {
    "0.5B": ((896, 4864, 14, 2, 64), {"attention_bias": True}),
    "1B": ((2048, 8192, 32, 8, 64), {}),
    "1.7B": ((2048, 6144, 16, 8, 128), {"qk_norm": True}),
    "8B": ((4096, 14336, 32, 8, 128), {}),
    "heads of 256": ((1152, 6912, 4, 1, 256), {"qk_norm": True}),
}
DTYPES = ("float16", "bfloat16")
LAYERS, VOCABULARY, DRAFT_VOCABULARY = 4, 4099, 1021
#: Rows of the caches, and those that are there when a step begins.
KV_ROWS, START = 1088, 530
LIMITS = EngineLimits(1, 128, 1024, draft_top_k=10, draft_steps=6, verify_tree_size=60)
DRAFTINGS = {
    "plain": None,
    "chain 5": DraftingConfig(kind="chain", draft_steps=5),
    "tree 10/4/16": DraftingConfig(10, 4, 16),
    "tree 10/6/60": DraftingConfig(10, 6, 60),
}


def models(name: str) -> dict[str, ModelConfig]:
    """The base of this name, and a head for it."""
    (hidden, inner, heads, kv_heads, size), others = MODELS[name]

    def decoder(layers: int, **others: Any) -> DecoderConfig:
        shape = VOCABULARY, hidden, inner, layers, heads, kv_heads, size
        return DecoderConfig("llama", *shape, 131072, 1e-5, 5e5, size, "float16", True, **others)

    table = "model.embed_tokens.weight"
    features = tuple(range(LAYERS - 1))
    draft = DraftConfig(
        *("3", decoder(1), DRAFT_VOCABULARY, False, features, "none", "midlayer."),
        *(False, True, table, table, False, False, False),
    )
    return {"base": decoder(LAYERS, feature_layers=features, **others), "draft": draft}


def shapes() -> list[EngineShape]:
    """The steps of rounds, of plain decoding and of short prompts."""
    found = [EngineShape("decode", batch, 1, KV_ROWS, KV_ROWS) for batch in (1, 4)]
    found += [EngineShape("verify", 1, tokens, KV_ROWS, KV_ROWS, tokens) for tokens in (8, 16, 32, 60, 64)]
    prefills = product(("base", "draft"), (16, 200))
    found += [EngineShape("prefill", 1, tokens, KV_ROWS, KV_ROWS, model=model) for model, tokens in prefills]
    found.append(EngineShape("accept", 1, 7, KV_ROWS, KV_ROWS, 1, "draft"))
    return found + [EngineShape("propose", 1, width, KV_ROWS, KV_ROWS, width, "draft") for width in (1, 10)]


def step_digests(device: CudaDevice) -> Iterator[tuple[str, str]]:
    """The name and the digest of every step, or what sends it to TensorRT."""
    module, found = KernelModule(device.gpu, device.stream), dict[str, Callable[[], str]]()
    with module.side_by_side():  # all kernels are compiled at once
        for dtype in DTYPES:
            tiled, gpu = CudaTiledKernels(module, dtype), capacity_of(module)
            prompts = {"any_rows": CudaPromptLinear(module, dtype), "prefill": CudaPrefill(module)}
            for name, (sizes, _) in MODELS.items():
                few = CudaDecodeKernels(module, dtype, sizes[-1])
                steps = Steps(device, StepKernels(few, tiled, gpu, **prompts), dtype)
                for shape in shapes():
                    found[f"{name} {dtype} {shape.name}"] = steps.prepared(models(name)[shape.model], shape)
    for name, digest in found.items():
        yield name, digest()
    module.close()


class Steps:
    """Steps of a base and its draft in one dtype, whose weights are made once."""

    def __init__(self, device: CudaDevice, kernels: StepKernels, dtype: str) -> None:
        self._device, self._kernels, self._dtype = device, kernels, dtype
        self._weights: dict[str, DeviceArray] = {}

    def prepared(self, config: ModelConfig, shape: EngineShape) -> Callable[[], str]:
        """Gives the digest of what a step gives out and of its caches, or what sends it to TensorRT."""
        device, dtype, limit = self._device, self._dtype, self._device.gpu.shared_limit
        choice, reason = kernel_choice(config, shape, dtype, limit)
        if choice is None:
            return lambda: ON_TENSORRT + reason
        engine = KernelEngine(self._kernels, choice, config, shape, dtype)
        scratch = device.zeros((engine.scratch_bytes,), "uint8")
        engine.attach(device, scratch)
        program = model_program(config, shape)
        written = {f"present_{name}": name for name in program.states}
        arrays = {name: self._array(name, program, *kind) for name, kind in program.edge.items() if name not in written}
        engine.bind(arrays | {present: arrays[name] for present, name in written.items()})
        engine.prepare()

        def digest() -> str:
            engine.attach(device, scratch)  # launches that were made while kernels were compiled are made again
            engine.enqueue()
            found = hashlib.sha256()
            for name in (*program.outputs, *program.states):
                values = device.download(arrays[name])
                if name == "logits" and not np.isfinite(values).all():
                    raise SystemExit(f"{shape.name} gave logits that are not finite, whose bits say nothing")
                found.update(values.tobytes())
            return found.hexdigest()

        return digest

    def _array(self, name: str, program: Program, size: tuple[int, ...], kind: str) -> DeviceArray:
        """Memory for a tensor, with its values where the step reads them."""
        if name in self._weights:
            return self._weights[name]
        array = self._device.empty(size, self._dtype if kind == "compute" else kind)
        if name not in program.outputs:
            self._device.upload(array, _values(name, program, size, array.dtype))
        if name in program.weights:
            self._weights[name] = array
        return array


def _values(name: str, program: Program, size: tuple[int, ...], dtype: str) -> np.ndarray:
    """The same in every run: rows and masks as a step has them, all else random by its name."""
    shape, seed = program.shape, zlib.crc32(name.encode())
    if name == "kvcache_start_index":
        return np.full(size, START, np.int32)
    if name == "last_token_ids":
        return np.full(size, shape.tokens - 1, np.int32)
    if name == "attention_mask":
        return np.broadcast_to(_mask(shape, np.random.default_rng(seed)), size)
    if name in program.weights:
        mean, deviation = (1.0, 0.5) if len(size) == 1 else (0.0, 0.02)
    else:
        mean, deviation = 0.0, 0.5
    block = _drawn(mean, deviation, dtype)
    return np.resize(np.roll(block, -(seed % block.size)), size)


@cache
def _drawn(mean: float, deviation: float, dtype: str) -> np.ndarray:
    """Random values, of which each tensor has its own cut."""
    found = np.empty(1 << 22, host_dtype(dtype))
    store_rounded(mean + deviation * np.random.default_rng(0).standard_normal(found.size, np.float32), found)
    return found


def _mask(shape: EngineShape, random: np.random.Generator) -> np.ndarray:
    """[T, rows]: what was there before, and of the new rows those before it, or in verified trees its ancestors."""
    mask = np.zeros((shape.tokens, shape.key_range), bool)
    mask[:, :START] = True
    for row in range(shape.tokens):
        parent = row - 1 if shape.phase != "verify" else int(random.integers(0, max(1, row)))
        if row:
            mask[row, START:] = mask[parent, START:]
        mask[row, START + row] = True
    return mask


def answer_digests(prompts: int, tokens: int) -> Iterator[tuple[str, str]]:
    """The answers of the shipped model to so many prompts, by what drafts and how tokens are drawn."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "engines"
        build_engine_directory(SHIPPED_MODEL, path, LIMITS, [], draft=SHIPPED_MODEL / "draft")
        directory = EngineDirectory.open(path)
        asked = held_out_prompts(directory, prompts)
        for name, drafting in DRAFTINGS.items():
            with LLM(path, backend="tensorrt", drafting=drafting) as llm:
                for sampling in SAMPLINGS:
                    params = parameters(sampling, tokens)
                    answers = [llm.generate(prompt, params).token_ids for prompt in asked]
                    yield f"answers {name} {sampling}", hashlib.sha256(json.dumps(answers).encode()).hexdigest()


def answers_on_tensorrt(capability: str) -> list[str]:
    """The engines of the shipped model that this device sends to TensorRT, images aside."""
    directory = EngineDirectory.read(SHIPPED_MODEL)
    return [shape.name for shape in planned_shapes(directory.models, LIMITS, directory.dtype, capability)]


def compare(folder: Path) -> bool:
    """Print what differs among the runs in a folder; whether nothing does."""
    runs = {path.stem: json.loads(path.read_text())["digests"] for path in sorted(folder.glob("*.json"))}
    names = dict.fromkeys(name for run in runs.values() for name in run)
    same, different, alone = 0, [], []
    for name in names:
        found = {run: digests[name] for run, digests in runs.items() if name in digests}
        elsewhere = {run: value for run, value in found.items() if value.startswith(ON_TENSORRT)}
        alone += [f"{name} as {run}: {value}" for run, value in elsewhere.items()]
        compared = {run: value for run, value in found.items() if run not in elsewhere}
        if len(set(compared.values())) > 1:
            different.append(f"{name}: " + ", ".join(f"{run} {value[:12]}" for run, value in compared.items()))
        same += len(compared) > 1 and len(set(compared.values())) == 1
    for line in alone:
        print(f"not compared: {line}")
    for line in different:
        print(f"DIFFERENT {line}")
    print(f"{', '.join(runs)}: {same} of {len(names)} the same, {len(different)} differ, {len(alone)} on TensorRT")
    return not different


def main() -> None:
    """Run, write, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--compare", action="store_true", help="run nothing")
    parser.add_argument("--prompts", type=int, default=6, help="of the shipped model; 0: steps alone")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    arguments = parse(parser, times=False)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if not arguments.compare:
        device = CudaDevice()
        try:
            digests = dict(step_digests(device))
        finally:
            device.close()
        if arguments.prompts:
            elsewhere = answers_on_tensorrt(device.gpu.compute_capability)
            found = dict(answer_digests(arguments.prompts, arguments.tokens))
            if elsewhere:
                found = dict.fromkeys(found, ON_TENSORRT + ", ".join(elsewhere))
            digests |= found
        result = provenance() | {"digests": digests}
        (arguments.folder / f"{measured_as() or 'whole'}.json").write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(not compare(arguments.folder))


if __name__ == "__main__":
    main()
