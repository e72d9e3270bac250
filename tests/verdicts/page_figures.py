"""Compare the figures of recorded runs, traces and snapshots before and after a change.

    python tests/verdicts/page_figures.py write OUT PATH ...      the figures of everything below the paths, a file each
    python tests/verdicts/page_figures.py compare BEFORE AFTER    the fields that differ; the exit code is 1 if any does

A path is a folder of recordings (``make verdicts ARGS="--recordings DIR"``), a run, a trace, a snapshot, or a folder of
these. Figures are what ``lightning-memprof show --format json`` prints, without sentences and findings. Differences are
grouped by field, those of most files first; ``--tolerance`` is relative.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parent))

from page_commands import shown
from trainings import RAN

# Conclusions and sentences: what the rules decide and how it is said is no figure.
LEFT_OUT: Final = frozenset((
    "verdict", "findings", "commands", "notes", "problems", "sentence", "title", "why", "next", "next_steps",
    "remedies", "message", "missing", "reason", "reasons", "unknown", "note", "basis", "moment", "attribution",
    "left_out",
))  # fmt: skip
TEXT: Final = frozenset({".md", ".py", ".txt", ".yaml", ".csv", ".jsonl"})
MISSING: Final = "missing"
SHOWN: Final = 3


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write")
    write.add_argument("out", type=Path)
    write.add_argument("paths", type=Path, nargs="+")
    compare = commands.add_parser("compare")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    compare.add_argument("--tolerance", type=float, default=0.0, metavar="SHARE")
    options = parser.parse_args(argv)
    if options.command == "write":
        return written(options.out, options.paths)
    return reported(differences(options.before, options.after, options.tolerance))


def written(out: Path, paths: Sequence[Path]) -> int:
    """Write the figures of everything below the paths, and return 0."""
    out.mkdir(parents=True, exist_ok=True)
    for path in out.glob("*.json.gz"):
        path.unlink()
    found = {out / f"{name}.json.gz": target for path in paths for name, target in targets(path.resolve())}
    with ProcessPoolExecutor() as pool:
        errors = sum(pool.map(write_figures, found.values(), found, chunksize=4))
    print(f"{out}: the figures of {len(found)} targets; {errors} cannot be read")
    return 0


def targets(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield the runs below a path, and the traces and snapshots that are in none, each with a name."""
    if path.is_file():
        yield path.name, path
        return
    runs = sorted(path.rglob("memprofiler"))
    roots = {run.parent for run in runs} | {ran.parent for ran in path.rglob(RAN)}
    for run in runs:
        yield "_".join(run.parent.relative_to(path).parts) or path.name, run
    for file in sorted(path.rglob("*")):
        if file.is_file() and file.suffix not in TEXT and roots.isdisjoint(file.parents):
            yield "_".join(file.relative_to(path).parts), file


def write_figures(target: Path, file: Path) -> bool:
    """Write the figures of a target and tell whether it cannot be read."""
    try:
        figures = figures_of(shown(target), target.parent)
    except Exception as error:  # noqa: BLE001 - that a file is refused is compared, too
        figures = {"error": type(error).__name__}
    file.write_bytes(gzip.compress(json.dumps(figures).encode(), 1, mtime=0))
    return "error" in figures


def figures_of(value: Any, root: Path) -> Any:
    """Return a document without sentences and findings, its paths relative to the root."""
    if isinstance(value, dict):
        return {key: figures_of(item, root) for key, item in value.items() if key not in LEFT_OUT}
    if isinstance(value, list):
        return [figures_of(item, root) for item in value]
    return value.replace(str(root), "") if isinstance(value, str) else value


def differences(before: Path, after: Path, tolerance: float) -> dict[str, dict[str, str]]:
    """Return what differs, by field without indexes and by file: the first place and its two values."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    names = sorted({path.name for folder in (before, after) for path in folder.glob("*.json.gz")})
    with ProcessPoolExecutor() as pool:
        folders = (repeat(before), repeat(after), repeat(tolerance))
        for name, changes in zip(names, pool.map(changed, names, *folders, chunksize=8), strict=True):
            for field, text in changes.items():
                found[field][name.removesuffix(".json.gz")] = text
    return found


def changed(name: str, before: Path, after: Path, tolerance: float) -> dict[str, str]:
    """Return the fields of a file that differ, each with its first place and the two values."""
    for folder in (before, after):
        if not (folder / name).is_file():
            return {"file": f"{MISSING} in {folder}"}
    old, new = (dict(flat(json.loads(gzip.decompress((folder / name).read_bytes())))) for folder in (before, after))
    found: dict[str, str] = {}
    for place in dict.fromkeys((*old, *new)):
        one, other = old.get(place, MISSING), new.get(place, MISSING)
        if not is_equal(one, other, tolerance):
            field = ".".join(part for part in place.split(".") if not part.isdigit())
            found.setdefault(field, f"{place}: {one} -> {other}")
    return found


def flat(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of a document with its place."""
    if not value or not isinstance(value, dict | list):
        yield place, value
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from flat(item, f"{place}.{key}" if place else str(key))


def is_equal(one: Any, other: Any, tolerance: float) -> bool:
    """Tell whether two values are the same, numbers within a share of the larger one."""
    if isinstance(one, float | int) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=tolerance)
    return bool(one == other)


def reported(found: dict[str, dict[str, str]]) -> int:
    """Print the fields that differ and return whether any does."""
    for field, files in sorted(found.items(), key=lambda item: -len(item[1])):
        print(f"{field}: {len(files)} files")
        for name, text in list(files.items())[:SHOWN]:
            print(f"    {name}: {text}")
    print(f"{len(found)} fields differ")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
