"""What is on disk: names, manifest, series. Knows nothing of torch."""
