"""Images to embeddings: preprocessing, vision families and the vision runner."""
