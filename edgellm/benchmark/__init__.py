"""What `edgellm bench` measures and prints."""
