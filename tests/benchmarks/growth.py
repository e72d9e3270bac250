"""How cost grows: with modules, steps, ranks, and the size of a trace; a power is fitted to each cost.

    python tests/benchmarks/growth.py                          all, about eight minutes
    python tests/benchmarks/growth.py --quick                  small sizes, about two
    python tests/benchmarks/growth.py --only ranks traces

Writes ``docs/measured/growth-*.md``. Every figure is of a process of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import child
import curve
import made_trace
import part

from many_ranks import make_many_ranks
from measured import progress, table

HERE: Final = Path(__file__).resolve().parent
MIB: Final = 1 << 20
ROWS: Final = 16
FORMS: Final = {"s": ".3g", "MiB": ".1f", "us": ".0f", "ms": ".0f"}
Tick = Callable[[str], None]


@dataclass
class Costs:
    """What was measured over one size.

    Attributes:
        size: what the size counts.
        sizes: as far as they came.
        values: by name and unit of a cost, one a size; None where it was lost in the noise.
        shown: further columns of the table without a curve, by heading.
        targets: what was set out for the largest size.

    """

    size: str
    sizes: list[float] = field(default_factory=list)
    values: dict[tuple[str, str], list[float | None]] = field(default_factory=dict)
    shown: dict[str, list[str]] = field(default_factory=dict)
    targets: list[part.Target] = field(default_factory=list)

    def add(self, size: float, **costs: float) -> None:
        """Take the costs at one size; a name ends in its unit: ``show_s``, ``page_mib``."""
        self.sizes.append(size)
        for key, value in costs.items():
            name, _, unit = key.rpartition("_")
            column = self.values.setdefault((name.replace("_", " "), {"mib": "MiB"}.get(unit, unit)), [])
            column += [None] * (len(self.sizes) - 1 - len(column))
            # A difference of two times can be below zero; no power goes through that.
            column.append(value if value > 0 else None)

    def curves(self) -> list[curve.Curve]:
        """Give a curve of each cost through the sizes at which it was found."""
        found = []
        for (name, unit), column in self.values.items():
            known = [(size, value) for size, value in zip(self.sizes, column, strict=False) if value is not None]
            if len(known) > 1:
                found.append(curve.Curve(name, unit, *zip(*known, strict=True)))
        return found


def fitted(blocks: int, steps: int, rows: int, recording: str, *keep: str) -> dict[str, float]:
    """Fit once in a process of its own."""
    done = child.cost(str(HERE / "growth_fit.py"), *map(str, (blocks, steps, rows)), recording, *keep)
    return dict(json.loads(done.printed.splitlines()[-1]))


def command(*words: str) -> child.Cost:
    return child.cost("-m", "lightning_memprof", *words)


def grow_modules(sizes: Sequence[int], repeats: int, tick: Tick) -> Costs:
    costs = Costs("modules")
    for blocks in sizes:
        windows = [fitted(blocks, 14, ROWS, "window") for _ in range(repeats)]
        tick(f"{4 * blocks + 2} modules")
        tracked = fitted(blocks, 14, ROWS, "tracker")
        waiting = fitted(blocks, 10, ROWS, "waiting")
        costs.add(
            windows[0]["modules"],
            window_s=median(each["window_s"] for each in windows),
            window_end_s=median(each["stall_s"] for each in windows),
            tracked_step_s=tracked["window_s"],
            pulse_us=waiting["pulse_us"],
            window_on_disk_mib=windows[0]["disk_bytes"] / MIB,
            resident_mib=median(each["rss_bytes"] for each in windows) / MIB,
        )
        costs.shown.setdefault("bare step, ms", []).append(f"{1000 * waiting['step_s']:.0f}")
        costs.shown.setdefault("waiting step by bare", []).append(f"{waiting['ratio']:.2f} ± {waiting['off']:.2f}")
        tick(f"{4 * blocks + 2} modules")
    return costs


def grow_steps(sizes: Sequence[int], repeats: int, tick: Tick) -> Costs:
    costs = Costs("steps")
    for steps in sizes:
        with tempfile.TemporaryDirectory() as folder:
            # The largest is long enough for its noise to be small.
            again = 1 if steps >= 10_000 else repeats
            fits = [fitted(1, steps, 1, "window", f"{folder}/{number}") for number in range(again)]
            tick(f"{steps} steps")
            shown = command("show", f"{folder}/0")
        costs.add(
            steps,
            fit_s=min(each["fit_s"] for each in fits),
            end_of_fit_s=min(each["end_s"] for each in fits),
            fit_resident_mib=median(each["rss_bytes"] for each in fits) / MIB,
            on_disk_mib=fits[0]["disk_bytes"] / MIB,
            show_s=shown.cpu_s,
            show_resident_mib=shown.rss_bytes / MIB,
        )
        tick(f"{steps} steps")
    return costs


def grow_ranks(sizes: Sequence[int], repeats: int, tick: Tick) -> Costs:
    costs = Costs("ranks")
    for ranks in sizes:
        with tempfile.TemporaryDirectory() as folder:
            run = make_many_ranks(Path(folder), ranks, straggler=ranks // 3)
            size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
            page = Path(folder) / "page.html"
            shows = [command("show", str(run)) for _ in range(repeats)]
            tick(f"{ranks} ranks")
            reports = [command("report", str(run), "-o", str(page)) for _ in range(repeats)]
            costs.add(
                ranks,
                show_s=min(each.cpu_s for each in shows),
                report_s=min(each.cpu_s for each in reports),
                show_resident_mib=max(each.rss_bytes for each in shows) / MIB,
                report_resident_mib=max(each.rss_bytes for each in reports) / MIB,
                run_on_disk_mib=size / MIB,
                page_mib=page.stat().st_size / MIB,
            )
        wall, resident = min(each.wall_s for each in shows), max(each.rss_bytes for each in shows)
        costs.shown.setdefault("show, wall", []).append(f"{wall:.1f} s")
        if ranks == 4096:
            target = "4,096 ranks with four windows: shown within 10 s and 500 MB"
            met = wall < 10 and resident < 500 * part.MB
            costs.targets.append(part.Target(target, f"{wall:.1f} s, {resident / part.MB:.0f} MB", met))
        tick(f"{ranks} ranks")
    return costs


def grow_traces(sizes: Sequence[int], repeats: int, tick: Tick) -> Costs:
    costs = Costs("MB")
    for megabytes in sizes:
        with tempfile.TemporaryDirectory() as folder:
            trace, merged = Path(folder) / "trace.json", Path(folder) / "merged.json.gz"
            size, events = made_trace.write(trace, megabytes * part.MB)
            shows = [command("show", str(trace)) for _ in range(repeats if megabytes < 1000 else 1)]
            tick(f"{megabytes} MB")
            show = min(shows, key=lambda each: each.cpu_s)
            each_event = (show.rss_bytes - 64 * MIB) / events
            if megabytes == max(sizes):
                target = f"{megabytes} MB: shown within 64 MiB + 64 bytes an event"
                costs.targets.append(part.Target(target, f"64 MiB + {each_event:.0f} bytes", each_event <= 64))
            found = {"show_s": show.cpu_s, "show_resident_mib": show.rss_bytes / MIB}
            # The largest would take longer than all else together.
            if megabytes < 1000:
                merge = command("merge", str(trace), "-o", str(merged))
                found |= {"merge_s": merge.cpu_s, "merge_resident_mib": merge.rss_bytes / MIB}
            costs.add(size / part.MB, **found)
        tick(f"{megabytes} MB")
    return costs


@dataclass(frozen=True)
class Family:
    """One size and how to measure over it."""

    title: str
    measure: Callable[[Sequence[int], int, Tick], Costs]
    sizes: Sequence[int]
    quick: Sequence[int]


FAMILIES: Final = {
    "modules": Family("One window, by the model's modules", grow_modules, (7, 25, 75, 250, 750), (7, 25, 75)),
    "steps": Family("One fit, by its steps", grow_steps, (10, 100, 1_000, 10_000), (10, 100, 1_000)),
    "ranks": Family(
        "show and report, by ranks with four windows", grow_ranks, (2, 16, 64, 256, 1024, 4096), (2, 16, 64, 256)
    ),
    "traces": Family("One trace, by its size", grow_traces, (10, 40, 160, 640, 2600), (10, 40, 80)),
}


def fragment(costs: Costs, *, judged: bool) -> str:
    """Give the figures, and the exponents with what they say."""
    headings = [costs.size, *(f"{label}, {unit}" for label, unit in costs.values), *costs.shown]
    columns = [
        [f"{size:,.0f}" for size in costs.sizes],
        *(
            [_figure(value, unit) for value in [*column, *[None] * (len(costs.sizes) - len(column))]]
            for (_, unit), column in costs.values.items()
        ),
        *costs.shown.values(),
    ]
    curves = costs.curves()
    exponents = [
        [each.name, each.unit, f"{each.exponent:.2f}", _beyond(each), _word(each, judged=judged)] for each in curves
    ]
    parts = [
        table(headings, zip(*columns, strict=True)),
        table(["cost", "unit", "exponent", "beyond the fixed part", "no worse than linear"], exponents),
    ]
    return "\n\n".join([*parts, part.targets(part.judged(costs.targets, trial=not judged))] if costs.targets else parts)


def _figure(value: float | None, unit: str) -> str:
    return "-" if value is None else format(value, FORMS[unit])


def _beyond(found: curve.Curve) -> str:
    return "-" if found.beyond is None else f"{found.beyond:.2f}"


def _word(found: curve.Curve, *, judged: bool) -> str:
    return part.WORDS[found.linear if judged else None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--repeats", type=int, help="of what scatters (default 3; with --quick 1)")
    parser.add_argument("--quick", action="store_true", help="small sizes, once; nothing is judged, nothing written")
    options = parser.parse_args()
    failed: list[str] = []
    with progress() as bar:
        for name in options.only:
            family = FAMILIES[name]
            sizes = family.quick if options.quick else family.sizes
            task = bar.add_task(name, total=2 * len(sizes))

            def tick(at: str, task: Any = task) -> None:
                bar.update(task, advance=1, description=at)
                bar.refresh()

            try:
                costs = family.measure(sizes, options.repeats or (1 if options.quick else 3), tick)
            except (RuntimeError, OSError) as error:
                failed.append(f"{name}: {error}")
                continue
            print(f"{family.title}\n")
            part.publish({f"growth-{name}": fragment(costs, judged=not options.quick)}, trial=options.quick)
            print()
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
