"""``lightning-memprof compare``: two runs, traces or snapshots side by side, with limits for CI."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

from jsonargparse import ArgumentParser, Namespace

from lightning_memprof.cli.command import Command, add_format, opened_target, write_document
from lightning_memprof.errors import ConfigError

if TYPE_CHECKING:
    from lightning_memprof.compare.model import Side

_FAILED: Final = 1


def _add_options(parser: ArgumentParser) -> None:
    kinds = "a run, a trace, a snapshot, or a directory of traces or snapshots"
    parser.add_argument("A", help=f"the baseline: {kinds}")
    parser.add_argument("B", help="the candidate: a target of the same kind")
    parser.add_argument(
        "--fail-on",
        metavar="LIMIT",
        nargs="+",
        action="extend",
        help="exit with 1 where B exceeds a limit, as in 'peak_allocated_bytes>5%%' 'step_ns>2ms'; in quotes",
    )
    add_format(parser)


def _execute(options: Namespace) -> int:
    """Print the comparison; exit code 1 where a limit is exceeded or cannot be checked."""
    from lightning_memprof.compare.comparison import check, compare, parse_limit
    from lightning_memprof.report.printers.json import comparison_to_json
    from lightning_memprof.report.sections.comparison import comparison_document

    limits = [parse_limit(limit) for limit in options.fail_on or ()]
    with _side(options.A) as before, _side(options.B) as after:
        comparison = compare(before, after)
    outcomes = [check(comparison, limit) for limit in limits]
    document = comparison_document(comparison, outcomes)
    as_json = partial(comparison_to_json, comparison, document.verdict, outcomes)
    write_document(document, options.format, as_json, is_full=True)
    return _FAILED if any(outcome.status == "fail" for outcome in outcomes) else 0


@contextmanager
def _side(target: str) -> Iterator[Side]:
    """Read one of the two targets."""
    from lightning_memprof.compare.sides import run_side, snapshots_side, traces_side
    from lightning_memprof.read.run.model import Run

    with opened_target(target) as found:
        if isinstance(found, Run):
            yield run_side(found, target)
        elif found.traces and found.snapshots:
            raise ConfigError(f"{target}: has traces and snapshots; name the files of one kind, or one file")
        elif found.traces:
            yield traces_side(found.traces, target)
        else:
            yield snapshots_side(found.snapshots, target)


COMMAND: Final = Command(
    summary="compare two runs, with limits for CI",
    description="Compare two runs, traces or snapshots: differences beyond noise.",
    add_options=_add_options,
    execute=_execute,
)
