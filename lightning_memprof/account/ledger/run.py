"""The time ledger of a run: phases of every step from the pulse, divided among actions, modules and operators."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from lightning_memprof.account.ledger.host import corrected
from lightning_memprof.account.ledger.model import Stall, TimeLedger, TimeLine, scaled, total
from lightning_memprof.account.memory.activations import paths_around
from lightning_memprof.account.parts import PHASE_PARTS, Part
from lightning_memprof.account.steps.events import MODULES, action_name, is_profiler, meeting, part_of, rank_events
from lightning_memprof.account.steps.statistics import TypicalSteps, core_waits, typical_steps
from lightning_memprof.artifacts.manifest import DataLoaderFacts
from lightning_memprof.artifacts.series import COMPILATION, GC_PAUSE, PHASES
from lightning_memprof.read.run.model import Rank

# Number, ns, and ns by phase.
_Step = tuple[int, float, "Mapping[str, float | None]"]
# A step of this many times the median is a stall, unless a third of the steps are as long: then that is a usual step.
STALL: Final = 2
RARE: Final = 1 / 3
# The name of the data wait between epochs, and the epochs that show it.
RESTART: Final = "workers restart"
EPOCHS: Final = 3
# The name of the time of forward and backward in which no kernel of theirs runs.
IDLE: Final = "device idle"
# The phases whose work is the same in every step. A long fetch or callback is a separate line.
_STEADY: Final = (Part.FORWARD, Part.BACKWARD, Part.OPTIMIZER)
# The parts of a trace that are forward, and backward: ranks meet in `self.log`.
_PASSES: Final[Mapping[Part, frozenset[Part]]] = {
    Part.FORWARD: frozenset({Part.RANK_WAIT, *(part for part in Part if part.phase == Part.FORWARD.phase)}),
    Part.BACKWARD: frozenset(part for part in Part if part.phase == Part.BACKWARD.phase),
}
# The Trainer's work around an optimizer takes 1–2 ms.
_BESIDE_OPTIMIZER_NS: Final = 2_000_000
# One call with this part of the time of all recorded calls of a module, of two or more, is a stall.
_STALLED: Final = 0.75
# The parts in which ranks meet.
_MEETING: Final = (*_STEADY, Part.UNTRACKED, Part.RANK_WAIT)
_CLIPPING: Final = ".configure_gradient_clipping"
_SCHEDULER: Final = ".lr_scheduler_step"
# Actions inside forward, backward and optimizer that are separate lines.
_WITHIN: Final = (Part.GC_PAUSES, Part.COMPILE, Part.METRIC, Part.MODULE_HOOK, Part.CALLBACK, Part.SELF_LOG)
_WITHOUT_NAME: Final[Mapping[str, Part]] = {GC_PAUSE: Part.GC_PAUSES, COMPILATION: Part.COMPILE}
# Parts whose lines have the names of their actions.
_NAMED: Final = frozenset(
    {Part.DATA_WAIT, Part.TRANSFER, Part.CALLBACK, Part.VALIDATION, Part.CHECKPOINT, Part.LOGGING}
)


def run_ledger(
    rank: Rank,
    host: TimeLedger | None = None,
    waits_ns: Mapping[str, float] | None = None,
    device: TimeLedger | None = None,
) -> TimeLedger | None:
    """Return the time ledger of a rank's mean step, None where its pulse has no timed step.

    The steps are those outside windows, without the first, as long as enough remain. Each phase of the pulse is divided
    among its owners: data wait by the hook timings of the windows; callbacks, hooks, transfers, validation and
    checkpoints by the action totals of the whole run; forward, backward and optimizer by ``host``, less the cost of
    recording, with the program's hooks on modules. On a device's clock these have the kernels that they launched, by
    ``device``, and the rest of the phase, in which the device waits. The owners of a phase never sum to more than the
    phase. The wait for a core is a separate line; no phase includes it.

    Args:
        rank: the rank.
        host: the host ledger of a trace of the rank.
        waits_ns: wait for a late rank by phase, and that in ``self.log`` and metrics by their part.
        device: the device ledger of a trace of the rank.
    """
    typical = typical_steps(rank)
    if typical is None:
        return None
    steady = _steady_phases(rank)
    steps = _running(rank, typical, steady) if typical.clock == "host" else typical.steps
    median = statistics.median(duration for _, duration, _ in typical.steps)
    stalls, stalled = _stalls(steps, steady)
    mean, whole_mean = _mean(steps), _mean(typical.steps)
    named = _named(rank)
    stalled = _without_compiling(stalled, named)
    logged = _logged(named)
    inside = host if host is not None and typical.clock == "host" else None
    kernels = _kernels(device, median) if device is not None and typical.clock == "device" else ()
    lines = [
        TimeLine(part=Part.STALL, ns=sum(stalled.values()), count=len(stalls) / len(steps)),
        TimeLine(part=Part.CORE_WAIT, ns=max(sum(whole_mean.values()) - sum(mean.values()), 0.0)),
    ]
    for phase, running in mean.items():
        # A phase may consist of stalls only; rounding can make the rest negative.
        part, ns = PHASE_PARTS[phase], max(running - stalled.get(phase, 0.0), 0.0)
        owners = _with_waits(_owners(rank, phase, ns, named.get(phase, [])), phase, ns, waits_ns or {})
        whole = _divided(ns, owners, TimeLine(part=part, ns=0))
        lines += whole[:-1]
        parts = _PASSES.get(part, {part}) - logged
        recorded = without_stalls(inside.of(*parts), inside.steps) if inside and part in _STEADY else ()
        lines += _with_detail(rank, whole[-1], recorded, kernels)
    return TimeLedger(
        step_ns=total(lines),
        median_ns=median,
        steps=len(steps),
        basis=f"{typical.basis}, {typical.clock} clock",
        lines=tuple(sorted((line for line in lines if line.ns > 0 or line.called), key=lambda line: -line.ns)),
        stalls=tuple(_with_core_wait(stall, typical) for stall in stalls),
        window_factor=_window_factor(rank, median),
        work=inside.work if inside is not None else (),
        double_backward_ns=_of_passes(inside, mean, lambda recorded: recorded.double_backward_ns),
        recomputed_ns=_of_passes(inside, mean, lambda recorded: recorded.recomputed_ns),
        communication=_communication(lines, inside),
    )


def _steady_phases(rank: Rank) -> tuple[Part, ...]:
    # A step that only accumulates gradients has no optimizer; the steps with an optimizer are not stalls.
    accumulates = ((rank.training.accumulate_grad_batches if rank.training else None) or 1) > 1
    return _STEADY[:2] if accumulates else _STEADY


def _without_compiling(stalled: Mapping[str, float], named: Mapping[str, Sequence[TimeLine]]) -> dict[str, float]:
    # A step that compiles is a stall, but compiling has a separate line.
    compiling = {phase: total(line for line in lines if line.part == Part.COMPILE) for phase, lines in named.items()}
    return {phase: max(ns - compiling.get(phase, 0.0), 0.0) for phase, ns in stalled.items()}


def _logged(named: Mapping[str, Sequence[TimeLine]]) -> set[Part]:
    # Of a run of several ranks `self.log` is timed in every step.
    is_logged = any(line.part == Part.SELF_LOG for lines in named.values() for line in lines)
    return {Part.SELF_LOG, Part.RANK_WAIT} if is_logged else set()


def _kernels(device: TimeLedger, median: float) -> tuple[TimeLine, ...]:
    # A host that is ahead ends its recorded steps before the device has done their work.
    stretch = max(median / device.step_ns, 1.0) if device.step_ns else 1.0
    return tuple(replace(line, ns=stretch * line.ns) for line in device.passes)


def _with_detail(
    rank: Rank, rest: TimeLine, recorded: Sequence[TimeLine], kernels: Sequence[TimeLine]
) -> Sequence[TimeLine]:
    """Return the lines of modules and operators in the rest of a phase: on the host, or on the device's clock."""
    if detail := corrected(recorded, rest.ns) if recorded else ():
        return _beside_optimizers(rank, detail) if rest.part == Part.OPTIMIZER else detail
    launched = [line for line in kernels if line.part == rest.part]
    return _divided(rest.ns, launched, replace(rest, name=IDLE) if launched else rest)


def _beside_optimizers(rank: Rank, detail: Sequence[TimeLine]) -> Sequence[TimeLine]:
    """Return the lines of the optimizer phase; time outside optimizers, if over half, is the program's hook's."""
    beside = [line for line in detail if not line.name]
    hooks = [row for row in rank.actions if row.phase == "optimizer" and (row.action or "").startswith(MODULES)]
    hook = max(hooks, key=lambda row: row.total_ns or 0, default=None)
    if hook is None or hook.action is None or total(beside) <= max(total(detail) / 2, _BESIDE_OPTIMIZER_NS):
        return detail
    name, count = action_name(hook.action), (hook.count or 0) / (hook.steps or 1)
    owned = TimeLine(part=Part.MODULE_HOOK, name=name, ns=total(beside), count=count, longest_ns=hook.max_ns)
    return [*(line for line in detail if line.name), owned]


def without_stalls(lines: Sequence[TimeLine], steps: int) -> list[TimeLine]:
    """Return the lines of a recorded phase without a call that took most of the time of all calls of its module.

    The few steps of a window show a pause of the process as the usual time of the module in which it fell. The part of
    that call beyond the others is left out of the module's self time, and not looked for again in the modules around
    it. A single step does not tell: its one long call may be that of every step.
    """
    whole_ns: dict[str, float] = defaultdict(float)
    for line in lines:
        for path in _paths(line):
            whole_ns[path] += line.ns * steps
    removed: dict[TimeLine, float] = {}
    removed_in: dict[str, float] = defaultdict(float)
    ranges = [line for line in lines if line.module is not None and not line.operator and line.longest_ns is not None]
    for line in sorted(ranges, key=lambda line: -len(_paths(line))):
        module, calls, self_ns = line.module or "", round(line.count * steps), line.ns * steps
        longest = (line.longest_ns or 0) - removed_in[module]
        excess = longest - (whole_ns[module] - longest) / max(calls - 1, 1)
        # Else it is in an operator, in another module, or in work of other parts.
        if steps > 1 and calls > 1 and longest >= _STALLED * whole_ns[module] and self_ns >= _STALLED * excess:
            removed[line] = min(excess, self_ns)
            for path in _paths(line):
                removed_in[path] += removed[line]
    return [replace(line, ns=line.ns - removed[line] / steps) if line in removed else line for line in lines]


def _paths(line: TimeLine) -> list[str]:
    """Return the paths of a line's module and of those around it; the whole model's is empty."""
    return [] if line.module is None else [*paths_around(line.module), line.module]


def _mean(steps: Sequence[_Step]) -> dict[str, float]:
    return {phase: sum(step[phase] or 0 for _, _, step in steps) / len(steps) for phase in PHASES}


def _owners(rank: Rank, phase: str, ns: float, named: Sequence[TimeLine]) -> list[TimeLine]:
    """Return the lines of a phase's owners, without the phase's own line."""
    if phase == "data_wait":
        return _beside_pauses(ns, named)
    if phase == "other":
        return [*named, *_restarts(rank, ns - total(named))]
    return [line for line in named if PHASE_PARTS[phase] not in _STEADY or line.part in _WITHIN]


def _with_waits(lines: Sequence[TimeLine], phase: str, ns: float, waits_ns: Mapping[str, float]) -> list[TimeLine]:
    """Return the lines of a phase with a line of waits for other ranks, those in ``self.log`` and metrics included."""
    inside = {part: waits_ns.get(part, 0.0) if phase == "other" else 0.0 for part in (Part.SELF_LOG, Part.METRIC)}
    whole = {part: total(line for line in lines if line.part == part) for part in inside}
    left = {part: max(1 - inside[part] / whole[part], 0.0) for part in inside if whole[part]}
    own = [replace(line, ns=line.ns * left.get(line.part, 1.0)) for line in lines]
    wait = total(lines) - total(own) + max(min(waits_ns.get(phase, 0.0), ns - total(lines)), 0.0)
    return [*own, TimeLine(part=Part.RANK_WAIT, name=phase, ns=wait)] if wait > 0 else own


def _of_passes(
    recorded: TimeLedger | None, mean_ns: Mapping[str, float], spent: Callable[[TimeLedger], float]
) -> float:
    """Return a time of forward and backward that has the share of them that it has in a trace."""
    if recorded is None or not (whole := recorded.ns(*_PASSES[Part.FORWARD], *_PASSES[Part.BACKWARD])):
        return 0.0
    return spent(recorded) / whole * (mean_ns["forward"] + mean_ns["backward"])


def _communication(lines: Sequence[TimeLine], recorded: TimeLedger | None) -> tuple[TimeLine, ...]:
    """Return the waits for other ranks in every step, or the recorded ones, whichever are more, and the transfers.

    They are no longer than the lines that hold them. Without the traces of other ranks, a recorded collective has its
    wait in it.
    """
    met = recorded.communication if recorded else ()
    waits = [line for line in lines if line.part == Part.RANK_WAIT]
    seen = [line for line in met if line.part == Part.RANK_WAIT]
    sent = tuple(line for line in met if line.part == Part.COLLECTIVE)
    found = [*max(waits, seen, key=total), *(sent if seen else scaled(sent, total(sent) - total(waits)))]
    most = total(line for line in lines if line.part in _MEETING)
    return tuple(_divided(most, found, TimeLine(part=Part.UNTRACKED, ns=0))[:-1])


def _running(rank: Rank, typical: TypicalSteps, steady: Sequence[Part]) -> list[_Step]:
    """Return the steps without their wait for a core.

    A wait makes a phase longer than elsewhere: it is subtracted from each phase's time beyond its fastest step, in
    proportion, and the remainder from all phases alike. A phase that is not steady may work in few steps: it keeps at
    least the share of the whole step that does not wait. A thread that waits for a batch of worker processes
    sleeps: that phase stays as it is.
    """
    waits = core_waits(rank)
    awake = [phase for phase in PHASES if phase != "data_wait" or not any(each.num_workers for each in _loaders(rank))]
    fastest = {phase: min(phases[phase] or 0 for _, _, phases in typical.steps) for phase in awake}
    steps: list[_Step] = []
    for step, duration, phases in typical.steps:
        left: dict[str, float | None] = {phase: ns or 0 for phase, ns in phases.items()}
        wait = waits.get(step, 0.0)
        runs = 1 - min(wait / duration, 1.0) if duration else 1.0
        working = {
            phase: ns if phase in steady else max(ns, (left[phase] or 0) * runs) for phase, ns in fastest.items()
        }
        for floor in (working, dict.fromkeys(awake, 0.0)):
            beyond = {phase: max((left[phase] or 0) - floor[phase], 0) for phase in awake}
            whole = sum(beyond.values())
            taken = min(wait / whole, 1.0) if whole else 0.0
            left |= {phase: (left[phase] or 0) - ns * taken for phase, ns in beyond.items()}
            wait -= whole * taken
        steps.append((step, sum(ns or 0 for ns in left.values()), left))
    return steps


def _with_core_wait(stall: Stall, typical: TypicalSteps) -> Stall:
    """Return a stall with the whole duration of its step."""
    whole = next((duration for step, duration, _ in typical.steps if step == stall.step), stall.duration_ns)
    return replace(stall, duration_ns=whole, core_wait_ns=max(whole - stall.duration_ns, 0))


def _stalls(steps: Sequence[_Step], parts: Sequence[Part]) -> tuple[tuple[Stall, ...], dict[str, float]]:
    """Return the stalls, longest first, and the excess of each phase over its median, per step of the run."""
    median = statistics.median(duration for _, duration, _ in steps)
    slow = [(step, duration, phases) for step, duration, phases in steps if duration > STALL * median]
    if not slow or len(slow) > RARE * len(steps):
        return (), {}
    usual = {part: statistics.median(phases[part] or 0 for _, _, phases in steps) for part in parts}
    found = []
    excess: dict[str, float] = defaultdict(float)
    for step, duration, phases in slow:
        more = {part: max((phases[part] or 0) - usual[part], 0) for part in parts}
        ns = sum(more.values())
        if ns <= duration / 2:
            continue  # the excess belongs to a fetch, a callback or another action, which is a separate line
        for part, part_ns in more.items():
            excess[part] += part_ns / len(steps)
        owner = max(more, key=lambda part: more[part])
        found.append(Stall(step=step, duration_ns=round(duration), excess_ns=round(ns), owner=owner))
    return tuple(sorted(found, key=lambda stall: -stall.excess_ns)), dict(excess)


def _restarts(rank: Rank, untracked: float) -> list[TimeLine]:
    """Return the time, per step, in which workers that do not persist end and start again between epochs.

    It is the untracked time of the last step of each epoch beyond the median, at most all untracked time.
    """
    loaders = _loaders(rank)
    rows = [row for row in rank.pulse[1:] if row["window"] is None]
    last = {row["epoch"]: row for row in rows[:-1]}
    if not any(loader.num_workers and loader.persistent_workers is False for loader in loaders) or len(last) < EPOCHS:
        return []
    usual = statistics.median(row["other_ns"] or 0 for row in rows)
    excess = [max((row["other_ns"] or 0) - usual, 0) for row in last.values()]
    ns = min(sum(excess) / len(rows), max(untracked, 0.0))
    count = len(last) / len(rows)
    return [TimeLine(part=Part.DATA_WAIT, name=RESTART, ns=ns, count=count, longest_ns=round(max(excess)))]


def _loaders(rank: Rank) -> Sequence[DataLoaderFacts]:
    return rank.training.dataloaders if rank.training else []


def _divided(ns: float, lines: Sequence[TimeLine], rest: TimeLine) -> list[TimeLine]:
    """Return lines that sum to ``ns``: scaled down if they exceed it, and ``rest`` last, with the remainder."""
    known = total(lines)
    scale = ns / known if known > ns else 1.0
    return [*(replace(line, ns=line.ns * scale) for line in lines), replace(rest, ns=max(ns - known, 0.0))]


def _beside_pauses(ns: float, lines: Sequence[TimeLine]) -> list[TimeLine]:
    """Return the lines of data wait: GC pauses of the whole run, and the recorded parts in the remaining time."""
    found = [line for line in lines if line.part == Part.GC_PAUSES]
    parts = [line for line in lines if line.part != Part.GC_PAUSES]
    return [*found, *_divided(max(ns - total(found), 0.0), parts, TimeLine(part=Part.DATA_WAIT, ns=0))[:-1]]


def typical_in_windows(rank: Rank) -> tuple[int, ...]:
    """Return the steps in windows among the steps that a rank's figures come from."""
    typical = typical_steps(rank)
    in_windows = {row["step"] for row in rank.pulse if row["window"] is not None}
    return tuple(step for step, _, _ in typical.steps if step in in_windows) if typical is not None else ()


def _window_factor(rank: Rank, median: float) -> float | None:
    """Return the median duration of recorded steps, over that of the others."""
    recorded = {step for window in rank.windows for step in window.steps}
    durations = [row["duration_ns"] for row in rank.pulse if row["step"] in recorded and row["duration_ns"]]
    return statistics.median(durations) / median if durations and median else None


def _named(rank: Rank) -> dict[str, list[TimeLine]]:
    """Return lines by the pulse's phase: of the whole run where it has action totals.

    The parts of data wait are those of the windows, but for GC pauses: a few steps have too many of them or none.
    """
    in_windows = bool(typical_in_windows(rank))
    recorded = _recorded(rank, is_used=in_windows)
    totals = {} if in_windows else _totals(rank)
    waits = recorded.get("data_wait", [])
    if totals:
        waits = [line for line in waits if line.part != Part.GC_PAUSES]
        waits += [line for line in totals.get("data_wait", ()) if line.part == Part.GC_PAUSES]
    return {**(totals or recorded), "data_wait": waits}


def _totals(rank: Rank) -> dict[str, list[TimeLine]]:
    """Return the lines of the actions that the pulse counted in all steps outside windows."""
    lines: dict[str, list[TimeLine]] = defaultdict(list)
    for row in rank.actions:
        if row.in_window or not row.steps or not row.total_ns or row.action is None or row.phase is None:
            continue
        around = Part.CALLBACK if row.phase == "callbacks" else None
        owner = _owner(rank, row.action, part_of(row.action, around, rank.facts.stage))
        if owner is not None:
            ns, count = row.total_ns / row.steps, (row.count or 0) / row.steps
            lines[row.phase].append(TimeLine(part=owner[0], name=owner[1], ns=ns, count=count, longest_ns=row.max_ns))
    return lines


def _recorded(rank: Rank, *, is_used: bool) -> dict[str, list[TimeLine]]:
    """Return the lines of the hook timings of the recorded steps; without the profiler unless the ledger has them."""
    steps = rank_events(rank)
    found: dict[tuple[str, Part, str], list[int]] = defaultdict(list)
    for step in steps:
        for event in step.events:
            owner = _owner(rank, event.action, event.part)
            if owner is not None and (is_used or owner[0] != Part.PROFILER):
                found[(event.phase, owner[0], owner[1])].append(event.self_ns)
    lines: dict[str, list[TimeLine]] = defaultdict(list)
    for (phase, part, name), spent in found.items():
        ns, count = sum(spent) / len(steps), len(spent) / len(steps)
        lines[phase].append(TimeLine(part=part, name=name, ns=ns, count=count, longest_ns=max(spent)))
    return lines


def _owner(rank: Rank, action: str, part: Part | None) -> tuple[Part, str] | None:
    """Return the part and the name of an action's self time, None where it stays with its phase."""
    if action in _WITHOUT_NAME or is_profiler(action):
        return _WITHOUT_NAME.get(action, Part.PROFILER), ""
    if (own := meeting(action)) is not None:
        return own, action_name(action)
    if action.rpartition(".")[2] == "on_save_checkpoint" or action_name(action).startswith("ModelCheckpoint."):
        return Part.CHECKPOINT, action_name(action)
    clips_itself = rank.training is not None and rank.training.clips_itself
    if action.startswith(MODULES) and action.endswith((_SCHEDULER, _CLIPPING) if clips_itself else _SCHEDULER):
        return Part.MODULE_HOOK, action_name(action)
    if part in _NAMED:
        return part, action_name(action)
    is_hook = part in {None, Part.UNTRACKED} and action.startswith(MODULES)
    return (Part.MODULE_HOOK, action_name(action)) if is_hook else None
