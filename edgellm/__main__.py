"""`python -m edgellm`, and the `edgellm` command."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Run the command line; leaves by SystemExit."""
    gc.set_threshold(20_000)  # hardly anything that starting makes is garbage: looking for it took a tenth of that time

    from edgellm.commands.app import run

    run(sys.argv[1:])


if __name__ == "__main__":
    main()
