"""The vision part of a checkpoint: its configuration, and its tensors checked whole.

Importing this module tells `edgellm.engines` how vision encoders are read and described.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.model.descriptions import VisionDescriber, register_vision
from edgellm.engines.errors import CheckpointError
from edgellm.engines.model.vision import VisionConfig
from edgellm.engines.families.vision_encoders import unused_tensors
from edgellm.engines.families.vision_config import read_vision_config
from edgellm.multimodal.vision_encoder import host_weights, vision_description, vision_weights

#: What may begin the names of tensors, the newest layout first; longer beginnings before those that they begin with.
_QWEN_PREFIXES = ("model.visual.", "visual.")
_TOWER_PREFIXES = (
    "model.vision_tower.vision_model.",
    "model.vision_tower.",
    "vision_tower.vision_model.",
    "vision_tower.",
)
_PROJECTOR_PREFIXES = ("model.multi_modal_projector.", "multi_modal_projector.")


def read_vision(checkpoint: Checkpoint) -> VisionConfig | None:
    """The vision encoder of a checkpoint, its tensors checked; None for a text-only model.

    Raises UnsupportedModelError and CheckpointError as `read_vision_config` does, and CheckpointError that lists every
    missing, unknown and mis-shaped tensor.
    """
    config = read_vision_config(checkpoint.config, checkpoint.dtype)
    if config is None:
        return None
    names = checkpoint.tensors
    if config.family == "llava":
        tower, projector = _first(_TOWER_PREFIXES, names), _first(_PROJECTOR_PREFIXES, names)
    else:
        tower = projector = _first(_QWEN_PREFIXES, names)
    config = replace(config, tensor_prefix=tower, projector_prefix=projector)
    unread = unused_tensors(config) if config.family == "llava" else ()
    problems = checkpoint.problems([*vision_weights(config), *host_weights(config)], vision=True, unread=unread)
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise CheckpointError(
            f"{checkpoint.path}: the weights of the vision encoder do not fit config.json ({len(problems)} "
            f"differences):\n{listed}\nTake config.json and weights of one and the same model."
        )
    return config


def position_table(checkpoint: Checkpoint, config: VisionConfig) -> np.ndarray | None:
    """Qwen3-VL's table of positions [positions, H] float32; None where the family has none."""
    for spec in host_weights(config):
        return checkpoint.read(spec.parts[0][0], "float32")
    return None


def _first(prefixes: tuple[str, ...], names: Iterable[str]) -> str:
    """The first prefix that begins a name, else the first of all."""
    return next((prefix for prefix in prefixes if any(name.startswith(prefix) for name in names)), prefixes[0])


register_vision(VisionDescriber(__name__, read_vision, vision_description, vision_weights))
