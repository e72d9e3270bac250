"""The program of a worker; see :mod:`lightning_memprof.analysis.timeline.workers`."""

from __future__ import annotations

import sys

from lightning_memprof.analysis.timeline.workers import serve

if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
