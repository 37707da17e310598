"""The compiled kernels of an engine directory: folders below `kernels`, each described by its manifest's digest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from edgellm.engines.directories.engine_parts import parse_digests
from edgellm.engines.errors import EngineDirectoryError
from edgellm.engines.formats.digests import FileDigest, hash_bytes
from edgellm.engines.formats.small_files import CONFIG_BYTES, read_file
from edgellm.engines.formats.strict_formats import JSONObject
from edgellm.kernels.errors import KernelError
from edgellm.kernels.kept import MANIFEST_NAME, architecture_of, read_cubin, read_manifest

KERNELS_FOLDER = "kernels"
KERNELS_KEY = "kernels"


def parse_kernels(values: JSONObject | None) -> dict[str, FileDigest]:
    """The section "kernels", if there is one: digests of manifests by the names of their folders."""
    if values is None:
        return {}
    for name in values.values:
        if architecture_of(name) is None:
            raise values.error(f"{name!r} is no folder of kernels, expected a name such as sm_87-cuda13.0")
    return parse_digests(values)


def manifests(kernels: Mapping[str, FileDigest]) -> dict[str, dict[str, FileDigest]]:
    """The files that are described of each folder, by its name in the engine directory: the manifest alone."""
    return {f"{KERNELS_FOLDER}/{name}": {MANIFEST_NAME: digest} for name, digest in kernels.items()}


def cubin_differences(folder: Path) -> Iterator[str]:
    """One line for each cubin of a folder that is not as its manifest says."""
    try:
        manifest = read_manifest(folder)
    except KernelError as error:
        yield str(error)
        return
    for module in manifest.modules:
        try:
            read_cubin(folder, module)
        except KernelError as error:
            yield str(error)


def with_kernels(description: Path, kernels: Mapping[str, FileDigest]) -> bytes:
    """The content of an `edgellm.json` with other kernels. Raises EngineDirectoryError."""
    values = JSONObject.parse(
        read_file(description, CONFIG_BYTES, EngineDirectoryError), str(description), EngineDirectoryError, ""
    ).values
    others = {key: value for key, value in values.items() if key != KERNELS_KEY}
    if kernels:
        others[KERNELS_KEY] = {
            name: {"sha256": digest.sha256, "size": digest.size} for name, digest in sorted(kernels.items())
        }
    return description_data(others)


def description_data(values: Mapping[str, Any]) -> bytes:
    """Values as `edgellm.json` has them."""
    return (json.dumps(values, indent=2, allow_nan=False) + "\n").encode()


def digest_without_kernels(data: bytes, values: Mapping[str, Any]) -> str:
    """SHA-256 of an `edgellm.json` but for its kernels, which change nothing that is computed: what is bound to it,
    such as measured costs, stays when targets are added."""
    if KERNELS_KEY not in values:
        return hash_bytes(data)
    return hash_bytes(description_data({key: value for key, value in values.items() if key != KERNELS_KEY}))
