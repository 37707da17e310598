"""The module of the decode kernels, until they have modules of their own."""

from pathlib import Path

from edgellm.kernels.compiler import ModuleSource

OTHER_KERNELS = ModuleSource(
    "kernels",
    tuple(f"cuda/{name}" for name in sorted(path.name for path in (Path(__file__).parent / "cuda").glob("decode*.cu"))),
)
