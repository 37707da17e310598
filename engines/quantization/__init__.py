"""Quantized checkpoints: what their configurations say, and the layouts in which their weights are published."""
