"""Configurations as they were published: the parameter counts that follow, and damage to every required field."""

from __future__ import annotations

import math
from typing import Any

import pytest
from published_families import LLAMA_2_7B, PUBLISHED, QWEN2_5_0_5B, REQUIRED

from edgellm.engines.errors import CheckpointError, UnsupportedModelError
from edgellm.engines.families import decoder_config
from edgellm.engines.model.decoder import decoder_weights, token_table

#: The families by one published model each; `num_key_value_heads` may be left out where the class says so.
FAMILIES = {config["model_type"]: config for config, _ in PUBLISHED.values()}


@pytest.mark.parametrize(("published", "parameters"), PUBLISHED.values(), ids=PUBLISHED)
def test_parameter_counts_are_the_published_ones(published: dict[str, Any], parameters: int) -> None:
    config = decoder_config(published)
    specs = [*decoder_weights(config), *token_table(config)]
    assert sum(math.prod(spec.shape) for spec in specs) == parameters
    assert sum(math.prod(shape) for spec in specs for _, shape in spec.parts) == parameters


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize(
    ("family", "value"),
    [
        *(("llama", value) for value in (None, "8", True, 0, -4, [8], math.inf, math.nan)),
        *((each, "8") for each in FAMILIES if each != "llama"),
    ],
)
def test_required_fields(family: str, key: str, value: Any) -> None:
    if (family, key) in (
        *(("starcoder2", "rms_norm_eps"), ("granitemoehybrid", "intermediate_size")),
        *(("nemotron_h", "rms_norm_eps"), ("nemotron_h", "num_hidden_layers")),
    ):
        pytest.skip("it has another name for that, and may leave it out")
    with pytest.raises(CheckpointError, match=rf"\({family}\)(.|\n)*{key} is .*, expected a (whole )?number"):
        decoder_config(FAMILIES[family] | {key: value})
    without = {name: kept for name, kept in FAMILIES[family].items() if name != key}
    with pytest.raises(CheckpointError, match=f"{key} is missing"):
        decoder_config(without)


def test_the_first_llamas_have_their_own_name_for_positions() -> None:
    early = {key: value for key, value in LLAMA_2_7B.items() if key != "max_position_embeddings"}
    assert decoder_config(early | {"max_sequence_length": 2048}).max_position_embeddings == 2048
    assert decoder_config(LLAMA_2_7B | {"max_sequence_length": 7}) == decoder_config(LLAMA_2_7B)


def test_sliding_windows_that_slide() -> None:
    """Qwen2 writes a window that is switched off; in a Llama configuration nothing switches it off."""
    assert decoder_config(QWEN2_5_0_5B | {"sliding_window": 4096}) == decoder_config(QWEN2_5_0_5B)
    switched_on = {"sliding_window": 4096, "use_sliding_window": True}
    assert decoder_config(QWEN2_5_0_5B | switched_on) == decoder_config(QWEN2_5_0_5B)  # the first 28 layers have none
    behind = decoder_config(QWEN2_5_0_5B | switched_on | {"max_window_layers": 21})
    assert (behind.window, behind.layer_kinds) == (4096, ("attention",) * 21 + ("window",) * 3)
    with pytest.raises(CheckpointError, match="max_window_layers is -1, expected a whole number from 0 on"):
        decoder_config(QWEN2_5_0_5B | {"max_window_layers": -1})
    assert decoder_config(LLAMA_2_7B | {"sliding_window": 4096}).window is None  # its class knows none
    assert decoder_config(LLAMA_2_7B | {"sliding_window": 4096}).sliding_window == 4096
    switched_off = {"sliding_window": 4096, "use_sliding_window": False}
    assert decoder_config(LLAMA_2_7B | switched_off) == decoder_config(LLAMA_2_7B)
    for wrong in ({"sliding_window": 0}, {"sliding_window": "wide"}, {"layer_types": ["sliding_attention"] * 32}):
        with pytest.raises(CheckpointError, match="sliding_window"):
            decoder_config(LLAMA_2_7B | wrong)


def test_end_of_sequence_ids_lie_in_the_vocabulary() -> None:
    assert decoder_config(LLAMA_2_7B, {"eos_token_id": [31999, 5, 31999]}).eos_token_ids == (31999, 5)
    assert decoder_config(LLAMA_2_7B, {"eos_token_id": [32000, 2]}).eos_token_ids == (2,)
    with pytest.raises(
        CheckpointError, match=r"generation_config\.json: eos_token_id is 32000, but vocab_size is 32000.* name the ids"
    ):
        decoder_config(LLAMA_2_7B, {"eos_token_id": 32000})


def test_features_come_with_the_faults_in_one_error() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        decoder_config({**LLAMA_2_7B, "vocab_size": "x", "num_local_experts": 8, "num_key_value_heads": 7})
    message = str(caught.value)
    assert "3 problems" in message
    for words in ("vocab_size is", "num_local_experts is 8 (mixture of experts)", "num_key_value_heads 7"):
        assert words in message


@pytest.mark.parametrize("identity", [{}, {"model_type": "llama2"}, {"model_type": 3}, {"architectures": "Llama"}])
def test_no_known_name_of_a_family(identity: dict[str, Any]) -> None:
    nameless = {key: value for key, value in LLAMA_2_7B.items() if key not in ("architectures", "model_type")}
    with pytest.raises((CheckpointError, UnsupportedModelError), match=r"supported are|list of names"):
        decoder_config(nameless | identity)


def test_names_that_contradict_each_other() -> None:
    with pytest.raises(CheckpointError, match="contradicts itself"):
        decoder_config(LLAMA_2_7B | {"model_type": "qwen2"})
