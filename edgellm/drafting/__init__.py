"""How to draft: configurations, presets, and the controller that picks what is fastest."""
