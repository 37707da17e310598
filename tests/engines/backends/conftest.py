"""The GPU of the tests of engines of kernels."""

from decode_models import gpu  # noqa: F401 - a fixture
