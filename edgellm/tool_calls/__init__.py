"""Calls of tools: the formats in which models write them, read as they stream, and kept by grammars."""
