"""Kernels that accept tokens of a verified tree."""
