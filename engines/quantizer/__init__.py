"""Makes packed weights of dense checkpoints: statistics, scales, rounding, and the files that are written."""
