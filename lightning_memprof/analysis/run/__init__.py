"""A run directory read into memory: where it is, what every rank wrote, what is missing or damaged."""
