"""What recording costs: CPU and wall time of fits with and without it, for this package and its peers.

Two trainings on one core take turns, step by step: one under a configuration, the other bare. A machine that is slow
for a second is slow for both, so each step is compared with the bare one beside it. Figures are medians over the
rounds; the two change roles from round to round. The null pair trains bare in both: its distance from 1.00 is what the
machine makes up.

    python tests/benchmarks/bench.py --quick
    python tests/benchmarks/bench.py --workloads network --only default lightning --rounds 9
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

# The installed package is measured: the repository's root is not on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import aims
import configurations
import figures
import measuring
import networks
import part
import schedule
import told

from measured import progress

if TYPE_CHECKING:
    from rich.progress import Progress

PEERS = Path(".venv") / "peers" / "bin" / "python"
PEER = "finetuning-scheduler"
STRETCHES = figures.Stretches(schedule.WAIT, schedule.WARMUP, schedule.ACTIVE)
QUICK = ("bare", "default-idle", "default", "hand-gz", "lightning")


def main() -> None:
    options = parse()
    with_peers(options.peers)
    began = time.monotonic()
    with progress() as drawn:
        found = measure(options, drawn)
    publish(options, found)
    print(f"\n{time.monotonic() - began:.0f} s")


def publish(options: argparse.Namespace, found: told.Told) -> None:
    """Print the fragment, and write it if it is of the whole measurement."""
    says = {name: each.says for name, each in networks.workloads().items()}
    fragment = told.markdown(found, says, configurations.configurations())
    part_only = options.only is not None or options.workloads is not None
    packages = []
    with suppress(PackageNotFoundError):
        packages = [f"{PEER} {version(PEER)}"]
    part.publish({"fits": fragment}, trial=found.is_trial or part_only, packages=packages)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known, trained = configurations.configurations(), configurations.EVERYWHERE
    parser.add_argument("--rounds", type=int, help="of each workload (default 4 of the network, 2 of the others)")
    parser.add_argument("--steps", type=int, default=60, help="steps of a fit (default %(default)s, at least 32)")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=known, help=f"of: {', '.join(known)}")
    parser.add_argument("--workloads", nargs="+", metavar="NAME", choices=trained, help=f"of: {', '.join(trained)}")
    parser.add_argument("--minutes", type=float, default=15, help="begin no round that would end later (default 15)")
    parser.add_argument("--quick", action="store_true", help=f"a trial, one round of: {', '.join(QUICK)}")
    parser.add_argument("--peers", type=Path, default=PEERS, help="the Python that has the peers (default %(default)s)")
    options = parser.parse_args()
    if options.steps < 32:
        parser.error("--steps: the window ends with step 23 and some must follow it; give 32 or more")
    if options.peers != PEERS and not options.peers.exists():
        parser.error(f"--peers: there is no {options.peers}")
    return options


def with_peers(python: Path) -> None:
    """Become a process of the environment that has the peers, if there is one."""
    if python.exists() and python.absolute() != Path(sys.executable).absolute():
        os.execv(python, [str(python), *sys.argv])  # noqa: S606 the same program, without a shell


def measure(options: argparse.Namespace, drawn: Progress) -> told.Told:
    """Measure all parts in their order."""
    known = configurations.configurations()
    deadline = time.monotonic() + 60 * options.minutes
    found = told.Told(options.steps, is_trial=options.quick)
    missing = {name: each.needs for name, each in known.items() if not each.is_there}
    found.left_out += [f"`{name}` was not measured: `{needs}` is not installed" for name, needs in missing.items()]
    apart = aims.Apart()
    if options.only is None and options.workloads is None:
        apart = measure_apart(drawn, options, found, [name for name in measuring.PEAKS if name not in missing])
    chosen = ("network",) if options.quick else configurations.EVERYWHERE
    for workload in options.workloads or chosen:
        names = chosen_names(options, workload, set(missing))
        if len(names) > 1:
            measure_workload(drawn, plan_of(options, workload, names, deadline), found)
    found.apart = apart
    bare = found.bare_ms.get("network")
    apart_goals = aims.of_apart(apart, median(bare) / 1000 if bare else aims.REFERENCE_STEP)
    found.aims = [*found.aims, *part.judged(apart_goals, trial=found.is_trial)]
    return found


def measure_apart(drawn: Progress, options: argparse.Namespace, found: told.Told, names: list[str]) -> aims.Apart:
    """Measure what is no round; a part that fails is named and left out."""
    apart = measuring.measure_import(drawn)
    try:
        apart = replace(apart, added_us=measuring.measure_pulse(drawn, pairs=2 if options.quick else 3))
        quick = [name for name in names if name in {"bare", "default", "trace", "lightning"}]
        own, children = measuring.measure_peaks(drawn, quick if options.quick else names, 1 if options.quick else 3)
        return replace(apart, rss_bytes=own, children_bytes=children)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        found.left_out.append(f"not measured apart: {str(error).strip().splitlines()[-1]}")
        return apart


def measure_workload(drawn: Progress, plan: measuring.Plan, found: told.Told) -> None:
    """Fit one workload's rounds, and compare with the targets."""
    known = dict(configurations.configurations())
    tick = measuring.bar(drawn, plan.workload, plan.rounds * len(plan.names))
    bench = measuring.Bench(plan, known)
    try:
        bench.warm_up(STRETCHES)
        bench.rounds(tick)
        rounds = bench.found
        windowed = [name for name, each in known.items() if each.has_window]
        rows = figures.rows(rounds.pairs, STRETCHES, windowed)
        goals = list(aims.of_workload(plan.workload, rows))
        if plan.workload == "network":
            goals += aims.of_whole_fits(rows, plan.steps)
            found.first_window_ms = rounds.first_window_ms
    finally:
        bench.close()
    if rows:
        found.rows[plan.workload] = rows
        found.bare_ms[plan.workload] = [1000 * median(bare.cpu.steps) for _, bare in rounds.pairs]
        found.rounds[plan.workload] = rounds.count
        found.aims = [*found.aims, *part.judged(goals, trial=found.is_trial)]
    found.left_out += [f"`{name}` on {plan.workload} failed: {why}" for name, why in rounds.failed.items()]
    found.left_out += [f"`{name}` on {plan.workload}: {why}" for name, row in rows.items() for why in row.faults]


def plan_of(options: argparse.Namespace, workload: str, names: list[str], deadline: float) -> measuring.Plan:
    known = networks.workloads()[workload]
    rounds = options.rounds or (1 if options.quick else known.rounds)
    return measuring.Plan(workload, known.ranks, names, options.steps, rounds, deadline)


def chosen_names(options: argparse.Namespace, workload: str, missing: set[str]) -> list[str]:
    """Give the configurations of a workload, the one that records nothing first."""
    asked = options.only or (QUICK if options.quick else None)
    return [
        name
        for name, each in configurations.configurations().items()
        if workload in each.workloads and name not in missing and (asked is None or name in {*asked, figures.BARE})
    ]


if __name__ == "__main__":
    main()
