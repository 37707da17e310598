"""Images of requests, through the vision encoder."""
