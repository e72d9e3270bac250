"""A run as JSON: numbers in base units (bytes, nanoseconds), null for what is unavailable."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_memprof.analysis.run.locate import shown_place
from lightning_memprof.artifacts.series import PHASES
from lightning_memprof.report.events import events_document
from lightning_memprof.report.files_document import (
    finding_document,
    plain,
    snapshots_document,
    traces_document,
    verdict_document,
)
from lightning_memprof.report.memory_document import memory_document
from lightning_memprof.report.ranks import ranks_document
from lightning_memprof.report.system import system_document
from lightning_memprof.report.throughput import throughput_document

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_memprof.analysis.steps.statistics import StepReport
    from lightning_memprof.report.view import Overhead, RankView, View, WindowView

__all__ = ["to_json"]


def to_json(view: View) -> dict[str, Any]:
    """Return a view as values that any JSON encoder takes.

    ``windows`` are those of the lead rank; ``ranks`` has every rank's own.
    """
    document = {
        "schema_version": view.schema_version,
        "run": _run(view),
        "verdict": verdict_document(view.verdict),
        "findings": [finding_document(finding) for finding in view.findings],
        "pulse": _pulse(view.lead),
        "ranks": [_rank(rank) for rank in view.ranks],
        "windows": [_window(window) for window in view.lead.windows],
        "artifacts": [
            {**dataclasses.asdict(artifact), "file": _where(view, artifact.file)} for artifact in view.artifacts
        ],
        "errors": [dataclasses.asdict(error) for error in view.errors],
        "unavailable": [dataclasses.asdict(row) for row in view.unavailable],
        "overhead": _overhead(view.lead.overhead),
        "memory": memory_document(view.memory),
        "across_ranks": ranks_document(view),
        "events": events_document(view),
        "throughput": throughput_document(view),
        "system": system_document(view),
        "oom": [dataclasses.asdict(oom) for oom in view.ooms],
        "traces": _in_place(view, traces_document(view.traces)),
        "snapshots": _in_place(view, snapshots_document(view.snapshots)),
        "named": [dataclasses.asdict(summary) for summary in view.named],
        "notes": [dataclasses.asdict(note) for note in view.notes],
        "problems": [dataclasses.asdict(problem) for problem in view.problems],
        "commands": [str(command) for command in view.commands],
    }
    return {key: plain(value) for key, value in document.items()}


def _where(view: View, path: Path) -> str:
    return str(path) if view.url is None else shown_place(path, view.root, view.url)


def _in_place(view: View, files: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**file, "file": _where(view, Path(file["file"]))} for file in files]


def _run(view: View) -> dict[str, Any]:
    facts, training = view.facts, view.training or {}
    kept = (
        "stage", "host", "device", "accelerator", "strategy", "world_size", "schedule", "collectors", "environment",
    )  # fmt: skip
    learned = (
        "model", "parameters", "parameter_bytes", "precision", "num_batches", "max_steps", "max_epochs",
        "accumulate_grad_batches", "optimizers", "dataloaders",
    )  # fmt: skip
    return {
        "directory": _where(view, view.directory),
        "root": _where(view, view.root),
        "url": view.url,
        "status": view.status,
        "exception": view.exception,
        "started_ns": facts.get("time_ns"),
        "steps": view.lead.steps,
        "lead_rank": view.lead.rank,
        **{key: facts.get(key) for key in kept},
        **{key: training.get(key) for key in learned},
        "other_runs": [str(path) for path in view.others],
    }


def _pulse(rank: RankView) -> dict[str, Any]:
    """Return the pulse in one shape whether the run has one or not: without it every figure is null."""
    statistics = rank.statistics
    return {
        "steps": statistics.steps if statistics else 0,
        "used_steps": statistics.used if statistics else 0,
        "basis": statistics.basis if statistics else None,
        "duration_ns": {
            "median": statistics.median_ns if statistics else None,
            "p90": statistics.p90_ns if statistics else None,
            "max": statistics.max_ns if statistics else None,
            "mean": statistics.mean_ns if statistics else None,
        },
        "breakdown_ns": dict(statistics.breakdown_ns) if statistics else dict.fromkeys(PHASES),
        "clock": statistics.clock if statistics else None,
    }


def _rank(rank: RankView) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "host_name": rank.host_name,
        "status": rank.status,
        "exception": rank.exception,
        "steps": rank.steps,
        "pulse": _pulse(rank),
        "host": dataclasses.asdict(rank.host),
        "device": dataclasses.asdict(rank.device) if rank.device else None,
        "windows": [_window(window) for window in rank.windows],
        "overhead": _overhead(rank.overhead),
    }


def _window(window: WindowView) -> dict[str, Any]:
    return {
        "index": window.index,
        "rank": window.rank,
        "planned_steps": list(window.planned_steps),
        "closed": window.closed,
        "truncated": window.truncated,
        "reason": window.reason,
        "steps": [_step(step) for step in window.steps],
    }


def _step(step: StepReport) -> dict[str, Any]:
    return {
        "step": step.step,
        "global_step": step.global_step,
        "duration_ns": step.duration_ns,
        "breakdown_ns": dict(step.breakdown_ns) if step.breakdown_ns is not None else None,
        "clock": step.clock,
        "source": step.source,
        "host": dataclasses.asdict(step.host),
        "device": dataclasses.asdict(step.device) if step.device else None,
    }


def _overhead(overhead: Overhead | None) -> Mapping[str, Any] | None:
    return dataclasses.asdict(overhead) if overhead else None
