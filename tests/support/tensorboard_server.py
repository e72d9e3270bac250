"""A real TensorBoard with the plug-ins that are installed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SECONDS_TO_START = 90
_SERVING = re.compile(r"(http://[^/\s]+:\d+)/")


@contextmanager
def tensorboard(logdir: Path, *options: str, offline: str = "always") -> Iterator[str]:
    """Serve ``logdir`` on a free port of 127.0.0.1; give the address, without a slash at its end.

    Args:
        logdir: what TensorBoard is to show.
        options: further command line options.
        offline: ``--memprof_offline``; the profiler tab's page does not even try other hosts where it is "always".

    """
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--host", "127.0.0.1", "--port", "0"]
    command += ["--load_fast", "false", "--reload_interval", "1", "--memprof_offline", offline, *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=environment,
        text=True,
        start_new_session=True,
    )
    said: list[str] = []

    def listen() -> None:
        assert process.stdout is not None
        said.extend(process.stdout)

    def address() -> str | None:
        found = _SERVING.search("".join(list(said)))
        return found and found[1]

    # The pipe is emptied for as long as it lives, so that what TensorBoard logs never holds it up.
    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        deadline = time.monotonic() + _SECONDS_TO_START
        while (url := address()) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"TensorBoard did not start: {''.join(said)[-2000:]}")
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        # torch-tb-profiler reads each run in a process of its own, which outlives TensorBoard.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        listener.join(5)
