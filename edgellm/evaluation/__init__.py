"""What `edgellm eval` measures and prints."""
