"""Make the operator table of a run that has traces but no table."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_memprof.analysis.run.load import Artifact, Problem
from lightning_memprof.artifacts.naming import TraceName, table_name
from lightning_memprof.artifacts.placing import own_temporary

if TYPE_CHECKING:
    from pathlib import Path

    from lightning_memprof.analysis.run.load import Run

__all__ = ["ensure_operator_tables"]


def ensure_operator_tables(run: Run) -> Run:
    """Return the run with an operator table for every rank that has traces.

    A table that is missing is computed from the traces and written beside them, but never outside of the run: a run
    that somebody else sent may name any place. Where it cannot be made, the run is returned with a problem that says
    why.
    """
    traces: dict[Path, list[Artifact]] = defaultdict(list)
    for artifact in run.artifacts:
        name = TraceName.parse(artifact.file.name)
        if artifact.type == "trace" and artifact.state == "present" and name is not None:
            traces[artifact.file.with_name(table_name(name.stage, name.filename, name.rank))].append(artifact)
    kept = [
        artifact
        for artifact in run.artifacts
        if artifact.type != "table" or artifact.state == "present" or artifact.file not in traces
    ]
    problems = list(run.problems)
    for table, sources in traces.items():
        if any(
            artifact.type == "table" and artifact.rank == sources[0].rank and artifact.state == "present"
            for artifact in kept
        ):
            continue
        try:
            if not table.exists():
                if not table.resolve().is_relative_to(run.root.resolve()):
                    why = (
                        f"is not made outside of the run; `lightning-memprof show {sources[0].file}` has the operators"
                    )
                    problems.append(Problem(table.name, why, sources[0].rank))
                    continue
                _write_table(table, sources)
            kept.append(_listed(run, table, sources[0]))
            problems = [problem for problem in problems if problem.piece.rpartition("/")[2] != table.name]
        except Exception as error:  # noqa: BLE001 a table that cannot be made must not hide the rest of the run
            problems.append(Problem(table.name, f"cannot be made: {type(error).__name__}: {error}", sources[0].rank))
    return replace(run, artifacts=tuple(kept), problems=tuple(problems))


def _write_table(table: Path, sources: list[Artifact]) -> None:
    from lightning_memprof.analysis.trace.operators import TableOptions, operator_table

    text = operator_table([source.file for source in sources], TableOptions(sort_by=None))
    temporary = own_temporary(table)
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(table)
    finally:
        temporary.unlink(missing_ok=True)


def _listed(run: Run, table: Path, source: Artifact) -> Artifact:
    path = table.relative_to(run.root).as_posix() if table.is_relative_to(run.root) else table.as_posix()
    return Artifact(source.rank, source.collector, "table", path, table, None, table.stat().st_size)
