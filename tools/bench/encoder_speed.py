"""How long published vision encoders take by kernels, and by which, beside TensorRT.

    python tools/bench/encoder_speed.py OUTPUT.json [--models NAME ..] [--dtype float16] [--without-tensorrt]

Milliseconds of one image with random weights, all rows of the engine filled, medians of CUDA events: the whole, then
the launches of each kernel alone, one behind the other. `--without-tensorrt` builds no plans.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from provenance import provenance

from edgellm.device.limits import gpu_milliseconds
from edgellm.engines.backends.cuda_device import CudaDevice
from edgellm.engines.backends.encoder_engine import EncoderEngine, EncoderStepKernels
from edgellm.engines.backends.platform import load_tensorrt
from edgellm.engines.backends.tensorrt_engine import TensorRTEngine
from edgellm.engines.backends.tensorrt_operations import attention_kind, build_plan
from edgellm.engines.families.programs import model_program
from edgellm.engines.model.limits import EngineShape, vision_shape
from edgellm.engines.model.vision import VisionConfig
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.encoder.launcher import CudaEncoder
from edgellm.kernels.launch import KernelModule
from edgellm.kernels.prefill.linear import CudaPromptLinear

_SHARED: dict[str, Any] = {
    "dtype": "float16",
    "in_channels": 3,
    "image_token_id": 5,
    "tensor_prefix": "tower.",
    "projector_prefix": "projector.",
}
_QWEN = dict(_SHARED, temporal_patch_size=2, spatial_merge_size=2, norm_eps=1e-6, num_heads=16)
_SQUARE = dict(_SHARED, temporal_patch_size=1, num_heads=16, patch_size=14)
#: An encoder, and the rows of its engine: 577 of CLIP's, 4,096 of Gemma 3's, those of 1,024 tokens of Qwen's.
MODELS: dict[str, tuple[VisionConfig, int]] = {
    "CLIP-L/336 (LLaVA 1.5)": (
        VisionConfig(
            "llava", hidden_size=1024, intermediate_size=4096, num_layers=24, out_hidden_size=4096, norm_eps=1e-5,
            activation="quick_gelu", image_size=336, class_token=True, feature_layers=(23,), drops_first_row=True,
            spatial_merge_size=1, **_SQUARE,
        ),
        576,
    ),
    "SigLIP (Gemma 3 4B)": (
        VisionConfig(
            "gemma3", hidden_size=1152, intermediate_size=4304, num_layers=27, out_hidden_size=2560, norm_eps=1e-6,
            activation="gelu_tanh", image_size=896, feature_layers=(27,), spatial_merge_size=4, **_SQUARE,
        ),
        4096,
    ),
    "Qwen2.5-VL 3B": (
        VisionConfig(
            "qwen2_5_vl", hidden_size=1280, intermediate_size=3420, num_layers=32, out_hidden_size=2048,
            activation="silu", window_size=112, full_attention_layers=(7, 15, 23, 31), patch_size=14, **_QWEN,
        ),
        5184,  # one megapixel in patches of 14
    ),
    "Qwen3-VL 2B": (
        VisionConfig(
            "qwen3_vl", hidden_size=1024, intermediate_size=4096, num_layers=24, out_hidden_size=2048, patch_size=16,
            activation="gelu_tanh", num_position_embeddings=2304, deepstack_layers=(5, 11, 17), **_QWEN,
        ),
        1200,  # a frame of 640 x 480 pixels
    ),
    "Qwen3-VL 8B": (
        VisionConfig(
            "qwen3_vl", hidden_size=1152, intermediate_size=4304, num_layers=27, out_hidden_size=4096, patch_size=16,
            activation="gelu_tanh", num_position_embeddings=2304, deepstack_layers=(8, 16, 24), **_QWEN,
        ),
        4096,
    ),
}  # fmt: skip
_REPEATS = 5


class Bench:
    """Memory and kernels."""

    def __init__(self, dtype: str) -> None:
        self.device, self.dtype = CudaDevice(), dtype
        module = KernelModule(self.device.gpu, self.device.stream)
        self.kernels = EncoderStepKernels(CudaEncoder(module), CudaPromptLinear(module, dtype))
        self._noise = (np.random.default_rng(0).standard_normal(1 << 20) * 0.02).astype(np.float16)

    def array(self, shape: Sequence[int], kind: str) -> DeviceArray:
        """Small random values; of masks ones, of rows their own numbers."""
        dtype = self.dtype if kind == "compute" else kind
        count = int(np.prod(shape))
        if kind in ("bool", "int32"):
            values = np.ones(count, np.bool_) if kind == "bool" else np.arange(count, dtype=np.int32)
        else:
            values = np.resize(self._noise, count)
            values = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else (
                values.astype(dtype)
            )  # fmt: skip
        array = self.device.empty(tuple(shape), dtype)
        self.device.upload(array, values.reshape(tuple(shape)))
        return array

    def milliseconds(self, step: Any) -> float:
        """Of one step."""
        step()
        return round(gpu_milliseconds(self.device.stream, step, _REPEATS), 4)

    def by_kernels(self, config: VisionConfig, shape: EngineShape) -> dict[str, Any]:
        """The whole, the kernels of each kind, and memory."""
        engine = EncoderEngine(self.kernels, config, shape, self.dtype)
        scratch = self.device.empty((engine.scratch_bytes,), "uint8")
        engine.attach(self.device, scratch)
        engine.bind({name: self.array(size, kind) for name, (size, kind) in engine.tensors.items()})
        engine.enqueue()
        kinds = defaultdict(list)
        for call, launch in zip(engine._calls, engine._launches, strict=True):
            kinds[call.kernel].append(launch)

        def each(launches: list[Any]) -> None:
            for launch in launches:
                launch()

        captured = self.device.capture(engine.enqueue, "the encoder")
        found: dict[str, Any] = {"whole": self.milliseconds(captured)}
        for kernel, launches in kinds.items():
            found[kernel] = self.milliseconds(lambda launches=launches: each(launches))
        return found | {"scratch MiB": round(engine.scratch_bytes / 2**20, 1), "launches": len(engine._launches)}

    def by_tensorrt(self, config: VisionConfig, shape: EngineShape) -> dict[str, Any]:
        """The whole, and memory."""
        library, capability = load_tensorrt(), self.device.gpu.compute_capability
        plan = build_plan(config, shape, self.dtype, attention_kind("auto", capability), capability)
        runtime = library.module.Runtime(library.module.Logger())
        cache: Any = SimpleNamespace(attach=lambda configuration: None)
        engine = TensorRTEngine(library, runtime, plan, shape, cache)
        scratch = self.device.empty((engine.scratch_bytes,), "uint8")
        engine.attach(self.device, scratch)
        edge = model_program(config, shape).edge
        engine.bind({name: self.array(*edge[name]) for name in engine.tensors})
        return {"whole": self.milliseconds(engine.enqueue), "scratch MiB": round(engine.scratch_bytes / 2**20, 1)}


def main() -> None:
    """Time each model and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--without-tensorrt", action="store_true")
    options = parser.parse_args()
    bench, results = Bench(options.dtype), dict[str, Any]()
    for name in options.models:
        config, rows = MODELS[name]
        shape = vision_shape(rows)
        results[name] = {"kernels": bench.by_kernels(config, shape)}
        if not options.without_tensorrt:
            results[name]["TensorRT"] = bench.by_tensorrt(config, shape)
        print(name, json.dumps(results[name], indent=1), flush=True)
        options.output.write_text(json.dumps({"provenance": provenance(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
