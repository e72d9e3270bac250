"""What TensorBoard loads of ours: the tab "Memprof", and the profiler tab's page without internet."""
