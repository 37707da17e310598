"""Verify steps of more than 64 tokens, of several sequences: steps of hand-written kernels, one behind the other.

Each pass streams all weights, so TensorRT is faster from two passes on. But with its roundings drafts of large trees in
batches were accepted otherwise than plain decoding would have drawn (on an H200 in fp16 in one of seven answers of 128
tokens, each where two tokens were as good as equal): what is emitted must not depend on how it was verified.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from edgellm.engines.backends.cuda_decode_engine import CudaDecodeEngine, edge_of_decoder, unneeded_at_edge
from edgellm.engines.backends.cuda_device import CudaDevice
from edgellm.engines.backends.cuda_kernel_engine import CudaKernelEngine, edge_of_layers, rows
from edgellm.engines.backends.cuda_tiled_engine import CudaTiledEngine
from edgellm.engines.model.config import DecoderConfig, EngineShape
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode_kernels import CudaDecodeKernels, Launch
from edgellm.kernels.tiled_decode_kernels import MAX_TILED_ROWS

#: Up to so many tokens the engine that norms while it multiplies is the faster one (`kernel_speed.py steps`, H200).
_FEW_ROWS = 12


class CudaVerifyPasses(CudaKernelEngine):
    """One verify step of `shape.batch` sequences by `shape.tokens` tokens each."""

    reads_attention_mask = True

    def __init__(self, kernels: CudaDecodeKernels, config: DecoderConfig, shape: EngineShape, dtype: str) -> None:
        self._check_supported(kernels, config, shape, dtype)
        self._passes = [
            (slots, decoder_engine_kind(config, part, dtype, kernels.shared_limit)(kernels, config, part, dtype))
            for slots, part in _passes(shape)
        ]
        edge = edge_of_decoder(config, shape, dtype)
        super().__init__(kernels, config, shape, edge, {}, unneeded_at_edge(config, shape))
        self.scratch_bytes = max(engine.scratch_bytes for _, engine in self._passes)
        self._of_slots = {*edge_of_layers(config, shape, dtype), "logits", "hidden_states"}

    @staticmethod
    def unsupported(
        config: DecoderConfig, shape: EngineShape, dtype: str, shared_limit: int | None = None
    ) -> str | None:
        """See `CudaKernelEngine.unsupported`."""
        if shape.phase != "verify" or not 2 <= shape.tokens <= MAX_TILED_ROWS < rows(shape):
            return (
                f"passes of decode kernels verify trees of 2 to {MAX_TILED_ROWS} tokens with more than "
                f"{MAX_TILED_ROWS} of all sequences, not {shape.tokens} tokens of {shape.batch} sequences in "
                f"{shape.phase}"
            )
        for _, part in _passes(shape):
            kind = decoder_engine_kind(config, part, dtype, shared_limit)
            reason = kind.unsupported(config, part, dtype, shared_limit)
            if reason is not None:
                return reason
        return None

    def attach(self, device: CudaDevice, scratch: DeviceArray) -> None:
        """See `CudaKernelEngine.attach`; the passes share the scratch."""
        super().attach(device, scratch)
        for _, engine in self._passes:
            engine.attach(device, scratch)

    def _prepare(self) -> list[Launch]:
        launches: list[Launch] = []
        for slots, engine in self._passes:
            engine.bind(
                {name: array[slots] if name in self._of_slots else array for name, array in self._bound.items()}
            )
            launches += engine._prepare()
        return launches


def decoder_engine_kind(
    config: DecoderConfig, shape: EngineShape, dtype: str, shared_limit: int | None = None
) -> type[CudaDecodeEngine] | type[CudaVerifyPasses]:
    """The fastest engine of a base model's layers for a shape; where none supports it, one whose reason tells why."""
    if shape.phase == "prefill":
        return CudaDecodeEngine
    if rows(shape) > MAX_TILED_ROWS:
        return CudaVerifyPasses
    kinds = (CudaDecodeEngine, CudaTiledEngine) if rows(shape) <= _FEW_ROWS else (CudaTiledEngine, CudaDecodeEngine)
    supporting = (kind for kind in kinds if kind.unsupported(config, shape, dtype, shared_limit) is None)
    return next(supporting, CudaTiledEngine)


def _passes(shape: EngineShape) -> list[tuple[slice, EngineShape]]:
    """The slots of each pass, as even as they can be, and its shape."""
    count = -(-shape.batch // (MAX_TILED_ROWS // shape.tokens))
    ends = [shape.batch * number // count for number in range(count + 1)]
    return [(slice(start, end), replace(shape, batch=end - start)) for start, end in pairwise(ends)]
