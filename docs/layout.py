"""Shows the API reference the packages as they are installed: `engines` and the others inside of `edgellm`.

In a checkout they stand beside it, where a reader of source code does not find `edgellm.engines`.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority

_ROOT = Path(__file__).resolve().parent.parent
_BESIDE = ("configs", "engines", "kernels", "multimodal")
_made: list[Path] = []


@event_priority(100)  # before the plugin that reads the paths
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lay links out as an installation has the folders, and let the reference read these."""
    folder = Path(tempfile.mkdtemp(prefix="edgellm-reference-"))
    _made.append(folder)
    package = folder / "edgellm"
    package.mkdir()
    for entry in [*(_ROOT / "edgellm").iterdir(), *(_ROOT / name for name in _BESIDE)]:
        (package / entry.name).symlink_to(entry)
    config.plugins["mkdocstrings"].config["handlers"]["python"]["paths"] = [str(folder)]
    return config


def on_shutdown() -> None:
    """Remove the links."""
    while _made:
        shutil.rmtree(_made.pop())
