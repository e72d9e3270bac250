"""A device that waits, in an operator trace: for launches, after a wait of the host, for the allocator, for copies."""
