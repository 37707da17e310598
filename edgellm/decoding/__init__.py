"""From a request to its tokens: preparation, sequences, slots and the loop of rounds."""
