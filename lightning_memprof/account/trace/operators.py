"""The operator table of saved traces: the text that torch prints for the same profile, without torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from lightning_memprof.account.trace.key_averages import OperatorRow, OperatorRows, collect_rows
from lightning_memprof.artifacts.files import own_temporary
from lightning_memprof.artifacts.manifest import RunFacts
from lightning_memprof.artifacts.naming import TraceName, table_name
from lightning_memprof.errors import ArtifactError, ConfigError
from lightning_memprof.read.run.model import ArtifactFile, Run
from lightning_memprof.read.run.problems import Problem
from lightning_memprof.units import quoted

_WIDTH: Final = 12
_SPACE: Final = "  "


def _us(ns: int) -> float:
    return ns / 1000


def _average(ns: int, count: int) -> float:
    return ns / 1000 / count if count else 0.0


_SORT_VALUES: Final[dict[str, Callable[[OperatorRow], float | str]]] = {
    "key": lambda row: row.name,
    "count": lambda row: row.count,
    "cpu_time": lambda row: _average(row.cpu_ns, row.count),
    "cpu_time_total": lambda row: row.cpu_ns,
    "self_cpu_time_total": lambda row: row.self_cpu_ns,
    "device_time": lambda row: _average(row.device_ns, row.count),
    "device_time_total": lambda row: row.device_ns,
    "self_device_time_total": lambda row: row.self_device_ns,
    "cpu_memory_usage": lambda row: row.cpu_bytes,
    "self_cpu_memory_usage": lambda row: row.self_cpu_bytes,
    "device_memory_usage": lambda row: row.device_bytes,
    "self_device_memory_usage": lambda row: row.self_device_bytes,
}
_DEVICES: Final = ("cuda", "xpu", "privateuse1")

AVAILABLE_SORT_KEYS: Final = frozenset(_SORT_VALUES) | frozenset(
    key.replace("device", device) for key in _SORT_VALUES if "device" in key for device in _DEVICES
)
"""Every key that torch's table can be sorted by; `cuda_*`, `xpu_*` and `privateuse1_*` mean `device_*`."""


class TableOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the table looks: the parameters of torch's `key_averages().table()`.

    Args:
        sort_by: one of `AVAILABLE_SORT_KEYS`, largest first; None keeps the order of the first events.
        row_limit: maximum number of rows; -1 for all.
        max_name_column_width: longer names are truncated; None truncates none.
        group_by_input_shapes: whether each shape of the inputs has a row.
        max_src_column_width: accepted as torch does; the column is empty unless rows are grouped by stack.
        max_shapes_column_width: longer shapes are truncated; None truncates none.
        header: a line above the table.
        top_level_events_only: whether to skip operators that others called.
        include_python_functions: whether Python functions have rows. None is the default of the torch that records,
            which has no rows for them since 2.14; without torch it is True.
        time_unit: unit of all times; None picks the unit by size.

    Raises:
        ConfigError: `sort_by` or `time_unit` is unknown.
    """

    sort_by: str | None = None
    row_limit: int = 20
    max_name_column_width: int | None = 55
    group_by_input_shapes: bool = False
    max_src_column_width: int | None = 75
    max_shapes_column_width: int | None = 80
    header: str | None = None
    top_level_events_only: bool = False
    include_python_functions: bool | None = None
    time_unit: Literal["s", "ms", "us"] | None = None

    def __post_init__(self) -> None:
        if self.sort_by is not None and self.sort_by not in AVAILABLE_SORT_KEYS:
            raise ConfigError(
                f"sort_by={self.sort_by!r} is not a sort key; use one of {', '.join(sorted(AVAILABLE_SORT_KEYS))}"
            )
        if self.time_unit not in {None, "s", "ms", "us"}:
            raise ConfigError(f"time_unit={self.time_unit!r} is not a unit; use s, ms or us")

    def chosen(self) -> dict[str, Any]:
        """Return the parameters that are not the default."""
        defaults = zip(self.__struct_fields__, self.__struct_defaults__, strict=True)
        return {name: value for name, default in defaults if (value := getattr(self, name)) != default}


def table_path(trace: Path) -> Path | None:
    """Return the path of the operator table of a rank's traces, beside them; None for another tool's trace."""
    name = TraceName.parse(trace.name)
    return None if name is None else trace.with_name(table_name(name.stage, name.filename, name.rank))


def operator_table(traces: Sequence[Path], options: TableOptions) -> str:
    """Return one table over all traces, a window each.

    Returns:
        The text that torch prints for the profile, and a last line with the number of windows.

    Raises:
        ArtifactError: a trace is missing, damaged or truncated, or none of them has an operator.
    """
    collected = collect_rows(
        traces,
        group_by_input_shapes=options.group_by_input_shapes,
        include_python_functions=options.include_python_functions is not False,
    )
    if not collected.rows:
        names = ", ".join(str(path) for path in traces) or "no trace"
        raise ArtifactError(f"{names}: has no operators; record at least one step with the CPU activity")
    return _render(collected, options) + f"Windows: {collected.windows}\n"


def write_operator_table(traces: Sequence[Path], out: Path, options: TableOptions) -> None:
    """Write the table to `out`, under a temporary name first, so that `out` is whole or absent.

    Raises:
        ArtifactError: as `operator_table` does.
    """
    text = operator_table(traces, options)
    temporary = own_temporary(out)
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


def ensure_operator_tables(run: Run) -> Run:
    """Return the run with an operator table for every rank that has traces.

    A missing table is computed from the traces and written beside them, but never outside of the run: a run from
    somebody else may name any place. Where that fails, the run is returned with a problem that gives the reason.
    """
    traces: dict[Path, list[ArtifactFile]] = defaultdict(list)
    for trace in run.files("trace"):
        if (path := table_path(trace.file)) is not None:
            traces[path].append(trace)
    artifacts = [
        artifact
        for artifact in run.artifacts
        if artifact.type != "table" or artifact.state == "present" or artifact.file not in traces
    ]
    problems = list(run.problems)
    for table, sources in traces.items():
        rank = sources[0].rank
        if any((found.type, found.state, found.rank) == ("table", "present", rank) for found in artifacts):
            continue
        try:
            if not table.exists():
                if not table.resolve().is_relative_to(run.root.resolve()):
                    command = f"lightning-memprof show {quoted(sources[0].file)}"
                    problems.append(
                        Problem(table.name, f"is not made outside of the run; `{command}` shows the operators", rank)
                    )
                    continue
                write_operator_table([source.file for source in sources], table, _options(run, rank))
            artifacts.append(_table_artifact(run, table, sources[0]))
            problems = [problem for problem in problems if problem.piece.rpartition("/")[2] != table.name]
        except Exception as error:  # noqa: BLE001 a table that cannot be made must not hide the rest of the run
            problems.append(Problem(table.name, f"cannot be made: {type(error).__name__}: {error}", rank))
    return replace(run, artifacts=tuple(artifacts), problems=tuple(problems))


def _options(run: Run, rank: int) -> TableOptions:
    """Return the options of the rank's profiler; torch has rows for Python functions by default before 2.14."""
    facts = next((found.facts for found in run.ranks if found.rank == rank), RunFacts())
    torch = [int(part) for part in re.findall(r"\d+", str(facts.environment.get("torch", "")))[:2]]
    return msgspec.convert({"include_python_functions": torch < [2, 14], **facts.operator_table}, TableOptions)


def _table_artifact(run: Run, table: Path, trace: ArtifactFile) -> ArtifactFile:
    return replace(
        trace,
        type="table",
        path=table.relative_to(run.root).as_posix() if table.is_relative_to(run.root) else table.as_posix(),
        file=table,
        window=None,
        size_bytes=table.stat().st_size,
        sha256=None,
    )


class _Column(NamedTuple):
    title: str
    width: int
    text: Callable[[OperatorRow], str]


def _render(collected: OperatorRows, options: TableOptions) -> str:
    rows = collected.rows
    if options.sort_by is not None:
        rows = sorted(rows, key=_sort_value(options.sort_by), reverse=True)
    columns = _columns(collected, options)
    template = "".join(f"{{: >{column.width}}}{_SPACE}" for column in columns)
    rule = "".join("-" * column.width + _SPACE for column in columns)
    double_rule = "=" * (len(rule) - len(_SPACE))
    lines = [] if options.header is None else [double_rule, options.header]
    if options.top_level_events_only:
        lines += [double_rule, "This report only display top-level ops statistics"]
        rows = [row for row in rows if not row.is_nested]
    lines += [rule, template.format(*(column.title for column in columns)), rule]
    shown = rows if options.row_limit < 0 else rows[: options.row_limit]
    lines += [template.format(*(column.text(row) for column in columns)) for row in shown]
    lines += [rule, f"Self CPU time total: {_time(_us(_cpu_total(collected)), options.time_unit)}"]
    if _has_device_time(collected):
        total = _time(_us(_device_total(collected)), options.time_unit)
        lines.append(f"Self {collected.device_name} time total: {total}")
    return "".join(line + "\n" for line in lines)


def _columns(collected: OperatorRows, options: TableOptions) -> list[_Column]:
    def time(ns: Callable[[OperatorRow], float]) -> Callable[[OperatorRow], str]:
        return lambda row: _time(ns(row), options.time_unit)

    names = max(len(row.name) for row in collected.rows) + 4
    limit = options.max_name_column_width
    cpu_total, device_total = _cpu_total(collected), _device_total(collected)
    columns = [
        _Column("Name", names if limit is None else min(names, limit), lambda row: _shortened(row.name, limit)),
        _Column("Self CPU %", _WIDTH, lambda row: _share(row.self_cpu_ns, cpu_total)),
        _Column("Self CPU", _WIDTH, time(lambda row: _us(row.self_cpu_ns))),
        _Column("CPU total %", _WIDTH, lambda row: _share(row.cpu_ns, cpu_total)),
        _Column("CPU total", _WIDTH, time(lambda row: _us(row.cpu_ns))),
        _Column("CPU time avg", _WIDTH, time(lambda row: _average(row.cpu_ns, row.count))),
    ]
    device = collected.device_name
    if _has_device_time(collected):
        columns += [
            _Column(f"Self {device}", _WIDTH, time(lambda row: _us(row.self_device_ns))),
            _Column(f"Self {device} %", _WIDTH, lambda row: _share(row.self_device_ns, device_total)),
            _Column(f"{device} total", _WIDTH, time(lambda row: _us(row.device_ns))),
            _Column(f"{device} time avg", _WIDTH, time(lambda row: _average(row.device_ns, row.count))),
        ]
    if collected.profile_memory:
        columns += [
            _Column("CPU Mem", _WIDTH, lambda row: _memory(row.cpu_bytes)),
            _Column("Self CPU Mem", _WIDTH, lambda row: _memory(row.self_cpu_bytes)),
        ]
        if device and any(row.self_device_bytes > 0 for row in collected.rows):
            columns += [
                _Column(f"{device} Mem", _WIDTH, lambda row: _memory(row.device_bytes)),
                _Column(f"Self {device} Mem", _WIDTH, lambda row: _memory(row.self_device_bytes)),
            ]
    columns.append(_Column("# of Calls", _WIDTH, lambda row: str(row.count)))
    # Without shapes in the trace every row's list is empty and torch leaves the column out.
    if any(row.input_shapes not in {"", "[]"} for row in collected.rows):
        wanted = max(len(row.input_shapes) for row in collected.rows) + 4
        most = options.max_shapes_column_width
        width = wanted if most is None else min(wanted, most)
        columns.append(_Column("Input Shapes", width, lambda row: row.input_shapes[:width]))
    return columns


def _sort_value(key: str) -> Callable[[OperatorRow], Any]:
    for device in _DEVICES:
        key = key.replace(device, "device")
    return _SORT_VALUES[key]


def _cpu_total(collected: OperatorRows) -> int:
    return sum(row.self_cpu_ns for row in collected.rows)


def _device_total(collected: OperatorRows) -> int:
    return sum(row.self_device_ns for row in collected.rows if row.on_device and not row.is_annotation)


def _has_device_time(collected: OperatorRows) -> bool:
    return any(row.self_device_ns > 0 for row in collected.rows)


def _shortened(name: str, limit: int | None) -> str:
    return name if limit is None or len(name) < limit - 3 else name[: max(limit - 3, 0)] + "..."


def _time(us: float, unit: str | None) -> str:
    if unit == "s" or (unit is None and us >= 1_000_000):
        return f"{us / 1_000_000:.3f}s"
    if unit == "ms" or (unit is None and us >= 1_000):
        return f"{us / 1_000:.3f}ms"
    return f"{us:.3f}us"


def _share(ns: int, total_ns: int) -> str:
    return f"{ns * 100 / total_ns:.2f}%" if total_ns else "NaN"


def _memory(count: int) -> str:
    """Bytes in torch's spelling, whose KB is 1024 bytes."""
    for unit, size in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
