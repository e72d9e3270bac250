"""The only place that imports Lightning: a callback, a profiler, and the entry points that make them known."""
