"""Memory of a training run that has not run yet: the program's own training step on tensors without data."""
