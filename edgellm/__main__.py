"""`python -m edgellm`, and the `edgellm` command."""

from __future__ import annotations

import gc
import sys

_INTERRUPTED = 130


def main() -> None:
    """Run the command line; leaves by SystemExit."""
    gc.set_threshold(20_000)  # hardly anything that starting makes is garbage: looking for it took a tenth of that time
    try:
        from edgellm.commands.app import run

        run(sys.argv[1:])
    except KeyboardInterrupt:  # while it starts
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
