"""Every layout that is read, against the package that made it: each weight bit by bit, and the model's logits."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from golden_files import golden_folder, largest_difference
from golden_sequences import Sequences

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import CheckpointError
from edgellm.engines.families import decoder_config
from edgellm.engines.families.vision_config import read_vision
from edgellm.engines.formats.tensors import language_model_name
from edgellm.engines.model.decoder import decoder_weights

GOLDENS = golden_folder("quantized")
NAMES = sorted(path.name for path in GOLDENS.iterdir())
TOLERANCE = 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_transformers_on_the_packages_weights(name: str) -> None:
    sequences = Sequences(GOLDENS / name, batch=2)
    assert np.nanstd(sequences.expected) > 1
    logits = sequences.logits(sequences.token_ids, [0, 0])
    assert largest_difference(logits, sequences.expected) <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_each_weight_has_the_bits_that_the_package_gives_it(name: str) -> None:
    digests = json.loads(Sequences(GOLDENS / name).metadata["weights"])
    expected = {language_model_name(module): digest for module, digest in digests.items()}
    found, formats = {}, set()
    with Checkpoint.open(GOLDENS / name) as checkpoint:
        config = decoder_config(checkpoint.config, checkpoint.generation_config)
        for part, shape in (part for spec in decoder_weights(config) for part in spec.parts):
            packed = checkpoint.packed(part, shape)
            assert (packed is None) == (part.removesuffix(".weight") not in expected), part
            if packed is None:
                continue
            promised = checkpoint.weight_format(part, shape)
            assert promised is not None and promised.nbytes(*shape) == packed.format.nbytes(*shape)
            values = packed.values()
            assert (values.dtype, values.shape) == (np.float32, shape)
            np.testing.assert_array_equal(packed.rows(3, 9).values(), values[3:9])
            assert packed.codes.flags.c_contiguous and packed.scales.shape == (shape[0], packed.format.groups(shape[1]))
            found[part.removesuffix(".weight")] = hashlib.sha256((values + 0.0).tobytes()).hexdigest()[:16]
            formats.add(packed.format)
        assert read_vision(checkpoint) is None or "vl" in name  # its tower is dense
    assert found == expected
    assert formats


def test_settings_of_modelopt_stand_in_either_file(tmp_path: Path) -> None:
    """As transformers writes them into config.json, they say what hf_quant_config.json says."""
    beside, within = GOLDENS / "modelopt_nvfp4", tmp_path / "model"
    shutil.copytree(beside, within)
    (within / "hf_quant_config.json").unlink()
    four = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    settings = {
        "config_groups": {"group_0": {"input_activations": four, "weights": four, "targets": ["Linear"]}},
        "ignore": ["lm_head", "model.layers.1.self_attn*"],
        "quant_algo": "NVFP4",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quant_method": "modelopt",
    }
    config = json.loads((within / "config.json").read_text())
    (within / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with Checkpoint.open(beside) as one, Checkpoint.open(within) as other:
        specs = decoder_weights(decoder_config(one.config, one.generation_config))
        for part, shape in (part for spec in specs for part in spec.parts):
            assert one.weight_format(part, shape) == other.weight_format(part, shape), part
    del settings["quant_method"]  # as ModelOpt 0.31 left it out
    settings["quant_algo"] = "MXFP8"
    (within / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(CheckpointError, match="'quant_algo' is 'MXFP8', expected FP8"):
        Checkpoint.open(within)
