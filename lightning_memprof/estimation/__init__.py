"""Memory of a training that has not run yet: the program's own training step on tensors without data."""
