"""Describe the shipped directory anew after its files changed, with engines for what its vision encoder and adapters
take, and with the chat template of `vocabulary.py`.

Usage: python -m tools.demo_model.describe --model edgellm/shipped
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from edgellm.engines.building.builder import describe_in_place
from edgellm.engines.building.checks import choose_image_rows
from edgellm.engines.building.inputs import read_decoder_config, read_vision_config
from edgellm.engines.directories.engine_directory import EngineDirectory, adapter_names
from edgellm.tool_calls.formats import checkpoint_format
from tools.demo_model.vocabulary import CHAT_TEMPLATE


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
