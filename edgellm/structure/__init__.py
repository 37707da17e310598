"""Answers of a given form: JSON schemas, regular expressions, grammars and choices, and the masks that keep them."""
