"""What runs inside training. Knows torch, not Lightning."""
