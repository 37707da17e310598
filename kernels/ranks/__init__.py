"""What passes between GPUs that share a model: sums, columns and inputs."""
