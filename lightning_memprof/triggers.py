"""Anomalies that open a window; ``lightning_memprof.Triggers`` takes them."""

from __future__ import annotations

from lightning_memprof.capture.triggers.anomalies import AllocatorRetries as AllocatorRetries
from lightning_memprof.capture.triggers.anomalies import Anomaly as Anomaly
from lightning_memprof.capture.triggers.anomalies import NearOOM as NearOOM
from lightning_memprof.capture.triggers.anomalies import SlowStep as SlowStep
