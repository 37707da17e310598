"""Weights of 4 to 8 bits: what they are, whatever published them, and what kernels make of them."""
