"""What a result says of its own making."""

from __future__ import annotations

import sys
from datetime import date
from pathlib import Path


def provenance() -> dict[str, str]:
    """The date, and the command of this process with files by their names alone: folders are the machine's own."""
    arguments = [Path(argument).name if "/" in argument else argument for argument in sys.argv[1:]]
    return {
        "date": date.today().isoformat(),
        "command": " ".join(["python", f"tools/bench/{Path(sys.argv[0]).name}", *arguments]),
    }
