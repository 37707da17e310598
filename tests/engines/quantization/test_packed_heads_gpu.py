"""Packed heads on a GPU: answers and logits are those of a dense head of the same values, bit by bit, and agree with
NumPy's; tokens that are looked up in the head, too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from packed_twins import DRAFTING, answer_logits, answers
from safetensors.numpy import load_file, save_file

from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.comparison import LOGIT_TOLERANCES, open_runner, teacher_forced_logits
from edgellm.opened_model import SHIPPED_MODEL

pytestmark = pytest.mark.gpu

LIMITS = EngineLimits(3, 64, 512, 4, 4, 24)  # prompts go through kernels, as of dense models
MODEL, EMBEDDING, HEAD = "model.safetensors", "model.embed_tokens.weight", "lm_head.weight"
KINDS = [("int8", "as-published"), ("int4", "head"), ("int8", "head")]


@pytest.fixture(scope="module", params=KINDS, ids=["int8", "int4-embedding", "int8-embedding"])
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The shipped model and its draft with packed heads, and with dense ones of the same values."""
    (head, embedding), folder = request.param, tmp_path_factory.mktemp("heads")
    packed, twin, twin_draft = folder / "packed", folder / "twin", folder / "twin_draft"
    own = SHIPPED_MODEL / "draft"
    build_engine_directory(SHIPPED_MODEL, packed, LIMITS, draft=own, head=head, embedding=embedding, draft_weights=head)
    directory = EngineDirectory.open(packed)
    assert directory.draft is not None
    for source, target, opened, shape in (
        (SHIPPED_MODEL, twin, directory.checkpoint(), (4096, 320)),
        (own, twin_draft, directory.draft.checkpoint(), (2048, 320)),
    ):
        target.mkdir()
        for file in source.glob("*.*"):
            shutil.copy(file, target)
        (target / "edgellm.json").unlink(missing_ok=True)
        tensors = load_file(source / MODEL)
        with opened as checkpoint:
            stored = checkpoint.packed(HEAD, shape)
            assert stored is not None
            tensors[HEAD] = stored.values().astype(np.float16)
        if target == twin and embedding == "head":
            tensors[EMBEDDING] = tensors[HEAD]
        save_file(tensors, target / MODEL)
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    build_engine_directory(twin, folder / "twin_engines", LIMITS, draft=twin_draft)
    return packed, folder / "twin_engines"


def test_answers_are_those_of_the_dense_twin(twins: tuple[Path, Path]) -> None:
    packed, twin = twins
    plain = answers(twin, None)
    assert len(set(plain[:3])) == 3
    assert answers(packed, None) == plain
    assert answers(packed, DRAFTING) == plain


def test_logits_are_the_dense_twins_bit_by_bit_and_near_numpys(twins: tuple[Path, Path]) -> None:
    (*_, found), (prompt, answer, dense) = map(answer_logits, twins)
    np.testing.assert_array_equal(found, dense)
    with open_runner("numpy", EngineDirectory.open(twins[0])) as runner:
        expected = teacher_forced_logits(runner, prompt, answer)
    assert np.abs(found - expected).max() <= LOGIT_TOLERANCES["float16"] * np.abs(expected).max()
