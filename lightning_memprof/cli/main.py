"""Parse the command line, load the one sub-command it names, and turn every error into one line and an exit code."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentError, RawDescriptionHelpFormatter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jsonargparse import ArgumentParser, Namespace

from lightning_memprof import __version__
from lightning_memprof.cli.closed_output import ClosedOutput
from lightning_memprof.errors import MemprofError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

PROGRAM: Final = "lightning-memprof"
FAILED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141
"""128 + the number of the signal, as a shell reports a program that SIGINT or SIGPIPE ended."""

_DESCRIPTION: Final = "Record a Lightning training and show where its time and memory went."
_EPILOG: Final = """\
start here:
  lightning-memprof demo              train a small model and see what comes out
  lightning-memprof run train.py      record your own program as it is
  lightning-memprof show RUN          look at what was recorded
"""
_TARGET_HELP: Final = (
    "a log_dir, its memprofiler directory or a folder with one run in it; or traces, snapshots and folders of them"
)
_RUN_DESCRIPTION: Final = """\
Run a training program and record every Trainer in it, with no change to the
program: callback and profiler attach themselves, and what the program
configured itself wins. Exit code, output and signals are the program's own.

  SCRIPT ARGS...        the program; everything after SCRIPT is for it alone
  -m MODULE ARGS...     the program as a module, as with python -m

several processes:
  lightning-memprof run -m torch.distributed.run --nproc-per-node 2 train.py
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after the program's name; ``sys.argv[1:]`` where none are given.

    Returns:
        The exit code: 0, 1 for an error, 2 for a wrong command line, 130 after Ctrl-C.

    """
    own, program = _split(list(sys.argv[1:] if argv is None else argv))
    if sys.stdout is None and not program:
        sys.stdout = ClosedOutput()
    try:
        try:
            return _execute(own, program)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as stop:
        # Lightning turns Ctrl-C into exit(1) while it handles the KeyboardInterrupt.
        status = INTERRUPTED if isinstance(stop.__context__, KeyboardInterrupt) else stop.code
        return status if isinstance(status, int) else FAILED
    except BrokenPipeError:
        # The interpreter flushes stdout once more at its exit, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        if "--debug" in own and not isinstance(error, ArgumentError):
            raise
        return _complain(error)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Part our arguments from those of the program that ``run`` starts, which no parser of ours may look at."""
    command = next((index for index, argument in enumerate(arguments) if not argument.startswith("-")), None)
    if command is None or arguments[command] != "run":
        return arguments, []
    from lightning_memprof.cli.run import split_program

    options, program = split_program(arguments[command + 1 :])
    return [*arguments[: command + 1], *options], program


def _execute(own: list[str], program: list[str]) -> int:
    parser = _parser()
    if not own:
        parser.print_help(sys.stderr)
        return USAGE
    arguments = parser.parse_args(own)
    if arguments.command == "run" and not program:
        raise ArgumentError(None, "run: name a program, as in: lightning-memprof run train.py")
    return _dispatch(arguments.command, arguments[arguments.command], program)


def _dispatch(command: str, options: Namespace, program: list[str]) -> int:
    """Load one sub-command and call it; a report must open where neither torch nor Lightning can be imported."""
    if command == "demo":
        from lightning_memprof.cli.demo import demo

        return demo(Path(options.out))
    if command in {"show", "watch"}:
        return _dispatch_page(command, options)
    if command == "trigger":
        from lightning_memprof.cli.trigger import trigger

        return trigger(options.RUN, active=options.active, warmup=options.warmup, timeout=options.timeout)
    if command in {"compare", "export", "merge", "report", "view"}:
        return _dispatch_timeline(command, options)
    if command == "doctor":
        from lightning_memprof.cli.doctor import doctor

        return doctor()
    from lightning_memprof.cli.run import run

    return run(program, None if options.config is None else Path(options.config))


def _dispatch_page(command: str, options: Namespace) -> int:
    if command == "watch":
        from lightning_memprof.cli.watch import watch

        return watch(options.RUN, interval=options.interval, once=options.once)
    from lightning_memprof.cli.show import OpenOptions, show

    return show(options.TARGET, options.format, OpenOptions(rank=options.rank, window=options.window))


def _dispatch_figures(command: str, options: Namespace) -> int:
    if command == "compare":
        from lightning_memprof.cli.compare import CompareOptions, compare

        return compare(options.A, options.B, CompareOptions.of(options))
    from lightning_memprof.cli.export import ExportOptions, export

    return export(options.TARGET, ExportOptions.of_command(options))


def _dispatch_timeline(command: str, options: Namespace) -> int:
    if command in {"compare", "export"}:
        return _dispatch_figures(command, options)
    if command == "report":
        from lightning_memprof.cli.report import report

        return report(options.TARGET, None if options.output is None else Path(options.output), open_it=options.open)
    if command == "merge":
        from lightning_memprof.cli.merge import MergeOptions, merge

        return merge(options.RUN, MergeOptions.of(options))
    from lightning_memprof.cli.view import ViewOptions, view

    return view(options.TARGET, ViewOptions.of(options))


def _parser() -> ArgumentParser:
    parser = _new_parser(_DESCRIPTION)
    parser.epilog = _EPILOG
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}", help="show the version")
    commands = parser.add_subcommands(dest="command", metavar="COMMAND", title="commands", description=None)

    demo = _new_parser("Train a small GPT on Python's source files, record it, show what came out.")
    demo.add_argument("--out", metavar="DIR", default="memprof-demo", help="where the run goes (default: %(default)s)")
    commands.add_subcommand("demo", demo, help="train a small model, record it, show what came out")

    show = _new_parser("Show where time and memory went: in a run, or in traces and snapshots.")
    _show_options(show)
    commands.add_subcommand("show", show, help="show a run, traces or snapshots")

    trigger = _new_parser("Let a training that is running record a window, on all its ranks at the same step.")
    _trigger_options(trigger)
    commands.add_subcommand("trigger", trigger, help="let a running training record a window now")

    merge = _new_parser("Merge all that a run recorded in its windows, or trace files, into one timeline in one file.")
    _merge_options(merge)
    commands.add_subcommand("merge", merge, help="merge a run, or traces, into one file")

    view = _new_parser("Open a run's timeline, or traces, in the Perfetto UI; no network is needed.")
    _view_options(view)
    commands.add_subcommand("view", view, help="open a run's timeline, or traces, in a browser")

    watch = _new_parser("Watch a run as it goes on, from its files alone: also one on another node.")
    _watch_options(watch)
    commands.add_subcommand("watch", watch, help="watch a run as it goes on")

    report = _new_parser("Write one HTML page of a run, or of traces and snapshots, that needs no network.")
    _report_options(report)
    commands.add_subcommand("report", report, help="write a run, traces or snapshots as one HTML page")

    figures = _add_figures(commands)

    doctor = _new_parser("Say what is installed, and what can be recorded here and what not, and why.")
    commands.add_subcommand("doctor", doctor, help="say what can be recorded on this machine")

    run = _new_parser(_RUN_DESCRIPTION, usage=f"{PROGRAM} run [--config FILE] SCRIPT ARGS...")
    run.add_argument("--config", metavar="FILE", default=None, help="a YAML file that says what to record")
    commands.add_subcommand("run", run, help="run a training program as it is, and record it")
    named = {
        "demo": demo,
        "show": show,
        "trigger": trigger,
        "merge": merge,
        "view": view,
        "watch": watch,
        "report": report,
        **figures,
        "doctor": doctor,
        "run": run,
    }
    for name, command in named.items():
        command.prog = f"{PROGRAM} {name}"
    return parser


def _show_options(show: ArgumentParser) -> None:
    show.add_argument("TARGET", nargs="+", help=_TARGET_HELP)
    show.add_argument(
        "--format",
        choices=["terminal", "json", "markdown"],
        default="terminal",
        help="a page for people, JSON for programs, Markdown for an issue (default: %(default)s)",
    )
    show.add_argument("--rank", type=int, default=None, metavar="R", help="look at this global rank")
    show.add_argument("--window", type=int, default=None, metavar="N", help="only this window of a run")


def _watch_options(watch: ArgumentParser) -> None:
    watch.add_argument("RUN", help="a log_dir, its memprofiler directory, or a folder with one run in it")
    watch.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="seconds between two looks (default: %(default)s)"
    )
    watch.add_argument("--once", action="store_true", help="look once, print the page, and end")


def _trigger_options(trigger: ArgumentParser) -> None:
    trigger.add_argument("RUN", help="a log_dir, its memprofiler directory, or a folder with one run in it")
    trigger.add_argument("--active", type=int, default=None, metavar="N", help="steps to record (default: the run's)")
    trigger.add_argument("--warmup", type=int, default=None, metavar="N", help="steps before that (default: the run's)")
    trigger.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="seconds to wait for rank 0 (default: %(default)s)"
    )


def _merge_options(merge: ArgumentParser) -> None:
    merge.add_argument("RUN", nargs="+", help="a run as for show, or trace files and folders of them")
    merge.add_argument("-o", "--output", metavar="FILE", help="the result; compressed if it ends in .gz")
    merge.add_argument("--window", type=int, default=None, metavar="N", help="only this window of the run")
    merge.add_argument("--ranks", metavar="LIST", default=None, help="only these global ranks of the run, as in 0,3-5")


def _report_options(report: ArgumentParser) -> None:
    report.add_argument("TARGET", nargs="+", help=_TARGET_HELP)
    report.add_argument(
        "-o", "--output", metavar="FILE", default=None, help="the page (default: report.html in the run's directory)"
    )
    report.add_argument("--open", action="store_true", help="open it in a browser")


def _add_figures(commands: Any) -> dict[str, ArgumentParser]:
    compare = _new_parser("Put two runs, traces or snapshots side by side: what differs beyond noise.")
    _compare_options(compare)
    commands.add_subcommand("compare", compare, help="put two runs side by side, with limits for CI")
    export = _new_parser("Write what was recorded in a form that other tools read.")
    _export_options(export)
    commands.add_subcommand("export", export, help="write tables, flame graphs or a snapshot for other tools")
    return {"compare": compare, "export": export}


def _compare_options(compare: ArgumentParser) -> None:
    what = "a run, a trace, a snapshot, or a directory of one of these"
    compare.add_argument("A", help=f"{what}: what is compared with")
    compare.add_argument("B", help=f"{what}: what is compared")
    compare.add_argument(
        "--fail-on",
        metavar="LIMIT",
        nargs="+",
        action="extend",
        help="exit with 1 where B breaks a limit, as in 'peak_allocated_bytes>5%%' 'step_ns>2ms'; in quotes",
    )
    compare.add_argument("--format", choices=["terminal", "json", "markdown"], default="terminal", help="for whom")


def _export_options(export: ArgumentParser) -> None:
    export.add_argument("TARGET", help="a run as for show, a trace, a snapshot, or a directory of one of these")
    forms = ["csv", "parquet", "speedscope", "flamegraph", "memory_viz"]
    export.add_argument("--to", metavar="FORM", default=None, choices=forms, help=f"one of {', '.join(forms)}")
    export.add_argument(
        "-o", "--output", metavar="OUT", default=None, help="the file, or the directory for tables (default: by TARGET)"
    )
    export.add_argument(
        "--of", choices=["time", "memory"], default=None, help="what a flame graph is of (default: what TARGET is of)"
    )


def _view_options(view: ArgumentParser) -> None:
    view.add_argument(
        "TARGET",
        nargs="*",
        default=["."],
        help="a run as for show, or trace files and folders of them (default: this directory)",
    )
    view.add_argument("--steps", metavar="A-B", default=None, help="open only these steps, as in 2-3 or 2,5-7")
    view.add_argument(
        "--trace-processor", metavar="PATH", default=None, help="start this trace_processor_shell, for large traces"
    )
    view.add_argument("--port", type=int, metavar="N", default=0, help="port of the page (default: a free one)")
    view.add_argument("--no-browser", action="store_true", help="only serve the page, and say where")
    view.add_argument("--tensorboard", action="store_true", help="start TensorBoard on the log directory instead")


def _new_parser(description: str, *, usage: str | None = None) -> ArgumentParser:
    parser = ArgumentParser(
        prog=PROGRAM,
        usage=usage,
        description=description,
        exit_on_error=False,
        allow_abbrev=False,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _complain(error: Exception) -> int:
    """Say in one line what is wrong, and return the exit code for it."""
    status = FAILED
    if isinstance(error, ArgumentError):
        message, status = f"{error}; see {PROGRAM} --help", USAGE
    elif isinstance(error, MemprofError):
        message = str(error)
    else:
        message = f"{type(error).__name__}: {error} (--debug shows where)"
    print(f"{PROGRAM}: error: {_inert(' '.join(message.split()))}", file=sys.stderr)
    return status


def _inert(message: str) -> str:
    """Make control characters visible: the name of a file must not steer the terminal."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape", "backslashreplace").decode("ascii")
        for character in message
    )
