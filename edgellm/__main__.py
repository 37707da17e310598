"""`python -m edgellm`, and the `edgellm` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; leaves by SystemExit."""
    from edgellm.commands.app import run

    run(sys.argv[1:])


if __name__ == "__main__":
    main()
