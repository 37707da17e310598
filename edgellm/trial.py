"""What a build made, opened before it gets its name: its texts as a start reads them, and one token of it."""

from __future__ import annotations

import math
from pathlib import Path

from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.families.programs import model_weights
from edgellm.engines.model.memory_plan import available_memory
from edgellm.errors import EngineDirectoryError, TemplateError
from edgellm.kernels.gpu import find_gpu
from edgellm.text.template_budget import TemplateRaised
from edgellm.tool_calls.calling import ToolCalling
from edgellm.vision.opening import open_texts, vision_directory

_TEXT = "The red cup is on the table."
#: Tokens of it that any context has room for.
_LONGEST = 8
#: Of the free memory, what weights may take for a token to be computed unasked.
_SHARE = 4


def read_built(path: Path) -> list[str]:
    """Read all of an engine directory that a start reads but the weights' values: tokenizer, chat template, sampling,
    and of each weight name and shape; a text becomes tokens and text again, a conversation a prompt.

    Gives notes of what cannot be used. Raises EngineDirectoryError, CheckpointError and TemplateError.
    """
    directory = EngineDirectory.open(path)
    multimodal = vision_directory(directory, None)
    tokenizer, defaults = open_texts(directory, multimodal)
    if multimodal is not None and multimodal.vision is not None:
        from edgellm.multimodal.image_processor import open_image_processor

        vision = multimodal.vision
        open_image_processor(vision.path, vision.config, vision.config.patches_within(directory.limits.image_rows[-1]))
    if not tokenizer.decode(tokenizer.encode(_TEXT)):
        raise EngineDirectoryError(
            f"{path / 'tokenizer.json'} makes nothing of the text {_TEXT!r}: take the tokenizer of this very model"
        )
    ToolCalling(tokenizer, directory.tool_format).format()
    _ = defaults.params
    for model, checkpoint in directory.checkpoints.items():
        with checkpoint() as opened:
            opened.check(model_weights(directory.models[model]), unread=("",))
    if tokenizer.chat_template is None:
        return ["The model has no chat template: it completes raw prompts (edgellm generate --raw)."]
    try:
        tokenizer.encode_chat(defaults.with_system_prompt([{"role": "user", "content": _TEXT}]))
    except TemplateError as error:
        if not isinstance(error.__cause__, TemplateRaised):
            raise
        return [f"A conversation of one message was not rendered: {error}."]  # some take messages of their own form
    return []


def fits_easily(path: Path) -> bool:
    """Whether the weights of an engine directory take at most a quarter of the memory that is free for them, on the
    GPU where there is one. NumPy computes in float32."""
    directory = EngineDirectory.open(path)
    if find_gpu() is None:
        specs = (spec for config in directory.models.values() for spec in model_weights(config))
        size, free = sum(4 * math.prod(spec.shape) for spec in specs), available_memory() or 0
    else:
        from edgellm.engines.backends.cuda_device import gpu_memory

        size = sum((path / name).stat().st_size for name in directory.weight_files)
        free, _ = gpu_memory()
    return size * _SHARE <= free


def compute_token(path: Path) -> None:
    """Open a model as a start opens it, on the GPU where there is one, and compute a token; EdgeLLMError where that
    fails. What is compiled and built for it is kept where the next start finds it."""
    from edgellm.requests import Request
    from edgellm.runtime import SpecDecodeRuntime
    from edgellm.sampling_params import SamplingParams

    with SpecDecodeRuntime(path, drafting="auto") as runtime:
        prompt = runtime.tokenizer.encode(_TEXT)[:_LONGEST]
        runtime.handle_request(Request(prompt, params=SamplingParams(max_tokens=1, ignore_eos=True)))
