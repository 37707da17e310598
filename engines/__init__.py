"""Model families, checkpoints, engines and the runners that execute them, on TensorRT and on NumPy."""
