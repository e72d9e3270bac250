"""Sources of figures: memory, tensors, autograd's graph, forwards, methods, Kineto."""

from __future__ import annotations
