"""TensorBoard plug-ins: the Memprof tab, and the PyTorch profiler tab without internet."""
