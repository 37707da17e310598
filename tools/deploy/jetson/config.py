"""The package as jetson-containers reads it, which gives `package` to this file: the board's CUDA chooses the extra."""

from jetson_containers import CUDA_VERSION

#: JetPack 6 has CUDA 12, later ones have 13.
extra = "jetpack6" if CUDA_VERSION.major < 13 else "gpu"

package["build_args"] = {"EDGELLM_EXTRA": extra}  # noqa: F821

builder = package.copy()  # noqa: F821
builder["name"] = "edgellm:builder"
builder["build_args"] = {**package["build_args"], "FORCE_BUILD": "on"}  # noqa: F821

package = [package, builder]  # noqa: F821
