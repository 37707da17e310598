"""The vision runner: which engine runs, what is computed once, what is refused, what is counted."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
from fixed_shape_backend import FixedShapeBackend, host_view
from golden_vision import GoldenImage, golden_directory, golden_images, open_vision

from edgellm.engines.backends.opening import open_backend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import EngineError, ImageError
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.recently_used import RecentlyUsed
from edgellm.engines.runners.media import MediaEmbeddings
from edgellm.multimodal.vision_runner import VisionEngineRunner, vision_memory


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> EngineDirectory:
    return golden_directory("qwen2_5_vl", tmp_path_factory.mktemp("vision") / "engines")


@pytest.fixture(scope="module")
def images() -> list[GoldenImage]:
    return golden_images("qwen2_5_vl")


@pytest.fixture
def runner(directory: EngineDirectory) -> VisionEngineRunner:
    return open_vision(open_backend("numpy", directory), directory)


def test_an_image_is_computed_once(runner: VisionEngineRunner, images: list[GoldenImage]) -> None:
    first = runner.encode(images[:2])
    again = runner.encode([images[1], images[2], images[1], images[0]])
    assert again[0] is again[2] is first[1]
    assert again[3] is first[0]
    assert (runner.encoded, runner.cache_hits) == (3, 3)
    assert runner.host.seconds > 0


def test_a_repeated_image_in_one_request_is_computed_once_without_a_cache(
    directory: EngineDirectory, images: list[GoldenImage]
) -> None:
    runner = open_vision(open_backend("numpy", directory), directory, keeps=False)
    first, second = runner.encode([images[0], images[0]])
    assert first is second
    assert runner.encoded == 1
    runner.encode([images[0]])
    assert runner.encoded == 2


def test_patches_of_a_known_image_are_not_asked_for(runner: VisionEngineRunner, images: list[GoldenImage]) -> None:
    """Preprocessing is left out, too: `PreparedImage.patches` is computed when it is asked for."""
    known = runner.encode(images[:1])[0]
    blind = replace(images[0], patches=None)
    assert runner.encode([blind])[0] is known


def test_encoding_wants_weights(runner: VisionEngineRunner, images: list[GoldenImage]) -> None:
    runner.close()
    with pytest.raises(EngineError, match=r"call load\(\) first"):
        runner.encode(images)


def test_no_images(runner: VisionEngineRunner) -> None:
    assert runner.encode([]) == []


def test_an_image_takes_the_smallest_engine_that_holds_it(
    directory: EngineDirectory, images: list[GoldenImage], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = open_vision(FixedShapeBackend(directory), directory)
    ran: list[EngineShape] = []
    run = runner._steps.run
    monkeypatch.setattr(runner._steps, "run", lambda shape, stages: (ran.append(shape), run(shape, stages)))
    assert directory.limits.image_rows == (64, 256)
    runner.encode(images)
    # 3 x 5 tokens take 2 x 3 windows of 16 patches, 1 x 1 one window, 7 x 3 tokens 4 x 2 windows, 2 x 2 one.
    assert [shape.tokens for shape in ran] == [256, 64, 256, 64]


def test_the_order_of_images_does_not_matter_on_shared_buffers(
    directory: EngineDirectory, images: list[GoldenImage]
) -> None:
    forward = open_vision(FixedShapeBackend(directory), directory).encode(images)
    backward = open_vision(FixedShapeBackend(directory), directory).encode(images[::-1])[::-1]
    for one, other in zip(forward, backward, strict=True):
        np.testing.assert_array_equal(host_view(one.rows), host_view(other.rows))


def test_memory_is_written_anew_when_nobody_reads_it(directory: EngineDirectory, images: list[GoldenImage]) -> None:
    """Each image is one captured launch, of those that loading made; what is held stays."""
    backend = FixedShapeBackend(directory)
    device = open_vision(backend, directory, keeps=False)
    captured = [*backend.captures]
    alone = [open_vision(FixedShapeBackend(directory), directory).encode([image])[0] for image in images]
    expected = [host_view(one.rows) for one in alone]
    held = device.encode(images[:2])
    for image, rows in [*zip(images, expected, strict=True)] * 2:
        np.testing.assert_array_equal(host_view(device.encode([image])[0].rows), rows)
    for one, rows in zip(held, expected, strict=False):
        np.testing.assert_array_equal(host_view(one.rows), rows)
    addresses = [device.encode([replace(images[0], digest=str(each))])[0].rows.pointer for each in range(3)]
    assert len(set(addresses)) == 1 and held[0].rows.pointer not in addresses
    assert backend.captures == captured and len(captured) == len(directory.limits.image_rows)


def test_more_grids_than_are_kept(runner: VisionEngineRunner) -> None:
    random = np.random.default_rng(3)
    grids = [(1, 2 * height, 2 * width) for height in (1, 2, 3) for width in (1, 2, 3)]
    elements = runner.config.patch_elements
    made = [
        GoldenImage(
            random.standard_normal((g[1] * g[2], elements)).astype(np.float32), g, g[1] * g[2] // 4, str(g), 0, ()
        )
        for g in grids
    ]
    first = [one.rows.copy() for one in runner.encode(made)]
    runner.cache.clear()
    for one, other in zip(first, runner.encode(made), strict=True):
        np.testing.assert_array_equal(one, other.rows)


def test_an_image_that_is_too_large_or_too_thin(runner: VisionEngineRunner) -> None:
    thin = GoldenImage(np.zeros((80, runner.config.patch_elements), np.float32), (1, 2, 80), 40, "thin", 0, ())
    with pytest.raises(ImageError, match=r"2 x 80 patches takes 320 rows.*engines have 256.*--max-image-patches"):
        runner.encode([thin])
    assert runner.encoded == 0


def test_an_image_prepared_for_another_model(runner: VisionEngineRunner, images: list[GoldenImage]) -> None:
    with pytest.raises(ImageError, match=r"prepared as \[60, 5\].*takes \[60, 96\]"):
        runner.encode([replace(images[0], patches=np.zeros((60, 5), np.float32))])
    with pytest.raises(ImageError, match=r"prepared to be 7 tokens.*makes 15"):
        runner.encode([replace(images[0], tokens=7)])
    assert len(runner.encode([images[0]])) == 1


def test_a_directory_without_vision(tiny_engines: Path) -> None:
    directory = EngineDirectory.open(tiny_engines)
    with pytest.raises(EngineError, match=r"no vision encoder.*--vision VISION_DIR"):
        VisionEngineRunner(open_backend("numpy", directory), directory)


def test_what_it_takes_is_planned(directory: EngineDirectory) -> None:
    backend = FixedShapeBackend(directory)
    runner = VisionEngineRunner(backend, directory)
    allocated = []
    allocate = backend._allocate
    backend._allocate = lambda *arguments: allocated.append(allocate(*arguments)) or allocated[-1]
    runner.load()
    weights = sum(array.nbytes for array in runner._weights.values())
    assert runner.memory["vision weights"] == weights
    runner.encode(golden_images("qwen2_5_vl"))
    own = sum(one.nbytes for one in allocated)
    kept = sum(one.nbytes for one in runner.encode(golden_images("qwen2_5_vl")))
    assert own - kept <= runner.memory["vision buffers"] + kept


def test_as_many_embeddings_are_kept_as_large_images_take(runner: VisionEngineRunner) -> None:
    hidden, tokens = runner.config.out_hidden_size, 256 // 4
    assert runner.cache.most == runner.memory["image embeddings"] == 64 * tokens * hidden * 4
    large = replace(runner.config, out_hidden_size=1 << 14)
    assert vision_memory(large, (4096,), "float16")["image embeddings"] == 64 << 20


def embeddings(digest: str, rows: int) -> MediaEmbeddings:
    return MediaEmbeddings(np.zeros((rows, 4), np.float32), (), digest, (1, 2, 2))


def test_the_cache_drops_what_was_used_longest_ago() -> None:
    cache = RecentlyUsed(100, attrgetter("nbytes"))
    for digest in "abc":
        cache.keep(digest, embeddings(digest, 2))  # 32 bytes each
    assert cache.find("a") is not None
    cache.keep("d", embeddings("d", 2))
    assert cache.find("b") is None
    assert all(cache.find(digest) is not None for digest in "acd")
    assert (cache.size, len(cache)) == (96, 3)


def test_the_cache_holds_no_image_larger_than_itself() -> None:
    cache = RecentlyUsed(100, attrgetter("nbytes"))
    cache.keep("a", embeddings("a", 2))
    cache.keep("large", embeddings("large", 7))
    assert cache.find("large") is None
    assert cache.find("a") is not None
    cache.keep("a", embeddings("a", 2))
    assert cache.size == 32
    cache.clear()
    assert (cache.size, len(cache)) == (0, 0)
