"""The programs that analyse a trace, each to be run by `python -c PROGRAM TRACE`."""

from __future__ import annotations

from typing import Final, NamedTuple

# Prints seconds of CPU without imports, and how many events it saw.
TIMED: Final = """
import os, sys, time
path = sys.argv[1]
{setup}
begun = time.process_time()
{work}
print(time.process_time() - begun, {events}, end=" ")
"""
# Prints by function the calls and the seconds of it alone and with what it calls.
PROFILED: Final = """
import cProfile, json, os, sys
from profiles import spent
path = sys.argv[1]
{setup}
profile = cProfile.Profile()
profile.enable()
{work}
profile.disable()
print()
print(json.dumps([[name, each.calls, each.own, each.whole] for name, each in spent(profile).items()]))
"""
# Prints MiB of the largest resident size; that of `getrusage` would begin with the size of the process above this one.
RESIDENT: Final = """
for line in open("/proc/self/status"):
    if line.startswith("VmHWM"):
        print(int(line.split()[1]) / 1024)
"""
TELL: Final = """
def tell(done, of):
    print(f"\\r{100 * done / of:5.1f}%", end="", file=sys.stderr)
"""


class Analysis(NamedTuple):
    """What one program does: what it loads, what counts, and how it tells the events that it saw."""

    setup: str
    work: str
    events: str = "0"

    @property
    def timed(self) -> str:
        """The program that measures itself."""
        return TIMED.format(**self._asdict()) + RESIDENT

    @property
    def profiled(self) -> str:
        """The program that profiles itself; run it where `profiles` can be imported."""
        return PROFILED.format(**self._asdict())


PROGRAMS: Final = {
    "decode": Analysis(
        "from pathlib import Path\nfrom lightning_memprof.read.trace.columns import read_columns" + TELL,
        "found = read_columns(Path(path), tell)",
        "found.events",
    ),
    "ours": Analysis(
        "from pathlib import Path\nfrom lightning_memprof.account.trace.report import trace_report" + TELL,
        "found = trace_report(Path(path), tell)",
        "found.events",
    ),
    "hta": Analysis(
        "import logging; logging.disable()\nfrom hta.trace_analysis import TraceAnalysis",
        "found = TraceAnalysis(trace_files={0: path}, trace_dir=os.path.dirname(path))\n"
        "found.get_temporal_breakdown(visualize=False)\n"
        "found.get_comm_comp_overlap(visualize=False)\n"
        "found.get_idle_time_breakdown(ranks=[0], visualize=False)",
    ),
    "tensorboard": Analysis(
        "import logging; logging.disable()\nfrom torch_tb_profiler.profiler.data import RunProfileData",
        "RunProfileData.parse('worker0', None, path, os.path.dirname(path))",
    ),
}
