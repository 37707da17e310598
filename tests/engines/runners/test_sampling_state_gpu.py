"""Masks and biases of slots on the GPU, in a captured step that is replayed with other masks: as on NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from decode_models import LLAMA
from gpu_device import cuda_device, device_copy, load_kernels

from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.runners.sampling_state import SamplingState, SamplingValues

pytestmark = pytest.mark.gpu
SLOTS, NODES, VOCABULARY = 3, 4, 2051


def test_a_captured_step_obeys_the_masks_that_were_uploaded_last():
    rng, slots = np.random.default_rng(8), slice(0, SLOTS)
    shape = (SLOTS, NODES, VOCABULARY)
    with cuda_device() as gpu:
        load_kernels(gpu, rows=SLOTS * NODES)
        logits, twin = gpu.empty(shape, "float32"), np.empty(shape, np.float32)
        states = [SamplingState(backend, SLOTS, VOCABULARY, 8, SLOTS * NODES) for backend in (gpu, NumpyBackend(LLAMA))]
        for state in states:
            state.set(1, SamplingValues(0.8, 20, seed=3, logit_bias=((5, 2.5), (2050, -1.0))), [1, 2])
        states[0].constrain(slots, logits)
        launch = gpu.capture(lambda: states[0].constrain(slots, logits), "masks and biases")
        for masks in (3, 0, 12):
            values = rng.normal(0, 3, shape).astype(np.float32)
            words = rng.integers(0, 2**32, (masks, states[0].masks.host_masks.shape[1]), dtype=np.uint32)
            places = rng.integers(-1, max(masks, 1), SLOTS * NODES) if masks else np.full(SLOTS * NODES, -1)
            gpu.upload(logits, values)
            twin[:] = values
            for state in states:
                state.masks.host_masks[:masks], state.masks.host_rows[:] = words, places
                state.masks.upload(SLOTS * NODES, masks)
            launch()
            states[1].constrain(slots, twin)
            np.testing.assert_array_equal(gpu.download(logits), twin)
            np.testing.assert_array_equal(gpu.download(states[0].rows(slots)), states[1].rows(slots))
        states[0].move(1, 0)
        states[1].move(1, 0)
        states[0].masks.clear()
        states[1].masks.clear()
        launch()
        states[1].constrain(slots, twin)
        np.testing.assert_array_equal(gpu.download(logits), twin)
        token = device_copy(gpu, np.zeros(SLOTS * NODES, np.int32))
        gpu.kernels.argmax(logits.reshape(SLOTS * NODES, VOCABULARY), token)
        np.testing.assert_array_equal(gpu.download(token), twin.reshape(SLOTS * NODES, VOCABULARY).argmax(axis=1))
