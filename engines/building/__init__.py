"""How an engine directory is built."""
