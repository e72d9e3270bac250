"""Write tables and files, each under a temporary name until it is whole."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from lightning_memprof.artifacts.files import own_temporary, place_of
from lightning_memprof.errors import ConfigError, ReportError

if TYPE_CHECKING:
    from lightning_memprof.report.export.tables import Table

_LARGEST: Final = (1 << 63) - 1


@contextmanager
def whole_file(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file that appears under its name when all was written, and not at all where that fails.

    Raises:
        ReportError: it cannot be written.
    """
    temporary: Path | None = None
    # A file name that is not UTF-8 has surrogates in Python, which cannot be encoded.
    text: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8", "errors": "backslashreplace", "newline": ""}
    try:
        place = place_of(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = own_temporary(place)
        with temporary.open(mode, **text) as out:
            yield out
        temporary.replace(place)
    except OSError as error:
        raise ReportError(
            f"{path}: cannot be written ({error.strerror or error}); name another place with -o"
        ) from error
    finally:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def write_csv(tables: Iterable[Table], directory: Path) -> list[tuple[Path, int]]:
    """Write each table as CSV with a header (RFC 4180, with LF line ends); None is an empty field.

    Returns:
        The files, and their rows.
    """
    written = []
    for table in tables:
        path = directory / f"{table.name}.csv"
        with whole_file(path) as out:
            writer = csv.writer(out, lineterminator="\n")
            writer.writerow(table.columns)
            writer.writerows(table.rows)
        written.append((path, len(table.rows)))
    return written


def require_parquet() -> None:
    """Check that Parquet can be written.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "--to parquet: needs pyarrow, which is not installed; pip install 'lightning-memprof[parquet]', "
            "or take --to csv"
        ) from error


def write_parquet(tables: Iterable[Table], directory: Path) -> list[tuple[Path, int]]:
    """Write each table as Parquet; a column has one type, and None is null.

    Returns:
        The files, and their rows.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    require_parquet()
    import pyarrow as pa
    from pyarrow import parquet

    written = []
    for table in tables:
        columns = [_typed([row[at] for row in table.rows]) for at in range(len(table.columns))]
        path = directory / f"{table.name}.parquet"
        with whole_file(path, "wb") as out:
            arrays = [pa.array(values, type=getattr(pa, kind)()) for kind, values in columns]
            parquet.write_table(pa.table(arrays, names=list(table.columns)), out)
        written.append((path, len(table.rows)))
    return written


def _typed(values: list[Any]) -> tuple[str, list[Any]]:
    """Return the name of the type that all values of a column have, and the values as such."""
    known = {type(value) for value in values if value is not None}
    if known <= {bool}:
        return "bool_", values
    if known <= {int} and all(value is None or -_LARGEST <= value <= _LARGEST for value in values):
        return "int64", values
    if float in known and known <= {int, float}:
        return "float64", [None if value is None else float(value) for value in values]
    return "string", [None if value is None else _readable(str(value)) for value in values]


def _readable(value: str) -> str:
    return value.encode("utf-8", "backslashreplace").decode("utf-8")
