"""Drafting with EAGLE heads: plans, the draft model, verification of trees, rounds."""
