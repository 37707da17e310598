"""CUDA kernels and their NumPy twins: one interface, two implementations that agree."""
