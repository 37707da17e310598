"""Describe the shipped directory anew after its files changed, with engines for what its vision encoder and adapters
take, and with the chat template of `vocabulary.py`.

Usage: python -m tools.demo_model.describe --model edgellm/shipped
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from edgellm.engines.building.builder import BuildSettings, read_build
from edgellm.engines.building.checks import choose_image_rows
from edgellm.engines.building.inputs import read_decoder_config, read_vision_config, write_made_files
from edgellm.engines.checkpoints.weight_files import VOCABULARY_FILE
from edgellm.engines.directories.description import write_description
from edgellm.engines.directories.engine_directory import EngineDirectory, adapter_names, described_file_names
from edgellm.engines.directories.engine_parts import DRAFT_FOLDER, LORA_FOLDER, VISION_FOLDER
from edgellm.engines.errors import BuildError
from edgellm.engines.formats.digests import current_digest
from edgellm.engines.lora.adapter import ADAPTER_FILES
from edgellm.engines.model.limits import EngineLimits
from edgellm.tool_calls.formats import checkpoint_format
from tools.demo_model.vocabulary import CHAT_TEMPLATE


def describe_in_place(
    directory: str | Path,
    limits: EngineLimits | None = None,
    dtype: str | None = None,
    attention: str = "auto",
    beyond_trained_context: bool = False,
    tool_format: str | None = None,
) -> EngineDirectory:
    """Make an engine directory of a checkpoint by writing `edgellm.json` beside its files; an older one is replaced.

    A folder `draft` in it is the checkpoint of an EAGLE head, else a head drafts that ships with the model, where
    `limits` have a draft; a folder `vision` is a vision encoder that was published apart, folders in `lora` are LoRA
    adapters. `tool_format` names the format of the model's calls. Raises AdapterError, CheckpointError,
    UnsupportedModelError, and BuildError for limits out of range or a failure to write.
    """
    directory = Path(directory)
    folder, vision = directory / DRAFT_FOLDER, directory / VISION_FOLDER
    has_folder = folder.exists() and {each.name for each in folder.iterdir()} != {VOCABULARY_FILE}
    adapters = {name: directory / LORA_FOLDER / name for name in adapter_names(directory)}
    draft, vision_source = folder if has_folder else None, vision if vision.exists() else None
    asked = BuildSettings(dtype, attention, draft=draft, adapters=adapters, vision=vision_source)
    asked = replace(asked, beyond_trained_context=beyond_trained_context)
    inputs, limits, dtype = read_build(directory, limits, asked)
    names = described_file_names(directory)
    for part in filter(None, (vision_source, draft)):
        names += [f"{part.name}/{name}" for name in described_file_names(part)]
    names += [f"{LORA_FOLDER}/{name}/{file}" for name in adapters for file in ADAPTER_FILES]
    files = {name: current_digest(directory / name, trust_memory=False) for name in names}
    try:
        files |= write_made_files(inputs, directory, lambda done, total: None)
        write_description(directory, inputs.description(dtype, attention, limits, files, tool_format))
    except OSError as error:
        raise BuildError(f"{directory} cannot be written: {error.strerror or error}") from error
    return EngineDirectory.open(directory)


def write_chat_template(directory: Path) -> None:
    """Put the chat template into `tokenizer_config.json`; nothing else of it changes."""
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"chat_template": CHAT_TEMPLATE}
    path.write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    directory = parser.parse_args().model
    write_chat_template(directory)
    limits = EngineDirectory.read(directory).limits
    ranks = [
        json.loads((directory / "lora" / name / "adapter_config.json").read_text())["r"]
        for name in adapter_names(directory)
    ]
    if ranks:
        limits = replace(limits, max_lora_rank=max(ranks), lora_slots=len(ranks))
    if (directory / "vision").is_dir():
        vision = read_vision_config(directory / "vision", None, read_decoder_config(directory))
        limits = replace(limits, image_rows=choose_image_rows(vision))
    describe_in_place(directory, limits, tool_format=checkpoint_format(directory, None))


if __name__ == "__main__":
    main()
