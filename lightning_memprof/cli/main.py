"""Parse the command line, run one command, and turn every error into one line and an exit code."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentError, RawDescriptionHelpFormatter
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from typing import Final

from jsonargparse import ArgumentParser

from lightning_memprof import __version__
from lightning_memprof.cli.command import Command, say
from lightning_memprof.errors import MemprofError, ReportError, is_ctrl_c

COMMANDS: Final = (
    "demo", "show", "trigger", "merge", "view", "report", "compare", "export", "estimate", "try", "doctor",
    "run",
)  # fmt: skip
"""The commands in the order of the help; each is a module of this package, :data:`_MODULES` has the other names."""

PROGRAM: Final = "lightning-memprof"
# A keyword cannot be imported.
_MODULES: Final = {"try": "trial"}
# By command that starts a program, its options that may also stand after the program's name.
_WITH_PROGRAM: Final[Mapping[str, tuple[str, ...]]] = {
    "run": (),
    "try": (),
    "estimate": ("--device", "--device-memory", "--batch-size", "--what-if"),
}
FAILED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141
"""128 + the number of SIGINT or SIGPIPE, as a shell reports a program that a signal ended."""

_DESCRIPTION: Final = "Record a Lightning training run and show where its time and memory went."
_EPILOG: Final = """\
start here:
  lightning-memprof demo              train a small model and show the result
  lightning-memprof run train.py      record your program unchanged
  lightning-memprof show RUN          show a recorded run
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after the program name; None is ``sys.argv[1:]``.

    Returns:
        The exit code: 0, 1 for an error, 2 for a wrong command line, 130 after Ctrl-C.
    """
    own, program = split_program(sys.argv[1:] if argv is None else argv)
    try:
        try:
            if sys.stdout is None and not program:
                raise ReportError("standard output is closed; redirect it to a file or to /dev/null")
            return _execute(own, program)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as stop:
        # Lightning calls exit(1) while it handles Ctrl-C.
        status = INTERRUPTED if isinstance(stop.__context__, KeyboardInterrupt) else stop.code
        return status if isinstance(status, int) else FAILED
    except BrokenPipeError:
        # The interpreter flushes stdout again at exit, and would print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        if is_ctrl_c(error):
            return INTERRUPTED
        if "--debug" in own and not isinstance(error, ArgumentError):
            raise
        return _complain(error)


def split_program(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate our arguments from those of the program that a command starts, which our parser must not see.

    Returns:
        Our arguments, and those for the interpreter: ``[SCRIPT, ...]`` or ``["-m", MODULE, ...]``.
    """
    index = next((index for index, argument in enumerate(arguments) if not argument.startswith("-")), len(arguments))
    command = arguments[index] if index < len(arguments) else ""
    if command not in _WITH_PROGRAM:
        return list(arguments), []
    shared, valued = _WITH_PROGRAM[command], _with_value(_command(command))
    index += 1
    while index < len(arguments):
        argument = arguments[index]
        if argument == "--":
            return list(arguments[:index]), list(arguments[index + 1 :])
        if not argument.startswith("-") or (argument.startswith("-m") and not argument.startswith("--")):
            # A LightningCLI has none of our options.
            own, program = _shared(arguments[index:], valued if argument == "fit" else shared)
            return [*arguments[:index], *own], program
        index += 2 if argument in valued else 1
    return list(arguments), []


def _with_value(command: Command) -> set[str]:
    """Return the options of a command that take a value."""
    parser = _new_parser(command.description)
    command.add_options(parser)
    actions = parser._actions  # noqa: SLF001 argparse has no public list
    return {option for action in actions if action.nargs != 0 for option in action.option_strings}


def _shared(arguments: Sequence[str], names: Collection[str]) -> tuple[list[str], list[str]]:
    """Take options of ours with their values out of what follows a program's name."""
    own: list[str] = []
    program: list[str] = []
    index = 0
    while index < len(arguments):
        name, equals, value = arguments[index].partition("=")
        following = value if equals else "".join(arguments[index + 1 : index + 2])
        is_ours = name in names and (name != "--batch-size" or following == "max" or arguments[0] == "fit")
        length = 1 if equals or not is_ours else 2
        (own if is_ours else program).extend(arguments[index : index + length])
        index += length
    return own, program


def _execute(own: list[str], program: list[str]) -> int:
    # Only the command that runs is imported: reports must open without torch and Lightning, and soon.
    names = own[:1] if own and own[0] in COMMANDS else COMMANDS
    commands = {name: _command(name) for name in names}
    parser = _parser(commands)
    if not own:
        parser.print_help(sys.stderr)
        return USAGE
    arguments = parser.parse_args(own)
    options = arguments[arguments.command]
    options.program = program
    return commands[arguments.command].execute(options)


def _command(name: str) -> Command:
    command: Command = import_module(f"lightning_memprof.cli.{_MODULES.get(name, name)}").COMMAND
    return command


def _parser(commands: dict[str, Command]) -> ArgumentParser:
    parser = _new_parser(_DESCRIPTION)
    parser.epilog = _EPILOG
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}", help="show the version")
    subcommands = parser.add_subcommands(dest="command", metavar="COMMAND", title="commands", description=None)
    for name, command in commands.items():
        own = _new_parser(command.description, usage=command.usage)
        command.add_options(own)
        subcommands.add_subcommand(name, own, help=command.summary)
        own.prog = f"{PROGRAM} {name}"
    return parser


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
    """Print the error in one line; return the exit code."""
    is_usage = isinstance(error, ArgumentError)
    if isinstance(error, MemprofError):
        message = str(error)
    else:
        # Messages of other exceptions may have several lines.
        words = " ".join(str(error).split())
        kind = type(error).__name__
        message = f"{words}; see {PROGRAM} --help" if is_usage else f"{kind}: {words} (--debug shows the traceback)"
    say(f"{PROGRAM}: error: {message}", sys.stderr)
    return USAGE if is_usage else FAILED
