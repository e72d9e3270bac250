"""What recording costs: CPU and wall time of fits with and without it.

Two processes on one core take turns, step by step: one trains under a configuration, the other bare. A machine that is
slow for a second is slow for both, so each step is compared with the bare one beside it. Figures are medians over the
rounds; the processes change roles from round to round. The null pair trains bare in both: its distance from 1.00 is
what the machine makes up.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from tests.benchmarks import configurations, figures, pair, workload
else:
    # This script's directory is on the path and the repository's root is not: the installed package is measured.
    import configurations
    import figures
    import pair
    import workload

SMALL_STEPS = 500
SMALL_TURN = 20
IMPORTS = 10
IMPORT_PROGRAM = """
import sys, time
began = time.perf_counter()
import lightning_memprof
took = time.perf_counter() - began
print(1000 * took, *(name for name in ("torch", "lightning") if name in sys.modules))
"""


def main() -> None:
    options = parse()
    known = configurations.configurations()
    names = [figures.BARE, *(name for name in options.only or known if name not in (figures.BARE, "callback"))]
    stretches = figures.Stretches(configurations.WAIT, configurations.WARMUP, configurations.ACTIVE)
    deadline = time.monotonic() + 60 * options.minutes
    workers = pair.Pair()
    with progress() as bar:
        import_ms, loads = measure_import(bar)
        first = warm_up(bar, workers, stretches)
        apart = figures.Apart(import_ms, loads, measure_pulse(bar, workers, pairs=2 if options.quick else 3))
        rounds = measure_rounds(bar, workers, [workload.Job(name, options.steps) for name in names], options, deadline)
    workers.close()
    windowed = [name for name, configuration in known.items() if configuration.has_window]
    found = figures.rows(rounds, stretches, windowed)
    bare = [median(bare.cpu.steps) for pairs in rounds for _, bare in pairs]
    verdicts = figures.verdicts(found, apart, steps=options.steps, bare_step=median(bare))
    raw = {
        "environment": environment(),
        "arguments": {**vars(options), "out": str(options.out)},
        "schedule": asdict(stretches),
        "bare_step_ms": [1000 * step for step in bare],
        "first_window_ms": first,
        "apart": asdict(apart),
        "rounds": [[{"fit": asdict(fit), "bare": asdict(bare)} for fit, bare in pairs] for pairs in rounds],
        "figures": {name: asdict(row) for name, row in found.items()},
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }
    if options.out is not None:
        options.out.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    show(raw, found, verdicts)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = configurations.configurations()
    parser.add_argument("--repeats", type=int, help="rounds (default 5; with --quick 1)")
    parser.add_argument("--steps", type=int, default=60, help="steps of a fit (default %(default)s, at least 32)")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=known, help=f"of: {', '.join(known)}")
    parser.add_argument("--minutes", type=float, default=8, help="begin no round that would end later (default 8)")
    parser.add_argument("--quick", action="store_true", help="one round: about a minute where a step takes 18 ms")
    parser.add_argument("--out", type=Path, help="write every fit and every figure to this JSON file")
    options = parser.parse_args()
    if options.steps < 32:
        parser.error("--steps: the window ends with step 23 and some must follow it; give 32 or more")
    options.repeats = options.repeats or (1 if options.quick else 5)
    return options


def progress() -> Progress:
    columns = (TextColumn("{task.description:22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawn between fits only: drawing takes time on the core that is measured.
    return Progress(*columns, console=Console(stderr=True), auto_refresh=False)


def advance(bar: Progress, task: Any, **changes: Any) -> None:
    bar.update(task, **changes)
    bar.refresh()


def measure_import(bar: Progress) -> tuple[list[float], list[str]]:
    """Import the package in fresh processes; return milliseconds and what of torch and lightning came with it."""
    task = bar.add_task("import", total=IMPORTS)
    times, loads = [], set()
    for _ in range(IMPORTS):
        # Not in the repository's root: the installed package is meant.
        done = subprocess.run(
            [sys.executable, "-c", IMPORT_PROGRAM],
            check=True,
            capture_output=True,
            text=True,
            cwd=tempfile.gettempdir(),
        )
        took, *loaded = done.stdout.split()
        times.append(float(took))
        loads.update(loaded)
        advance(bar, task, advance=1)
    return times, sorted(loads)


def warm_up(bar: Progress, workers: pair.Pair, stretches: figures.Stretches) -> float:
    """Pay what is paid once in a process; return the milliseconds that the first window took to open."""
    task = bar.add_task("warming up", total=1)
    job = workload.Job("window", 32)
    first, _ = workers.fit(job, job)
    usual = median(first.wall.steps[index] for index in stretches.waiting)
    advance(bar, task, advance=1)
    return 1000 * sum(first.wall.steps[index] - usual for index in stretches.opening)


def measure_pulse(bar: Progress, workers: pair.Pair, *, pairs: int) -> dict[str, list[float]]:
    """Give microseconds that the pulse adds to a step that is nearly nothing; so does a callback without methods."""
    task = bar.add_task("pulse on a small model", total=3 * pairs)
    costs: dict[str, list[float]] = {"pulse": [], "callback": [], figures.BARE: []}
    for number in range(pairs):
        for name, found in costs.items():
            jobs = [workload.Job(each, SMALL_STEPS, SMALL_TURN, small=True) for each in (name, figures.BARE)]
            fit, bare = taking_turns(workers, *jobs, swapped=number % 2 == 1)
            found.append(1e6 * figures.added(fit, bare, turn=SMALL_TURN))
            advance(bar, task, advance=1)
    return costs


def measure_rounds(
    bar: Progress, workers: pair.Pair, jobs: list[workload.Job], options: argparse.Namespace, deadline: float
) -> list[list[tuple[workload.Fit, workload.Fit]]]:
    """Fit each job against a bare one, round after round, while there is time."""
    rounds: list[list[tuple[workload.Fit, workload.Fit]]] = []
    task = bar.add_task("rounds", total=options.repeats * len(jobs))
    for number in range(options.repeats):
        began = time.monotonic()
        rounds.append([])
        for job in jobs:
            advance(bar, task, description=f"round {number + 1}: {job.name}")
            bare = workload.Job(figures.BARE, job.steps)
            rounds[-1].append(taking_turns(workers, job, bare, swapped=number % 2 == 1))
            advance(bar, task, advance=1)
        if 2 * time.monotonic() - began > deadline:
            break
    return rounds


def taking_turns(
    workers: pair.Pair, job: workload.Job, bare: workload.Job, *, swapped: bool
) -> tuple[workload.Fit, workload.Fit]:
    if not swapped:
        return workers.fit(job, bare)
    second, first = workers.fit(bare, job)
    return first, second


def environment() -> dict[str, Any]:
    versions = {name: version(name) for name in ("torch", "lightning", "lightning-memprof")}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"python": platform.python_version(), **versions, "platform": platform.platform(), "cores": cores}


def show(raw: dict[str, Any], found: dict[str, figures.Row], verdicts: list[figures.Verdict]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    console.print(cost_table(raw, found))
    console.print(
        "Ratios to bare: CPU time of a step; fit: the whole call, on the CPU with its threads and child processes.\n"
        "ms: wall time that bare does not take. +-: half of the range over the rounds. bare: the null pair.\n"
    )
    bare = raw["bare_step_ms"]
    console.print(
        f"A bare step took {median(bare):.1f} ms of CPU time (medians of fits: {min(bare):.1f} to {max(bare):.1f})."
        f" The first window of a process took {raw['first_window_ms']:.0f} ms to open."
    )
    if (noise := figures.noise(found)) > 0.05:
        console.print(f"[yellow]The null pair is off by up to {noise:.0%}: single ratios are no better than that.")
    table = Table("target", "measured", "", box=None, header_style="bold", pad_edge=False)
    for verdict in verdicts:
        word = {True: "[green]met", False: "[red]missed", None: "[dim]-"}[verdict.met]
        table.add_row(verdict.target, verdict.measured, word)
    console.print()
    console.print(table)


def cost_table(raw: dict[str, Any], found: dict[str, figures.Row]) -> Table:
    facts, count = raw["environment"], len(raw["rounds"])
    title = (
        f"{raw['arguments']['steps']} steps, {count} round{'s' * (count != 1)}; {facts['cores']} cores, Python"
        f" {facts['python']}, torch {facts['torch']}, Lightning {facts['lightning']}"
    )
    table = Table(box=None, title=title, title_justify="left", header_style="bold", pad_edge=False)
    table.add_column("")
    for heading in (
        "waiting", "active", "after", "fit, CPU", "fit, wall", "fit start\nms", "window start\nms", "window end\nms",
        "fit end\nms", "own pulse\nus a step", "on disk\nMiB",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for name, row in found.items():
        ratios = (row.waiting, row.active, row.after, row.fit_cpu, row.fit_wall)
        stalls = (row.start_ms, row.opening_ms, row.closing_ms, row.end_ms)
        table.add_row(
            name,
            *(cell(values, ".2f", bounds=True) for values in ratios),
            *(cell(values, ".0f", bounds=True) for values in stalls),
            cell(row.pulse_us, ".1f"),
            cell([size / 2**20 for size in row.size_bytes], ".2f"),
        )
    return table


def cell(values: list[float], form: str, *, bounds: bool = False) -> str:
    if not values:
        return "-"
    text = format(median(values), form)
    return f"{text} +-{format(figures.spread(values), form)}" if bounds and len(values) > 1 else text


if __name__ == "__main__":
    main()
