"""`edgellm serve`: a model for other programs, over HTTP, as clients of OpenAI's API ask for it."""
