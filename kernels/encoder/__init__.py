"""Kernels of vision encoders."""
