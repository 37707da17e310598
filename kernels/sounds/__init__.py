"""Kernels of sounds."""
