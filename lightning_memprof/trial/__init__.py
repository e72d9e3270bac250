"""Trials: the user's own training with and without a remedy, in turns."""
