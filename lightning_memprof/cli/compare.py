"""``lightning-memprof compare``: two runs, traces or snapshots side by side, with limits for CI."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, get_args

from jsonargparse import Namespace

if TYPE_CHECKING:
    from lightning_memprof.analysis.compare.model import Side
    from lightning_memprof.report.compare import Line

__all__ = ["FORMATS", "CompareOptions", "compare"]

Format = Literal["terminal", "json", "markdown"]
FORMATS: Final[tuple[Format, ...]] = get_args(Format)
_BROKEN: Final = 1
_WIDTH: Final = 80


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """How it is shown, and the limits that B has to keep."""

    format: Format = "terminal"
    fail_on: Sequence[str] = ()

    @classmethod
    def of(cls, options: Namespace) -> CompareOptions:
        """Take them from the command line."""
        return cls(format=options.format, fail_on=tuple(options.fail_on or ()))


def compare(a: str, b: str, options: CompareOptions | None = None) -> int:
    """Show two runs, traces or snapshots side by side.

    Args:
        a: what is compared with: a run, a trace, a snapshot, or a directory of traces or of snapshots; runs also by
            URL.
        b: what is compared.
        options: how it is shown, and limits.

    Returns:
        The exit code: 1 where a limit is broken or could not be checked.

    Raises:
        ArtifactError: one of them is missing or cannot be read.
        ConfigError: they are of two kinds, or a limit is none.

    """
    from lightning_memprof.analysis.compare.comparison import compare as compare_sides
    from lightning_memprof.analysis.compare.limits import check, parse_limit
    from lightning_memprof.report.compare import comparison_document, comparison_lines, comparison_markdown

    options = options or CompareOptions()
    limits = [parse_limit(text) for text in options.fail_on]
    with _side(a) as before, _side(b) as after:
        comparison = compare_sides(before, after)
    outcomes = [check(comparison, limit) for limit in limits]
    if options.format == "json":
        sys.stdout.write(json.dumps(comparison_document(comparison, outcomes), indent=2, allow_nan=False) + "\n")
    elif options.format == "markdown":
        sys.stdout.write(comparison_markdown(comparison, outcomes))
    else:
        _print(comparison_lines(comparison, outcomes))
    return _BROKEN if any(outcome.is_broken for outcome in outcomes) else 0


@contextmanager
def _side(given: str) -> Iterator[Side]:
    """Read one of the two."""
    from lightning_memprof.analysis.compare.sides import run_side, snapshots_side, traces_side
    from lightning_memprof.analysis.run.fetch import local_run
    from lightning_memprof.analysis.run.load import load_run
    from lightning_memprof.analysis.run.targets import find_targets
    from lightning_memprof.errors import ConfigError

    if "://" not in given:
        targets = find_targets([Path(given)])
        if targets.traces and targets.snapshots:
            raise ConfigError(f"{given}: has traces and snapshots; name the files of one kind, or one file")
        if targets.traces:
            yield traces_side(targets.traces, given)
            return
        if targets.snapshots:
            yield snapshots_side(targets.snapshots, given)
            return
    with local_run(given) as found:
        yield run_side(replace(load_run(found.path), url=found.url), given)


def _print(lines: Sequence[Line]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout, width=_WIDTH, highlight=False, markup=False)
    # Written by us: where the reader of a pipe has gone, rich would end the process.
    with console.capture() as captured:
        for line in lines:
            console.print(Text.assemble(*line), soft_wrap=False)
    page = captured.get()
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(page.encode(encoding, "backslashreplace").decode(encoding))
