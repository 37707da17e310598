"""A base model that runs: its KV caches, slots, sampling state, images and captured steps."""
