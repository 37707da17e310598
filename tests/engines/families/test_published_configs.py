"""Configurations as published, and as transformers' classes have them: read, or refused with the reason."""

from __future__ import annotations

import json
import lzma
import math
from typing import Any

import pytest
from golden_files import GOLDENS
from published_families import PUBLISHED

from edgellm.engines.errors import CheckpointError, UnsupportedModelError
from edgellm.engines.families import FAMILIES, decoder_config
from edgellm.engines.model.decoder import decoder_weights, token_table

TABLE = json.loads(lzma.decompress((GOLDENS / "published" / "configs.json.xz").read_bytes()))
#: Defaults that are no model that this project has, or none at all, and published models of which it has others alone.
REFUSED: dict[str, tuple[type[Exception], str]] = {
    "starcoder2": (CheckpointError, "eos_token_id is 50256, but vocab_size is 49152"),
    **dict.fromkeys(("smolvlm", "idefics3"), (CheckpointError, "image_token_id is 128257, expected a token id from 0")),
    "minicpmv4_6": (CheckpointError, "image_token_id is null, expected a token id from 0"),
    "llava": (CheckpointError, "image_token_index is 32000, expected a token id from 0 to 31999"),
}


def parameters(config: dict[str, Any]) -> int:
    """But for layers' scalars, which are buffers in transformers; keys that are values, too, count once."""
    found = decoder_config(config, dtype="bfloat16")
    specs = [*decoder_weights(found), *token_table(found)]
    parts = {name: math.prod(shape) for spec in specs for name, shape in spec.parts}
    return sum(size for name, size in parts.items() if not name.endswith("layer_scalar"))


@pytest.mark.parametrize("name", TABLE["published"])
def test_a_published_configuration_is_read_or_refused_by_its_architecture(name: str) -> None:
    """Those that are read have as many parameters as the model that transformers makes of it."""
    config, count = TABLE["published"][name].values()
    if name in REFUSED:
        error, message = REFUSED[name]
        with pytest.raises(error, match=message):
            decoder_config(config)
        return
    if count is not None:
        assert parameters(config) == count
        return
    (architecture,) = config["architectures"]
    assert config["model_type"] not in FAMILIES
    with pytest.raises(
        UnsupportedModelError, match=f"the architecture is {architecture}; supported are Llama.*Nearest to it"
    ):
        decoder_config(config)


@pytest.mark.parametrize("family", TABLE["defaults"])
def test_what_a_class_has_by_itself(family: str) -> None:
    config, count = TABLE["defaults"][family].values()
    if family in REFUSED:
        error, message = REFUSED[family]
        with pytest.raises(error, match=message):
            decoder_config(config, dtype="bfloat16")
        return
    assert count is not None or family in ("lfm2_moe", "hunyuan_v1_dense")  # transformers makes no model of these
    assert count in (None, parameters(config))


def test_the_table_has_every_family_and_many_models() -> None:
    # MiniCPM's class ships with its checkpoints.
    assert TABLE["defaults"].keys() == FAMILIES.keys() - {"minicpm"}
    assert len(TABLE["published"]) >= 60 and len({**TABLE["published"], **PUBLISHED}) >= 105
