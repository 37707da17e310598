"""Weights of 4 and 8 bits: what they are, whatever published them, and what kernels make of them."""
