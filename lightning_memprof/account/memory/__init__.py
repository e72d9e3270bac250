"""Memory of a run: categories at the peak, activations by module, allocations over time."""
