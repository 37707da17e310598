"""Plans: found where they were built for this very platform and network, refused with the reason otherwise."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from edgellm.engines.backends.executors import planned_shapes
from edgellm.engines.backends.plan_files import (
    Platform,
    cached_plans_path,
    directory_network,
    load_or_build_plan,
    manifest_path,
    network_digest,
    plan_path,
    platforms_with_plans,
)
from edgellm.engines.backends.platform import load_tensorrt
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import PlanError
from edgellm.engines.model.limits import EngineShape

pytest.importorskip("tensorrt_rtx")
OpenCopy = Callable[[], EngineDirectory]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGELLM_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def platform() -> Platform:
    library = load_tensorrt()
    return Platform("sm_86", library.flavour, library.version)


def decode_shape(directory: EngineDirectory) -> EngineShape:
    return directory.limits.engine_shapes()[0]


def must_not_build() -> bytes:
    raise AssertionError("a valid plan was there")


def plan_of(directory: EngineDirectory, platform: Platform) -> Path:
    return plan_path(directory.plans_path, decode_shape(directory), platform)


def refusal(directory: EngineDirectory, platform: Platform) -> str:
    with pytest.raises(PlanError) as caught:
        load_or_build_plan(directory, decode_shape(directory), platform)
    return str(caught.value)


def test_built_plan_is_found(open_copy: OpenCopy, platform: Platform) -> None:
    directory = open_copy()
    data, was_built = load_or_build_plan(directory, decode_shape(directory), platform, must_not_build)
    assert not was_built
    assert data == plan_of(directory, platform).read_bytes()


def test_every_shape_has_plan_and_manifest_in_a_folder_named_for_the_platform(
    open_copy: OpenCopy, platform: Platform
) -> None:
    directory = open_copy()
    folder = directory.path / "plans" / f"sm_86-rtx-{platform.version}"
    shapes = planned_shapes(directory.models, directory.limits, directory.dtype, "sm_86", needless=True)
    names = {shape.name for shape in shapes}
    assert {path.stem for path in folder.glob("*.engine")} == names
    assert {path.stem for path in folder.glob("*.json")} == names
    assert len(names) == 1


@pytest.mark.parametrize("offset", [0, 40, 5000, -1])
def test_flipped_byte_is_refused(open_copy: OpenCopy, platform: Platform, offset: int) -> None:
    directory = open_copy()
    plan = plan_of(directory, platform)
    content = bytearray(plan.read_bytes())
    content[offset] ^= 1
    plan.write_bytes(content)
    message = refusal(directory, platform)
    assert f"{plan} is damaged: SHA-256" in message
    assert f"edgellm build --refresh-plans {directory.path} --target sm_86" in message


@pytest.mark.parametrize("size", [0, 1, 5000])
def test_truncated_plan_is_refused(open_copy: OpenCopy, platform: Platform, size: int) -> None:
    directory = open_copy()
    os.truncate(plan_of(directory, platform), size)
    assert f"has {size:,} bytes, expected" in refusal(directory, platform)


def test_plan_without_manifest_is_refused(open_copy: OpenCopy, platform: Platform) -> None:
    directory = open_copy()
    manifest_path(plan_of(directory, platform)).unlink()
    assert "has no manifest" in refusal(directory, platform)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.update(sha256="0" * 64), "is damaged"),
        (lambda v: v.pop("network"), "'network' is missing"),
        (lambda v: v.update(network=3), "'network' is 3, expected a non-empty string"),
        (lambda v: v.update(format_version=9), "'format_version' is 9"),
        (lambda v: v["platform"].update(compute_capability="../x"), "No such platform"),
        (lambda v: v["shape"].update(tokens=2), "another shape"),
        (lambda v: v.update(extra=1), "unknown keys 'extra'"),
    ],
)
def test_wrong_manifests_are_refused(
    open_copy: OpenCopy, platform: Platform, change: Callable[[dict], None], message: str
) -> None:
    directory = open_copy()
    path = manifest_path(plan_of(directory, platform))
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    assert message in refusal(directory, platform)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"compute_capability": "sm_90"}, "another GPU: sm_86, expected sm_90"),
        ({"version": "1.5.0.1"}, "another TensorRT release: 1.6.1.120, expected 1.5.0.1"),
        ({"flavour": "trt"}, "another TensorRT flavour: rtx, expected trt"),
    ],
)
def test_plan_for_another_platform_is_refused_even_under_the_right_name(
    open_copy: OpenCopy, platform: Platform, other: dict[str, str], what: str
) -> None:
    directory = open_copy()
    wanted = dataclasses.replace(platform, **other)
    message = refusal(directory, wanted)
    assert f"has no plan {decode_shape(directory).name} for {wanted.describe()}" in message
    assert f"it has plans for {platform.describe()}" in message
    assert "edgellm build --refresh-plans" in message
    shutil.copytree(directory.plans_path / platform.folder, directory.plans_path / wanted.folder)
    assert what.replace("1.6.1.120", platform.version) in refusal(directory, wanted)


def test_plan_of_another_network_is_refused(open_copy: OpenCopy, platform: Platform) -> None:
    directory = open_copy()
    changed = dataclasses.replace(directory, config=dataclasses.replace(directory.config, rms_norm_eps=1e-6))
    assert "another network" in refusal(changed, platform)


def test_directory_without_plans_says_so(plain_directory: Path, platform: Platform) -> None:
    assert "it has no plans" in refusal(EngineDirectory.open(plain_directory), platform)


def test_damaged_plan_is_built_again_with_a_warning(
    open_copy: OpenCopy, platform: Platform, caplog: pytest.LogCaptureFixture
) -> None:
    directory = open_copy()
    plan = plan_of(directory, platform)
    whole = plan.read_bytes()
    plan.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with caplog.at_level(logging.WARNING):
        assert load_or_build_plan(directory, decode_shape(directory), platform, lambda: whole) == (whole, True)
    assert "is damaged" in caplog.text
    assert load_or_build_plan(directory, decode_shape(directory), platform, must_not_build) == (whole, False)
    assert not list(plan.parent.glob(".*"))


def test_plan_goes_to_the_cache_where_the_directory_cannot_be_written(open_copy: OpenCopy, platform: Platform) -> None:
    directory = open_copy()
    shape = decode_shape(directory)
    whole = plan_of(directory, platform).read_bytes()
    shutil.rmtree(directory.plans_path)
    directory.plans_path.write_text("no folder can be made here")
    assert load_or_build_plan(directory, shape, platform, lambda: whole) == (whole, True)
    assert load_or_build_plan(directory, shape, platform, must_not_build) == (whole, False)
    cached = plan_path(cached_plans_path(directory_network(directory, shape)), shape, platform)
    assert cached.read_bytes() == whole


def test_plan_that_can_be_kept_nowhere_is_used_all_the_same(
    open_copy: OpenCopy,
    platform: Platform,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory = open_copy()
    whole = plan_of(directory, platform).read_bytes()
    shutil.rmtree(directory.plans_path)
    directory.plans_path.write_text("")
    monkeypatch.setenv("EDGELLM_CACHE_DIR", str(directory.plans_path))
    assert load_or_build_plan(directory, decode_shape(directory), platform, lambda: whole) == (whole, True)
    assert "cannot be kept" in caplog.text


def test_folders_that_are_no_platform_are_not_listed(open_copy: OpenCopy, platform: Platform) -> None:
    directory = open_copy()
    for name in ("sm_86", "sm_86-cuda-1.0", "notes"):
        (directory.plans_path / name).mkdir()
    assert [found for found, _ in platforms_with_plans(directory.plans_path)] == [platform]


@pytest.mark.parametrize("parts", [("86", "rtx", "1.6"), ("sm_86", "cuda", "1.6"), ("sm_86", "rtx", "../1")])
def test_platform_names_are_checked(parts: tuple[str, str, str]) -> None:
    with pytest.raises(PlanError, match="No such platform"):
        Platform(*parts)


def test_network_digest_follows_what_a_plan_is_built_from(open_copy: OpenCopy) -> None:
    directory = open_copy()
    config, shape = directory.config, decode_shape(directory)
    base = network_digest(config, shape, "float16", "auto")
    assert network_digest(dataclasses.replace(config), dataclasses.replace(shape), "float16", "auto") == base
    changes = [
        {"rms_norm_eps": 1e-6},
        {"intermediate_size": 128},
        {"num_layers": 3},
        {"attention_bias": True},
        {"qk_norm": True},
        {"tie_word_embeddings": False},
        {"rotary_dim": 8},
    ]
    digests = [network_digest(dataclasses.replace(config, **change), shape, "float16", "auto") for change in changes]
    digests += [
        network_digest(config, shape, "bfloat16", "auto"),
        network_digest(config, shape, "float16", "composed"),
        *(
            network_digest(config, dataclasses.replace(shape, **change), "float16", "auto")
            for change in ({"batch": 2}, {"tokens": 2}, {"key_range": 64}, {"kv_rows": 200})
        ),
    ]
    assert len({base, *digests}) == 1 + len(digests)


@pytest.mark.parametrize("change", [{"eos_token_ids": (5,)}, {"max_position_embeddings": 512}, {"rope_theta": 1e6}])
def test_network_digest_ignores_what_stays_outside_the_engine(open_copy: OpenCopy, change: dict) -> None:
    directory = open_copy()
    shape = decode_shape(directory)
    changed = dataclasses.replace(directory.config, **change)
    assert network_digest(changed, shape, "float16", "auto") == directory_network(directory, shape)
