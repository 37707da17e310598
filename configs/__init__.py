"""YAML presets that are installed with the package."""
