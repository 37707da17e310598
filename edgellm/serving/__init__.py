"""The thread that computes, its queue, what it serves and its metrics."""
