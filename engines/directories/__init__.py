"""Engine directories on disk: files, digests, plans, and how they are replaced whole."""
