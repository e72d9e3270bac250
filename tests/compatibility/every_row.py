"""``make compatibility``: what was tried with this package, and what became of it.

    python tests/compatibility/every_row.py                                 everything; minutes
    python tests/compatibility/every_row.py --quick                         a few rows; nothing is installed
    python tests/compatibility/every_row.py --only features/bf16 lightning  rows whose name begins so
    python tests/compatibility/every_row.py --only torch/newest             the newest PyTorch that pip finds

Writes ``docs/measured/compatibility.md``, with all rows but those of other versions of PyTorch, which are in
``docs/measured/torch_versions.md``; a part of a table is only printed. The exit code is 1 where a row is red, and 2
where no row has such a name.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from distributions import VERSIONS, alone, feature, of_version
from features import FEATURES
from pythons import OTHERS, on_path, other_python
from row import Row, Verdict
from strategies import STRATEGIES, strategy
from torches import TORCHES, of_torch

from measured import table, write_fragment

QUICK: Final = ("features/plain", "features/accumulate")
UNTESTED: Final = (
    Row("DeepSpeed", Verdict.UNTESTED, "it needs a GPU and is not installed"),
    Row("TPU, MPS, XPU, ROCm", Verdict.UNTESTED, "not at hand"),
)
TORCH: Final = "torch/"
Rows = Callable[[], Iterable[Row]]


def main() -> None:
    """Run the rows that are asked for, and write what became of them."""
    options = parse()
    with tempfile.TemporaryDirectory(prefix="compatibility-") as name:
        wanted = [
            (row, make) for row, make in known(Path(name)) if not options.only or row.startswith(tuple(options.only))
        ]
        rows: list[Row] = []
        torches: list[Row] = []
        for index, (row, make) in enumerate(wanted, 1):
            began = time.monotonic()
            say(f"[{index}/{len(wanted)}] {row} ...")
            (torches if row.startswith(TORCH) else rows).extend(told(each) for each in tried(row, make))
            say(f"    {time.monotonic() - began:.0f} s")
    if not options.only:
        rows += UNTESTED
        write_fragment("compatibility", "make compatibility", body(rows), packages=("pytorch-lightning",))
    if {f"{TORCH}{name}" for name in TORCHES} <= {row for row, _ in wanted}:
        write_fragment("torch_versions", f"make compatibility ARGS='--only {TORCH}'", body(torches))
    made = [*rows, *torches]
    red = [row for row in made if row.verdict is Verdict.RED]
    say(f"{len(made)} rows, {len(red)} red")
    sys.exit(1 if red else 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What was tried with this package, and what became of it.")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="rows whose name begins so")
    parser.add_argument("--quick", action="store_true", help="a few rows")
    options = parser.parse_args()
    if options.quick:
        options.only = [*options.only, *QUICK]
    names = [name for name, _ in known(Path())]
    if wrong := [each for each in options.only if not any(name.startswith(each) for name in names)]:
        say(f"no row's name begins with {' or '.join(map(repr, wrong))}; rows: {', '.join(names)}")
        sys.exit(2)
    return options


def known(directory: Path) -> Iterator[tuple[str, Rows]]:
    """Give every row by its name, in the order of the table."""
    for name, (what, _) in FEATURES.items():
        yield f"features/{name}", partial(of_feature, what, name, directory / name)
    for name in STRATEGIES:
        yield f"strategies/{name}", partial(of_strategy, name, directory / name)
    for version in VERSIONS:
        yield f"lightning/{version}", partial(of_version, version, directory / f"lightning-{version}")
    yield "distributions/pytorch_lightning alone", partial(of_alone, directory / "alone")
    for version in OTHERS:
        yield f"python/{version}", partial(of_python, version, directory)
    for name in TORCHES:
        yield f"{TORCH}{name}", partial(of_torch, name, directory / f"torch-{name}")


def of_feature(what: str, name: str, directory: Path) -> Iterator[Row]:
    """Try one kind of training in this environment."""
    yield Row(what, *feature(name, directory))


def of_strategy(name: str, directory: Path) -> Iterator[Row]:
    """Try one strategy in this environment."""
    yield strategy(name, directory)


def of_alone(directory: Path) -> Iterator[Row]:
    """Try the other distribution of Lightning without this one."""
    yield alone(directory)


def of_python(version: str, directory: Path) -> Iterator[Row]:
    """Try another Python on a run that this one records."""
    python = on_path(version)
    if python is None:
        yield Row(f"Python {version}", Verdict.UNTESTED, "there is none on this machine")
        return
    recorded = directory / "recorded"
    if not recorded.exists():
        feature("plain", recorded)
    runs = sorted(path.parent for path in recorded.rglob("manifest.rank00000.jsonl"))
    if not runs:
        yield Row(f"Python {version}", Verdict.RED, "there is no run to read: the plain fit recorded none")
        return
    yield from other_python(version, python, runs[-1], directory / f"python{version}")


def tried(name: str, make: Rows) -> Iterator[Row]:
    """Give the rows; a failure of the trial itself is a red row and stops none of the others."""
    try:
        yield from make()
    except Exception as error:  # noqa: BLE001 the other rows are worth having
        yield Row(name, Verdict.RED, f"{type(error).__name__}: {error}")


def told(row: Row) -> Row:
    """Say a row on the terminal, and give it back."""
    say(f"    {row.verdict.value.strip('*'):20} {row.what}: {row.saw}")
    return row


def body(rows: list[Row]) -> str:
    """Give the count of each verdict, and the table."""
    counts = [(verdict, sum(row.verdict is verdict for row in rows)) for verdict in Verdict]
    said = ", ".join(
        f"{count} {verdict.value.strip('*')}" for verdict, count in counts if count or verdict is Verdict.RED
    )
    cells = [[row.what, row.verdict.value, row.saw] for row in rows]
    return f"{len(rows)} rows: {said}.\n\n{table(['tried', 'became', 'saw'], cells)}"


def say(text: str) -> None:
    """Print at once: a row takes minutes."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
