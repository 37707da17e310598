"""Kernels of layers with a state of their own, short convolutions and the gated delta rule, and of gates and norms."""
