"""Two runs, traces or snapshots compared against noise and limits."""
