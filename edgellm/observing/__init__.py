"""Who takes note of steps: the observer and NVTX ranges; `edgellm.tracing` writes traces."""
