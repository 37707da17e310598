"""Rotary tables against the frequencies, attention factors and rows that transformers computed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from golden_files import golden_folder
from safetensors.numpy import load_file

from edgellm.engines.errors import CheckpointError
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.rotary import SCALINGS, inverse_frequencies, rotary_table, scaling_problems

GOLDENS = golden_folder("decoder")
RECORD = json.loads((GOLDENS / "rotary.json").read_text())
CASES: dict[str, dict[str, Any]] = RECORD["cases"]
HEAD_DIM = RECORD["head_dim"]
EXPECTED = load_file(GOLDENS / "rotary.safetensors")
LLAMA3 = CASES["llama3"]["rope_parameters"]


def make_config(parameters: dict[str, Any], max_position_embeddings: int = 4096, **changes: Any) -> DecoderConfig:
    scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
    config = DecoderConfig(
        family="llama",
        vocab_size=8,
        hidden_size=64,
        intermediate_size=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=1e-6,
        rope_theta=parameters.get("rope_theta", 10000.0),
        rotary_dim=HEAD_DIM,
        dtype="float32",
        tie_word_embeddings=False,
        rope_scaling=scaling or None,
    )
    return replace(config, **changes)


def config_of(name: str) -> DecoderConfig:
    return make_config(CASES[name]["rope_parameters"], CASES[name]["max_position_embeddings"])


def test_every_scaling_has_a_golden() -> None:
    assert {case["rope_parameters"]["rope_type"] for case in CASES.values()} == {"default", *SCALINGS}
    assert RECORD["versions"].keys() == {"torch", "transformers"}


@pytest.mark.parametrize("name", CASES)
def test_frequencies_equal_transformers(name: str) -> None:
    frequencies, attention_factor = inverse_frequencies(config_of(name), CASES[name]["length"])
    assert frequencies.dtype == np.float64
    # transformers computes them in float32, some in several steps
    np.testing.assert_allclose(frequencies, EXPECTED[f"{name}.frequencies"], rtol=5e-7)
    assert attention_factor == pytest.approx(CASES[name]["attention_factor"], rel=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_tables_equal_transformers(name: str) -> None:
    length, rows = CASES[name]["length"], EXPECTED[f"{name}.rows"]
    table = rotary_table(config_of(name), length)
    assert (table.dtype, table.shape) == (np.float32, (length, HEAD_DIM))
    assert table.flags.c_contiguous
    expected = EXPECTED[f"{name}.table"]
    # An angle grows with its position, and so does the rounding of the reference's float32 product.
    tolerance = 1e-6 + 3e-7 * rows[:, None].astype(np.float64)
    assert np.all(np.abs(table[rows] - expected) <= tolerance)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_rotations_times_the_attention_factor(name: str) -> None:
    table = rotary_table(config_of(name), 64, context=CASES[name]["length"]).astype(np.float64)
    cosine, sine = table[:, : HEAD_DIM // 2], table[:, HEAD_DIM // 2 :]
    np.testing.assert_allclose(np.hypot(cosine, sine), CASES[name]["attention_factor"], rtol=1e-6)
    np.testing.assert_allclose(cosine[0], CASES[name]["attention_factor"], rtol=1e-6)
    assert not sine[0].any()


def test_far_rows_keep_float64_accuracy() -> None:
    """Python's own arithmetic, at a position where float32 angles are off by more than 1e-3."""
    config, position = make_config({"rope_theta": 500000.0}), 131071
    row = rotary_table(config, position + 1)[position]
    for index in range(HEAD_DIM // 2):
        angle = math.fmod(position / 500000.0 ** (2 * index / HEAD_DIM), 2 * math.pi)
        assert row[index] == pytest.approx(math.cos(angle), abs=1e-6)
        assert row[HEAD_DIM // 2 + index] == pytest.approx(math.sin(angle), abs=1e-6)


def test_dynamic_scaling_starts_beyond_the_trained_length() -> None:
    config = make_config({"rope_type": "dynamic", "factor": 4.0}, max_position_embeddings=100)
    unscaled = rotary_table(replace(config, rope_scaling=None), 120)
    np.testing.assert_array_equal(rotary_table(config, 100), unscaled[:100])
    np.testing.assert_array_equal(rotary_table(config, 120, context=100), unscaled)
    np.testing.assert_array_equal(rotary_table(config, 50), unscaled[:50])
    assert np.abs(rotary_table(config, 101)[:100] - unscaled[:100]).max() > 1e-3
    np.testing.assert_array_equal(rotary_table(config, 50, context=101), rotary_table(config, 101)[:50])


def test_longrope_switches_beyond_the_original_length() -> None:
    parameters = CASES["longrope_short"]["rope_parameters"]
    config = make_config(parameters, 32768)
    short, long = (
        rotary_table(
            replace(config, rope_scaling={**config.rope_scaling, "long_factor": list_, "short_factor": list_}), 9
        )
        for list_ in (parameters["short_factor"], parameters["long_factor"])
    )
    np.testing.assert_array_equal(rotary_table(config, 9), short)
    np.testing.assert_array_equal(rotary_table(config, 9, context=4096), short)
    np.testing.assert_array_equal(rotary_table(config, 9, context=4097), long)


def test_older_name_of_the_kind() -> None:
    newer = make_config({"rope_type": "linear", "factor": 4.0})
    older = make_config({"type": "linear", "factor": 4.0})
    np.testing.assert_array_equal(rotary_table(older, 20), rotary_table(newer, 20))


def test_part_of_a_head_can_be_rotated() -> None:
    table = rotary_table(make_config({}, rotary_dim=8), 5)
    assert table.shape == (5, 8)
    np.testing.assert_allclose(table[1, :4], np.cos([1.0, 0.1, 0.01, 0.001]), rtol=1e-6)


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "linear"}, ["factor is missing"]),
        ({"rope_type": "linear", "factor": 0.5}, ["factor is 0.5, expected a number from 1 up to 1e+12"]),
        ({"rope_type": "dynamic", "factor": "2"}, ["factor is '2'"]),
        ({"rope_type": "dynamic", "factor": True}, ["factor is True"]),
        ({"rope_type": "yarn", "factor": math.nan}, ["factor is nan", "original_max_position_embeddings is missing"]),
        ({"rope_type": "yarn", "truncate": 1, "beta_fast": []}, ["truncate is 1", "beta_fast is []"]),
        ({"rope_type": "llama3"}, ["factor is missing", "low_freq_factor is missing", "high_freq_factor is missing"]),
        ({**LLAMA3, "high_freq_factor": 1.0}, ["high_freq_factor 1.0 is not above low_freq_factor 1.0"]),
        (
            {"rope_type": "longrope", "original_max_position_embeddings": 64, "short_factor": [1.0], "long_factor": 2},
            ["short_factor has 1 values, expected a list of 16 numbers", "long_factor is 2, expected a list"],
        ),
        (
            {
                "rope_type": "longrope",
                "original_max_position_embeddings": 64,
                "short_factor": [0.0] * 16,
                "long_factor": [1] * 16,
            },
            ["short_factor holds a value that is not a number above 0"],
        ),
        ({"rope_type": "su"}, ["'su'", "longrope", "default"]),
        ({"rope_type": ["yarn"]}, ["['yarn']", "yarn"]),
    ],
)
def test_unusable_scalings_are_refused(scaling: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        rotary_table(make_config(scaling), 4)
    for word in words:
        assert word in str(caught.value)


def test_dynamic_scaling_needs_more_than_one_frequency() -> None:
    assert scaling_problems({"rope_type": "dynamic", "factor": 2.0}, 2)
    assert not scaling_problems({"rope_type": "dynamic", "factor": 2.0}, 4)


def test_base_must_be_above_one() -> None:
    with pytest.raises(CheckpointError, match="rope_theta is 1"):
        rotary_table(make_config({"rope_theta": 1.0}), 4)
