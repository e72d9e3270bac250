"""Write tables and files, each under a temporary name until it is whole."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from lightning_memprof.artifacts.files import own_temporary, place_of
from lightning_memprof.errors import ReportError

if TYPE_CHECKING:
    from lightning_memprof.report.export.tables import Table


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
    """Write each table with rows as CSV with a header (RFC 4180, with LF line ends).

    None is an empty field, nested values are JSON.

    Returns:
        The files, and their rows.
    """
    written = []
    for name, found in tables:
        if not (rows := list(found)):
            continue
        path = directory / f"{name}.csv"
        columns = dict.fromkeys(column for row in rows for column in row)
        with whole_file(path) as out:
            writer = csv.writer(out, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows([_value(row.get(column)) for column in columns] for row in rows)
        written.append((path, len(rows)))
    return written


def _value(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value) if isinstance(value, Path) else json.dumps(value, default=str)
