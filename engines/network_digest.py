"""The digest of a network: equal for equal networks, whatever the weights, the GPU and TensorRT's release."""

from __future__ import annotations

import hashlib
from typing import Any

from edgellm.engines.model.config import EngineShape
from edgellm.engines.model.descriptions import ModelConfig, model_description
from edgellm.engines.model.operations import Operations
from edgellm.engines.backends.tensorrt_operations import NETWORK_VERSION


def network_digest(config: ModelConfig, shape: EngineShape, dtype: str, attention: str) -> str:
    """SHA-256, 64 hexadecimal digits, of all that a plan is built from.

    These are the operations that the model's description calls, with their arguments, the compute dtype, the attention
    setting and the version of the code that emits layers for the operations.
    """
    trace = _trace_class()(f"{NETWORK_VERSION} {dtype} {attention}")
    model_description(trace, config, shape).describe()
    return trace.digest.hexdigest()


def _trace_class() -> Any:
    """An interpreter that hashes calls. Tensors are numbers, in the order in which they come to be.

    Its methods are made from the abstract ones, so that an operation added later is hashed too.
    """

    def __init__(self: Any, heading: str) -> None:
        self.digest = hashlib.sha256(heading.encode())
        self.tensors = 0

    def traced(name: str) -> Any:
        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            self.digest.update(f"\n{name} {_plain(arguments)} {_plain(sorted(named.items()))}".encode())
            count = len(named.get("sizes", arguments[1] if len(arguments) > 1 else ())) if name == "split" else 1
            results = list(range(self.tensors, self.tensors + count))
            self.tensors += count
            return results if name == "split" else results[0]

        return call

    methods = {name: traced(name) for name in Operations.__abstractmethods__}
    return type("NetworkTrace", (Operations,), {"__init__": __init__, **methods})


def _plain(value: Any) -> Any:
    """Lists for tuples, so that a description may use either."""
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
