"""`python -m edgellm.ros --ros-args -p model:=DIRECTORY`: the node, where ROS 2 is installed and sourced."""

from __future__ import annotations

import sys

from edgellm.commands.console import FAILED, write_error
from edgellm.errors import EdgeLLMError, MissingDependencyError


def main() -> None:
    """Run the node; leaves by SystemExit where it cannot."""
    try:
        try:
            from edgellm.ros.node import run
        except ImportError as error:
            raise MissingDependencyError(
                f"ROS 2's package {error.name} is not there: source its setup.bash, and run this with the Python that "
                "its rclpy was built for"
            ) from error
        run(sys.argv)
    except EdgeLLMError as error:
        write_error(error)
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
