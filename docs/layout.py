"""Shows the API reference the packages as they are installed, and adds the colours of code in the light and the dark.

In a checkout `engines` and the others stand beside `edgellm`, where a reader of source code does not find
`edgellm.engines`.
"""

from __future__ import annotations

import shutil
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from pygments.formatters import HtmlFormatter

_ROOT = Path(__file__).resolve().parent.parent
_BESIDE = ("configs", "engines", "kernels", "multimodal")
_COLOURS = {"css/code-light.css": "default", "css/code-dark.css": "github-dark"}
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


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add Pygments' stylesheets."""
    for name, style in _COLOURS.items():
        files.append(File.generated(config, name, content=HtmlFormatter(style=style).get_style_defs(".codehilite")))
    return files


def on_shutdown() -> None:
    """Remove the links."""
    while _made:
        shutil.rmtree(_made.pop())


class ShownDefaults(griffe.Extension):
    """Shows the value of a default that is a constant of a module, and not the constant's name."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Replace the names among the defaults of a function's parameters."""
        for parameter in func.parameters:
            name = str(parameter.default)
            if name.isidentifier() and name.isupper():
                parameter.default = repr(getattr(import_module(func.module.path), name))
