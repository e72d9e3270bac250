"""A small, real training to look at: a byte-level GPT that learns the source of Python's standard library."""
