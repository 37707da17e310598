"""The hub that these tests ask, on this machine."""

from hub_server import hub  # noqa: F401 - a fixture
