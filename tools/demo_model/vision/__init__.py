"""The shipped model's eyes: drawn scenes, the encoder that learns from them, export and evaluation."""
