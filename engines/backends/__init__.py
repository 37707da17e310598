"""Where a description runs: NumPy, TensorRT and the hand-written kernels, and the device below them."""
