"""``lightning-memprof try``: measure remedies on the user's own program."""

from __future__ import annotations

import json
import shlex
from argparse import SUPPRESS, ArgumentError
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jsonargparse import ArgumentParser, Namespace

from lightning_memprof.artifacts.naming import TRIED
from lightning_memprof.cli.command import RUN_HELP, Command, add_format, sigterm_as_ctrl_c, write_document
from lightning_memprof.cli.progress import counting
from lightning_memprof.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_memprof.report.view import View
    from lightning_memprof.trial.runner import TrialOptions

_DESCRIPTION: Final = """\
Run a training program alternately with and without remedies, and show the
gain of each and whether the training stays the same. The program's files are
not changed. Without --remedy, a first, recorded run selects the remedies.
Ctrl-C and SIGTERM show the results so far.

  SCRIPT ARGS...        the program; everything after SCRIPT belongs to it
  -m MODULE ARGS...     the program as a module, as with python -m
  fit ARGS...           a LightningCLI without a script, with --config FILE
"""


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--remedy", metavar="NAME", action="append", help="try this remedy, as in workers=4; may be repeated"
    )
    parser.add_argument("--list", metavar="RUN", help=f"list the remedies for a recorded run: {RUN_HELP}")
    parser.add_argument("--run", metavar="RUN", help="try the remedies for a recorded run; its page shows the results")
    parser.add_argument("--batch-size", metavar="max", help="find the largest batch that fits instead, with real runs")
    parser.add_argument(
        "--limit", metavar="SIZE", help="memory for --batch-size max, as in 16GiB (default: free memory)"
    )
    parser.add_argument(
        "--rounds", metavar="N", type=int, help="measurements of each remedy (default: until it is decided)"
    )
    parser.add_argument(
        "--minutes",
        metavar="M",
        type=float,
        default=3.0,
        help="time limit of the whole trial, without --rounds (default: %(default)g)",
    )
    parser.add_argument("--steps", metavar="N", type=int, help="measured steps per run (default: about 2 s)")
    parser.add_argument(
        "--time-limit",
        metavar="S",
        type=float,
        default=600.0,
        help="time limit per run in seconds (default: %(default)s)",
    )
    parser.add_argument("--output", "-o", metavar="FILE", help="also write an HTML page")
    add_format(parser)
    # The page is always whole; other commands have the option.
    parser.add_argument("--all", action="store_true", help=SUPPRESS)


def _execute(options: Namespace) -> int:
    if options.list is not None:
        return _list(options)
    if not options.program:
        raise ArgumentError(None, "try: name a program, as in: lightning-memprof try train.py")
    output = None if options.output is None else Path(options.output)
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {output.parent}")
    from lightning_memprof.estimation.program import require_program
    from lightning_memprof.report.charts.trial import trial_chart
    from lightning_memprof.report.printers.html import render_document
    from lightning_memprof.report.printers.json import encode
    from lightning_memprof.report.sections.trial import trial_document
    from lightning_memprof.trial.runner import try_program

    require_program(options.program, "try")
    if options.batch_size is not None or options.limit is not None:
        return _largest(options, output)
    view = None if options.run is None else _opened(options.run)
    with counting("a first recorded run") as progress, sigterm_as_ctrl_c():
        wanted = _trial_options(options, progress)
        trial = try_program(options.program, wanted, None if view is None else view.findings)
    document = trial_document(trial)
    if view is not None:
        (view.run.directory / TRIED).write_text(json.dumps(encode(trial)), encoding="utf-8")
    if output is not None:
        output.write_text(render_document(document, [trial_chart(trial)]), encoding="utf-8")
    write_document(document, options.format, partial(encode, trial), is_full=True)
    if trial.is_stopped:
        raise KeyboardInterrupt
    return 0


def _largest(options: Namespace, output: Path | None) -> int:
    from lightning_memprof.account.estimate import parse_bytes
    from lightning_memprof.report.printers.html import render_document
    from lightning_memprof.report.printers.json import encode
    from lightning_memprof.report.sections.trial import batches_document
    from lightning_memprof.trial.batches import find_largest

    if options.batch_size != "max":
        given = "is missing" if options.batch_size is None else f"is {options.batch_size}"
        raise ConfigError(f"--batch-size {given}: --limit needs --batch-size max, which has no other value")
    if options.run is not None:
        raise ConfigError("--batch-size max: takes no remedies from a run; leave out --run")
    limit = None if options.limit is None else parse_bytes("--limit", options.limit)
    with counting("the program's own batch") as progress, sigterm_as_ctrl_c():
        found = find_largest(options.program, _trial_options(options, progress), limit)
    document = batches_document(found)
    if output is not None:
        output.write_text(render_document(document), encoding="utf-8")
    write_document(document, options.format, partial(encode, found), is_full=True)
    if found.is_stopped:
        raise KeyboardInterrupt
    return 0


def _trial_options(options: Namespace, progress: Callable[[str, int, int], None]) -> TrialOptions:
    from lightning_memprof.trial.runner import TrialOptions

    names = ("rounds", "minutes", "steps")
    given = {name: options[name] for name in names}
    return TrialOptions(remedies=options.remedy or (), time_limit_s=options.time_limit, progress=progress, **given)


def _opened(target: str) -> View:
    from lightning_memprof.report.opened import opened
    from lightning_memprof.report.view import View

    with opened([target]) as view:
        if isinstance(view, View):
            return view
    raise ConfigError(f"--run {target}: has files, but no run; name a log_dir or its memprofiler directory")


def _list(options: Namespace) -> int:
    from lightning_memprof.report.opened import opened
    from lightning_memprof.report.printers.json import encode
    from lightning_memprof.report.sections.trial import listing
    from lightning_memprof.trial.runner import advice

    with opened([options.list]) as view:
        found = advice(view.findings)
    program = shlex.join(options.program) or "SCRIPT ARGS..."
    document = listing(options.list, [(each.empty(), each.tolerance) for each in found], program)
    write_document(document, options.format, partial(encode, document), is_full=True)
    return 0


COMMAND: Final = Command(
    summary="measure the gain of remedies on your program",
    description=_DESCRIPTION,
    add_options=_add_options,
    execute=_execute,
    usage="lightning-memprof try [options] SCRIPT ARGS...",
)
