"""The ranks of a run compared: imbalance, waiting, stragglers."""
