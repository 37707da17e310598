"""Files as they lie on disk: strict JSON, bounded and ordinary files, digests, tensors, directories replaced whole."""
