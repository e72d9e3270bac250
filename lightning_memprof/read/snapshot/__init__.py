"""Snapshots of the CUDA allocator: reading, replaying and summing them."""
