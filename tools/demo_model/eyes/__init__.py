"""The shipped model's eyes: drawn tabletop scenes, the vision encoder that learns from them, its export and evaluation."""
