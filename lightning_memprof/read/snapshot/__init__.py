"""Snapshots of the CUDA allocator, read without executing anything."""
