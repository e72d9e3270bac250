"""Out-of-memory reports: the failed allocation, its cause, and remedies."""
