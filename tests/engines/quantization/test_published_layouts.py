"""Every layout that is read, against the package that made it: each weight bit by bit, and the model's logits."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from golden_files import golden_folder, largest_difference
from golden_sequences import Sequences

from edgellm.engines.checkpoints.checkpoint import Checkpoint
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
            found[part.removesuffix(".weight")] = hashlib.sha256((values + 0.0).tobytes()).hexdigest()
            formats.add(packed.format)
        assert read_vision(checkpoint) is None or "vl" in name  # its tower is dense
    assert found == expected
    assert formats
