"""Describe the shipped directory anew after its files changed, with engines for what its vision encoder takes.

Usage: python -m tools.demo_model.describe --model edgellm/shipped
"""

import argparse
from dataclasses import replace
from pathlib import Path

from edgellm.engines.building.builder import describe_in_place
from edgellm.engines.building.checks import choose_image_rows
from edgellm.engines.building.inputs import read_decoder_config, read_vision_config
from edgellm.engines.directories.engine_directory import EngineDirectory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    directory = parser.parse_args().model
    limits = EngineDirectory.read(directory).limits
    if (directory / "vision").is_dir():
        vision = read_vision_config(directory / "vision", None, read_decoder_config(directory))
        limits = replace(limits, image_rows=choose_image_rows(vision))
    describe_in_place(directory, limits)


if __name__ == "__main__":
    main()
