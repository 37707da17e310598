"""The compiled kernels of an engine directory: folders below `kernels`, each described by its manifest's digest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from edgellm.engines.directories.engine_parts import parse_digests
from edgellm.engines.errors import EngineDirectoryError
from edgellm.engines.formats.digests import FileDigest, hash_bytes, hash_file
from edgellm.engines.formats.small_files import CONFIG_BYTES, read_file
from edgellm.engines.formats.strict_formats import JSONObject
from edgellm.kernels.errors import KernelError
from edgellm.kernels.kept import MANIFEST_NAME, architecture_of, read_cubin, read_manifest

KERNELS_FOLDER = "kernels"
KERNELS_KEY = "kernels"


def parse_kernels(values: JSONObject) -> dict[str, FileDigest]:
    """The section "kernels": digests of manifests by the names of their folders."""
    for name in values.values:
        if architecture_of(name) is None:
            raise values.error(f"{name!r} is no folder of kernels, expected a name such as sm_87-cuda13.0")
    return parse_digests(values)


def kernel_differences(path: Path, kernels: Mapping[str, FileDigest], verify: bool) -> Iterator[str]:
    """One line for each folder of an engine directory that is not as described: its manifest, and with `verify` its
    cubins, which are compared whenever they are loaded."""
    for name, expected in kernels.items():
        folder, shown = path / KERNELS_FOLDER / name, f"{KERNELS_FOLDER}/{name}/"
        try:
            found = hash_file(folder / MANIFEST_NAME)
        except FileNotFoundError:
            yield f"{shown}{MANIFEST_NAME}: missing"
            continue
        except OSError as error:
            yield f"{shown}{MANIFEST_NAME}: cannot be read ({error.strerror or error})"
            continue
        if found != expected:
            yield f"{shown}{MANIFEST_NAME}: SHA-256 {found.sha256[:16]}..., expected {expected.sha256[:16]}..."
        elif verify:
            yield from _cubin_differences(folder)


def _cubin_differences(folder: Path) -> Iterator[str]:
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
