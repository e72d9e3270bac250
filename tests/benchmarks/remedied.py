"""Whether `try` finds what an edit of a program gains: faults of tests/verdicts, edited and under a stopwatch.

    python tests/benchmarks/remedied.py --rounds 5 --only workers
    python tests/benchmarks/remedied.py --rounds 5 --keep build/remedied.json --minutes 8

Each remedy is tried on its training. Then the script as it is and a copy with the change as text run under
``tests/verdicts/bare.py``, which knows nothing of trials; one of both is stopped, in turns of half a second. With
``--keep`` a call goes on where the last one ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

sys.path.append(str(Path(__file__).resolve().parents[1] / "verdicts"))

from collections.abc import Sequence

import msgspec
from bare import SKIPPED
from page_commands import ENVIRONMENT, command
from part import Target, judged, progress, publish, targets

from lightning_memprof.compare.significance import PairedChange, paired_change
from measured import table

SLICE_S: Final = 0.5
VERDICTS: Final = Path(__file__).resolve().parents[1] / "verdicts"
STEPS: Final = 25


@dataclass(frozen=True)
class Case:
    """A remedy, a training of a script, and the remedy as a change of the script's text."""

    remedy: str
    script: str
    training: str
    before: str
    after: str


CASES: Final = (
    Case(
        "workers=2", "workers.py", "no_workers",
        '{} if fault else {"num_workers": 1, "persistent_workers": True}',
        '{"num_workers": 2, "persistent_workers": True}',
    ),
    Case(
        "workers=2", "loading.py", "slow_decode",
        "dataset, batch_size=BATCH, num_workers=1", "dataset, batch_size=BATCH, num_workers=2",
    ),
    Case(
        "persistent_workers", "workers.py", "restarted_workers",
        "Vectors(5), batch_size=BATCH, num_workers=2, persistent_workers=not fault",
        "Vectors(5), batch_size=BATCH, num_workers=2, persistent_workers=True",
    ),
    Case(
        "no_anomaly_detection", "process.py", "anomaly_detection",
        "vector_batches(128), detect_anomaly=fault", "vector_batches(128), detect_anomaly=False",
    ),
    Case("fused_optimizer", "optimizers.py", "looping_optimizer", "fused=self.fused", "fused=True"),
    Case("foreach_optimizer", "optimizers.py", "looping_optimizer", "foreach=False, fused=self.fused", "foreach=True"),
    Case(
        "gc_freeze", "process.py", "live_objects",
        "        self.recent: deque[Any] = deque(maxlen=24)\n",
        "        self.recent: deque[Any] = deque(maxlen=24)\n\n"
        "    def on_train_start(self, *_: Any) -> None:\n        import gc; gc.collect(); gc.freeze()\n",
    ),
    Case(
        "without_callback=ConditionProbe", "callbacks_and_hooks.py", "pre_hook",
        "[ConditionProbe()] if fault else []", "[]",
    ),
    Case(
        "threads=2", "process.py", "one_thread",
        "set_num_threads(1)\n    fit(", "set_num_threads(2)\n    fit(",
    ),
    Case(
        "precision=bf16-mixed", "forward.py", "dominant_module",
        "fault else 1024), DataLoader(Vectors(), batch_size=BATCH))",
        'fault else 1024), DataLoader(Vectors(), batch_size=BATCH), precision="bf16-mixed")',
    ),
    Case(
        "compile", "loops.py", "looped_attention", "    fit(model, DataLoader(Tokens(",
        "    for child in (model.embedding, *model.layers, model.head):\n"
        "        child.forward = torch.compile(child.forward)\n"
        "    fit(model, DataLoader(Tokens(",
    ),
    Case(
        "checkpointing", "memory_peaks.py", "activations",
        "LongContext(recompute=not fault)", "LongContext(recompute=True)",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What `try` and the stopwatch found: changes of the step time and of the peak, and the unchanged step in ms."""

    remedy: str
    training: str
    rounds: int
    tried: PairedChange
    tried_peak: float
    tried_ms: float
    timed: PairedChange
    timed_peak: float
    timed_ms: float

    @property
    def agrees(self) -> bool:
        """Whether the intervals of both have a common part."""
        return self.tried.low <= self.timed.high and self.timed.low <= self.tried.high

    @property
    def is_inside(self) -> bool:
        return self.tried.low <= self.timed.change <= self.tried.high


def timed(programs: Sequence[Path], training: str, directory: Path) -> list[tuple[float, float]]:
    """Return the mean step time in ms and the peak in MiB of programs that run in turns, without the time of others."""
    running = [
        subprocess.Popen(
            [sys.executable, str(VERDICTS / "bare.py"), str(program), training],
            cwd=directory, env=os.environ | ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        )
        for program in programs
    ]  # fmt: skip
    slices: dict[int, list[tuple[float, float]]] = {process.pid: [] for process in running}
    for process in running:
        os.killpg(process.pid, signal.SIGSTOP)
    while any(process.poll() is None for process in running):
        for process in running:
            if process.poll() is None:
                began = time.perf_counter()
                os.killpg(process.pid, signal.SIGCONT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(SLICE_S)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGSTOP)
                slices[process.pid].append((began, time.perf_counter()))
    found = []
    for process in running:
        figures = json.loads(process.communicate()[0].splitlines()[-1])
        first, last = figures["ends_s"][SKIPPED], figures["ends_s"][-1]
        spent = sum(max(min(end, last) - max(start, first), 0.0) for start, end in slices[process.pid])
        found.append((1e3 * spent / (len(figures["ends_s"]) - 1 - SKIPPED), figures["peak_mib"]))
    return found


def compared(case: Case, rounds: int) -> Row:
    """Try the remedy, then time the script and its edited copy."""
    with tempfile.TemporaryDirectory(prefix="remedied-") as name:
        directory = Path(name)
        script, edited = VERDICTS / "faults" / case.script, directory / "edited" / "faults" / case.script
        shutil.copytree(VERDICTS, directory / "edited", ignore=shutil.ignore_patterns("__pycache__"))
        source = script.read_text(encoding="utf-8")
        if source.count(case.before) != 1:
            raise SystemExit(f"{script}: {case.before!r} is there {source.count(case.before)} times, not once")
        edited.write_text(source.replace(case.before, case.after), encoding="utf-8")
        options = ["--remedy", case.remedy, "--rounds", str(rounds), "--steps", str(STEPS), "--format", "json"]
        shown = json.loads(command("try", *options, str(script), case.training, directory=directory))
        (found,) = shown["outcomes"]
        if found["problem"]:
            raise SystemExit(f"{case.remedy} on {case.training}: {found['problem']}")
        pairs = [timed((script, edited), case.training, directory) for _ in range(rounds)]
    before, after = ([pair[side][0] for pair in pairs] for side in (0, 1))
    peaks = [statistics.median(pair[side][1] for pair in pairs) for side in (0, 1)]
    interval = found["time"]
    return Row(
        case.remedy,
        case.training,
        rounds,
        PairedChange(change=interval["change"], low=interval["low"], high=interval["high"]),
        found["peak"],
        shown["step_ns"] / 1e6,
        paired_change(before, after),
        peaks[1] / peaks[0] - 1,
        statistics.median(before),
    )


def shown_change(found: PairedChange) -> str:
    return f"{found.change:+.0%} ({found.low:+.0%} to {found.high:+.0%})"


def fragment(found: Sequence[Row], *, trial: bool) -> str:
    agree, inside = sum(row.agrees for row in found), sum(row.is_inside for row in found)
    apart = statistics.median(row.tried_ms / row.timed_ms - 1 for row in found)
    goals = [
        Target("the intervals of `try` and of the stopwatch overlap", f"{agree} of {len(found)}", agree == len(found)),
        Target("the stopwatch's change is in the interval of `try`", f"{inside} of {len(found)}", None),
        Target("unchanged step of `try` against the stopwatch's: 1% or less more", f"{apart:+.1%}", apart <= 0.01),
    ]
    heading = [
        "remedy",
        "training",
        "`try`",
        "stopwatch",
        "peak, `try`",
        "peak, stopwatch",
        "step, ms",
        "stopwatch, ms",
    ]
    rows = [
        [
            f"`{row.remedy}`", row.training, shown_change(row.tried), shown_change(row.timed),
            f"{row.tried_peak:+.0%}", f"{row.timed_peak:+.0%}", f"{row.tried_ms:.1f}", f"{row.timed_ms:.1f}",
        ]
        for row in found
    ]  # fmt: skip
    counts = ", ".join(map(str, sorted({row.rounds for row in found})))
    words = f"{len(found)} remedies, {counts} rounds of {STEPS} steps each; the stopwatch ran as many times."
    return "\n\n".join([targets(judged(goals, trial=trial)), words, table(heading, rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="parts of remedies or trainings; nothing is written")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="what earlier calls measured, and this one")
    parser.add_argument("--minutes", type=float, default=1e9, metavar="M", help="begin no further one after these")
    parser.add_argument("--quick", action="store_true", help="two remedies, three rounds: nothing is judged or written")
    options = parser.parse_args()
    words = options.only or [""]
    cases = [case for case in CASES if any(word in f"{case.remedy} {case.training}" for word in words)]
    end = time.monotonic() + 60 * options.minutes
    cases = cases[:2] if options.quick else cases
    found = (
        msgspec.json.decode(options.keep.read_bytes(), type=list[Row]) if options.keep and options.keep.exists() else []
    )
    known = {(row.remedy, row.training) for row in found}
    with progress() as bar:
        task = bar.add_task("remedies", total=len(cases))
        for case in cases:
            if (case.remedy, case.training) not in known and time.monotonic() < end:
                found.append(compared(case, 3 if options.quick else options.rounds))
                if options.keep is not None:
                    options.keep.write_bytes(msgspec.json.encode(found))
            bar.update(task, advance=1, refresh=True)
    trial = options.quick or options.only is not None
    publish({"remedied": fragment(found, trial=trial)}, trial=trial)


if __name__ == "__main__":
    main()
