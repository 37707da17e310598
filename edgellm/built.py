"""What a build made, opened before it gets its name: its texts are read as a start reads them."""

from __future__ import annotations

from pathlib import Path

from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.families.programs import model_weights
from edgellm.errors import EngineDirectoryError, TemplateError
from edgellm.media.opening import open_texts, vision_directory
from edgellm.metrics import Metrics
from edgellm.text.template_budget import TemplateRaised
from edgellm.tool_calls.calling import ToolCalling

#: What a model is tried with.
TRIAL_TEXT = "The red cup is on the table."


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
    if "audio" in directory.config.media:
        from edgellm.media.audio import AudioEncoder

        AudioEncoder(None, directory, Metrics())
    if not tokenizer.decode(tokenizer.encode(TRIAL_TEXT)):
        raise EngineDirectoryError(
            f"{path / 'tokenizer.json'} makes nothing of the text {TRIAL_TEXT!r}: take the tokenizer of this very model"
        )
    ToolCalling(tokenizer, directory.tool_format).format()
    _ = defaults.params, defaults.suppressed_tokens
    for model, checkpoint in directory.checkpoints.items():
        with checkpoint() as opened:
            opened.check(model_weights(directory.models[model]), unread=("",))
    if directory.config.is_embedding:
        return []
    unread = ", ".join(defaults.unread)
    notes = [f"generation_config.json has {unread}, of which answers take no notice."] if unread else []
    if tokenizer.chat_template is None:
        return [*notes, "The model has no chat template: it completes raw prompts (edgellm generate --raw)."]
    try:
        tokenizer.encode_chat(defaults.with_system_prompt([{"role": "user", "content": TRIAL_TEXT}]))
    except TemplateError as error:
        if not isinstance(error.__cause__, TemplateRaised):
            raise  # else it takes messages of a form of its own
        notes.append(f"A conversation of one message was not rendered: {error}.")
    return notes
