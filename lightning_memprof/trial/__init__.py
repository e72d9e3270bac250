"""Trials: the user's own training alternately with and without a remedy."""
