"""The operator table, made from the saved traces by a process of its own."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_memprof.artifacts.naming import TraceName, table_name
from lightning_memprof.artifacts.own_program import own_program
from lightning_memprof.artifacts.sink import Artifact
from lightning_memprof.errors import ReportError

if TYPE_CHECKING:
    from lightning_memprof.analysis.trace.operators import TableOptions
    from lightning_memprof.capture.base import RunContext

__all__ = ["write_operator_table"]

_SECONDS: Final = 300


def write_operator_table(run: RunContext, options: TableOptions) -> Path | None:
    """Write the operator table of every window of this rank; return its path, or None where there is no trace.

    Parsing and adding up take seconds on a large trace and would hold the GIL: a child process does it.

    Raises:
        ReportError: the child failed; ``lightning-memprof show`` can make the table later.

    """
    traces = [artifact.path for artifact in run.sink.artifacts if artifact.type == "trace"]
    name = TraceName.parse(traces[-1].name) if traces else None
    if name is None:
        return None
    table = traces[-1].with_name(table_name(name.stage, name.filename, run.rank))
    order = {"traces": [str(path) for path in traces], "out": str(table), "options": asdict(options)}
    try:
        subprocess.run(
            own_program("lightning_memprof.analysis.trace.operators", "-"),
            check=True,
            capture_output=True,
            input=json.dumps(order),
            text=True,
            timeout=_SECONDS,
        )
    except subprocess.CalledProcessError as error:
        msg = f"the operator table was not made: {error.stderr.strip()}; `lightning-memprof show` makes it"
        raise ReportError(msg) from error
    run.sink.list_artifact(Artifact(table, "table", "operator_trace"))
    return table
