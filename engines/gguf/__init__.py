"""GGUF files as checkpoints: what their metadata says of the model and its tokenizer, and what their tensors are."""
