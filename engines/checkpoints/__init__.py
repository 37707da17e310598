"""Published weights: safetensors, pickled PyTorch files, and what is made of them."""
