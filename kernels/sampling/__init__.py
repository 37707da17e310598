"""Kernels of a plain step: what an engine reads, and the choice of a token."""
