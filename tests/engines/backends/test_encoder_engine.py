"""Engines of vision encoders on the kernels' twins give what NumPy's operations give, for every family."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from encoder_models import (
    MODELS,
    expected_outputs,
    grids_of,
    padded_arrays,
    random_encoder,
    shape_of,
    twin_engine,
)

from edgellm.engines.backends.encoder_calls import EncoderCalls, encoder_refusal
from edgellm.engines.backends.padded_weights import Padding
from edgellm.engines.errors import EngineError
from edgellm.engines.families.programs import model_program
from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.program import Scale


@pytest.mark.parametrize("larger", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_equals_operations(name: str, larger: bool) -> None:
    config = MODELS[name]
    for grid in grids_of(config):
        shape = shape_of(config, grid, larger)
        arrays = random_encoder(config, grid, shape)
        expected, engine = expected_outputs(config, shape, arrays), twin_engine(config, shape)
        found = {output: np.full(values.shape, np.nan, np.float32) for output, values in expected.items()}
        engine.bind(padded_arrays(engine, arrays) | found)
        for _ in range(2):
            engine.enqueue()
        tokens = config.token_count(grid)
        for output, values in expected.items():
            scale = np.abs(values[0, :tokens]).max()
            np.testing.assert_allclose(found[output][0, :tokens], values[0, :tokens], atol=2e-5 * scale, err_msg=output)
            assert np.isfinite(found[output]).all()
