"""`python -m edgellm`, and the `edgellm` command."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress

#: As in `edgellm.commands.console`, which is not imported before there is something to do.
_DEVICE_LOST, _INTERRUPTED = 75, 130


def main() -> None:
    """Run the command line; leaves by SystemExit."""
    gc.set_threshold(20_000)  # hardly anything that starting makes is garbage: looking for it took a tenth of that time
    try:
        from edgellm.commands.app import run

        run(sys.argv[1:])
    except KeyboardInterrupt:  # while it starts
        sys.exit(_INTERRUPTED)
    except SystemExit as ended:
        if ended.code == _DEVICE_LOST:  # libraries that free what they have there would end the process as they like
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(_DEVICE_LOST)
        raise


if __name__ == "__main__":
    main()
