"""Memory of an allocator snapshot: its history replayed, who holds what, and what grows."""
