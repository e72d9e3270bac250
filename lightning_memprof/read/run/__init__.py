"""A run directory read into memory: its location, the files of every rank, and missing or damaged files."""
