"""Dialogues in which tools are offered and called, for the adapter `tools`."""
