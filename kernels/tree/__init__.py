"""Kernels of the draft tree."""
