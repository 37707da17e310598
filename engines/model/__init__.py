"""What a model is: configurations, and networks described once against a set of operations."""
