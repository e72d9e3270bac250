"""The program of a worker; see :mod:`lightning_memprof.timeline.workers`."""

from __future__ import annotations

import sys

from lightning_memprof.timeline.workers import serve

if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
