"""The overview: the figures of the short page, a step's time, the memory peak, and the findings with their evidence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import PurePosixPath
from typing import Final

import msgspec

from lightning_memprof.account.ledger.model import TimeLedger
from lightning_memprof.account.parts import Part
from lightning_memprof.judge import Finding, Severity
from lightning_memprof.report.document import (
    Bar,
    Card,
    Cell,
    Figure,
    Figures,
    Findings,
    Item,
    Line,
    Lines,
    Link,
    RuleHelp,
    Section,
    Stack,
    Words,
    phrase,
)
from lightning_memprof.report.sections.labels import BADGES, PEAKS, bars
from lightning_memprof.report.sections.memory import peak_stack
from lightning_memprof.report.sections.steps import lead_throughput, main_rate
from lightning_memprof.report.sections.tables import ratio
from lightning_memprof.report.view import Overhead, View
from lightning_memprof.units import format_steps

# The section of a rule, by the beginning of its name.
SECTIONS: Final = (
    ("out_of_memory", "oom"),
    ("straggler", "ranks"),
    ("memory_imbalance", "ranks"),
    ("communication", "traces"),
    ("activation", "modules"),
    ("host_memory", "memory"),
    ("device_memory", "memory"),
    ("memory", "memory"),
    ("optimizer_state", "memory"),
    ("fragmentation", "snapshots"),
    ("allocator", "snapshots"),
    ("near_full", "snapshots"),
    ("profiler_overhead", "overhead"),
)
SECTION_NAMES: Final[Mapping[str, str]] = {
    "oom": "out of memory",
    "files": "list of files",
    "overhead": "profiler overhead",
}
# Parts below this share of a step have one bar.
LEAST_SHARE: Final = 0.005
# From this share of the step on, the wait for a core changes how all other shares read.
NOTABLE_CORE_WAIT: Final = 0.10
# A finding may name each of thousands of files.
MAX_EVIDENCE: Final = 8
MAX_NAME: Final = 42


def overview_section(view: View, file_ids: Mapping[str, str], known: Sequence[str]) -> Section:
    """Return the first section of a run.

    Args:
        view: the run.
        file_ids: the id of each listed file's row, by its path.
        known: ids of the other sections.
    """
    parts: list[Item] = [Figures(list(_figures(view)))]
    if view.ledger is not None:
        parts.append(_step_stack(view.ledger, view.rank_suffix))
    if (stack := peak_stack(view)) is not None:
        parts.append(stack)
    if lines := list(_trouble(view)):
        parts.append(Lines("", lines))
    if cards := finding_cards(view.findings, file_ids, known):
        parts.append(Findings(cards))
    return Section("overview", "Overview", parts=parts, summary=True)


def _step_stack(ledger: TimeLedger, rank_suffix: str) -> Stack:
    """Return the mean step by the parts of its ledger; small ones have one bar."""
    whole_ns = ledger.step_ns
    times = {part: ledger.ns(part) for part in Part}
    shown = {part: round(ns) for part, ns in times.items() if ns >= LEAST_SHARE * whole_ns}
    found = bars(shown, round(whole_ns), "ns")
    small = {part: ns for part, ns in times.items() if ns and part not in shown}
    if small:
        name = f"{len(small)} smaller parts" if len(small) > 1 else next(iter(small)).label
        found.append(Bar(name, "other", Cell(sum(small.values()), "ns", whole_ns)))
    notes: list[Words] = [f"mean of {ledger.basis}"]
    if (waits := ledger.share("core_wait")) >= NOTABLE_CORE_WAIT:
        waited = phrase("{share} of each step ({ns})", waits, ledger.ns("core_wait"))
        notes.append(phrase("the training thread waits for a core {}: steps take longer than on free cores", waited))
    return Stack(f"Mean step by part{rank_suffix}", Cell(whole_ns, "ns"), found, notes=notes)


def finding_cards(
    findings: Iterable[Finding], file_ids: Mapping[str, str], known: Sequence[str], *, with_files: bool = False
) -> list[Card]:
    """Return the findings, each with links to its evidence; a verdict without a finding has no card."""
    return [
        Card(
            id=f"finding-{number}",
            rule=finding.rule,
            badge=BADGES[finding.severity],
            title=finding.title,
            why=finding.why,
            next_steps=finding.next_steps,
            saves=finding.saves,
            evidence=list(_evidence(finding, file_ids, known)),
            help=_help().get(finding.rule),
            file=first_file(finding) if with_files else "",
        )
        for number, finding in enumerate(findings)
        if finding.severity is not Severity.NONE
    ]


def first_file(finding: Finding) -> str:
    """Return the name of the file that shows a finding, of several the first; empty where it has none."""
    return next((PurePosixPath(found.artifact).name for found in finding.evidence), "")


@cache
def _help() -> Mapping[str, RuleHelp]:
    """Return the documentation of each rule, which a page that is offline cannot link to."""
    file = resources.files("lightning_memprof.report").joinpath("printers", "templates", "findings.json")
    return msgspec.json.decode(file.read_bytes(), type=dict[str, RuleHelp])


def _evidence(finding: Finding, file_ids: Mapping[str, str], known: Sequence[str]) -> Iterator[Link]:
    section = next((found for start, found in SECTIONS if finding.rule.startswith(start)), None)
    if section not in known:
        section = _section_of(finding.evidence[0].artifact if finding.evidence else "", known)
    if section is not None:
        yield Link(f"see {SECTION_NAMES.get(section, section)}", f"#{section}")
    for found in finding.evidence[:MAX_EVIDENCE]:
        where = _short(PurePosixPath(found.artifact).name or found.artifact)
        if found.rank is not None:
            where += f", rank {found.rank}"
        if found.window is not None:
            where += f", window {found.window}"
        if found.steps is not None:
            where += f", {format_steps(found.steps if found.steps[0] != found.steps[1] else found.steps[:1])}"
        words: Words = where
        if found.start_ns is not None and found.end_ns is not None and found.steps is None:
            words = phrase("{}, {ns}", where, found.end_ns - found.start_ns)
        row = file_ids.get(found.artifact)
        if row is not None or "files" in known:
            yield Link(words, f"#{row or 'files'}")
    if len(finding.evidence) > MAX_EVIDENCE:
        yield Link(f"{len(finding.evidence) - MAX_EVIDENCE} more", "#files")


def _short(name: str) -> str:
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME // 3]}…{name[-MAX_NAME // 2 :]}"


def _section_of(artifact: str, known: Sequence[str]) -> str | None:
    name = PurePosixPath(artifact).name
    if name.endswith((".json", ".json.gz")) and "traces" in known:
        return "traces"
    if name.endswith((".pickle", ".pkl")) and "snapshots" in known:
        return "snapshots"
    return "steps" if "steps" in known else None


def _figures(view: View) -> Iterator[Figure]:
    lead = view.lead
    if (pulse := lead.statistics) is not None:
        detail = phrase("p90 {ns}, max {ns}", pulse.p90_ns, pulse.max_ns)
        yield Figure("step time, median", Cell(pulse.median_ns, "ns"), detail, "#steps")
        wait = phrase("{ns} of a mean step", pulse.breakdown_ns["data_wait"] or 0)
        yield Figure(Part.DATA_WAIT.label, Cell(pulse.share("data_wait"), "share"), wait, "#steps", is_short=False)
    if (found := lead_throughput(view)) is not None:
        unit, known = main_rate(found)
        spread = phrase("p10 {}, p90 {}", Cell(known.p10, f"{unit}/s"), Cell(known.p90, f"{unit}/s"))
        yield Figure("throughput", Cell(known.mean, f"{unit}/s"), spread, "#steps")
    if lead.device is not None and lead.device.peak_allocated_bytes is not None:
        allocated = f"{lead.device.device or 'device'} allocated, whole run"
        yield Figure(PEAKS["device"].label, Cell(lead.device.peak_allocated_bytes, "bytes"), allocated, "#memory")
    peak_rss = lead.host.peak_rss_bytes or lead.host.max_rss_bytes
    if peak_rss is not None:
        is_whole = view.run.lead.high_water_bytes is not None
        note = "whole process, whole run" if is_whole else "whole process, sampled at steps"
        yield Figure(PEAKS["rss"].label, Cell(peak_rss, "bytes"), note, "#memory")
    if (peak := view.memory.lead.peak) is not None:
        tensors = f"tensors only, step {peak.step}"
        yield Figure(PEAKS["tensors"].label, Cell(peak.total_bytes, "bytes"), tensors, "#memory", is_short=False)
    if len(view.ranks) > 1:
        ended = sum(rank.status == "finished" for rank in view.ranks)
        yield Figure("ranks", Cell(len(view.ranks), "index"), f"{ended} finished", "#ranks")
    if (cost := lead.overhead) is not None:
        yield _overhead(cost)


def _overhead(cost: Overhead) -> Figure:
    value, words = Cell(ratio(cost.net_pulse_ns, cost.steps), "ns"), phrase("per step; windows {ns}", cost.windows_ns)
    if cost.whole_ns:
        words = phrase("of the run; pulse {} per step, windows {ns}", value, cost.windows_ns)
        value = Cell(((cost.net_pulse_ns or 0) + (cost.windows_ns or 0)) / cost.whole_ns, "share")
    return Figure("profiler overhead", value, words, "#overhead")


def _trouble(view: View) -> Iterator[Line]:
    """Yield failures, damage, and ranks or windows that are not shown: the short page must not hide them."""
    named = [f"{error.collector}: {error.message}" for error in view.run.errors]
    damaged = [f"{problem.piece}: {problem.message}" for problem in view.problems]
    for label, found in (("failed", named), ("damaged", damaged)):
        if found:
            # The number comes first: a short page may cut the end of a message.
            number = f"1 of {len(found)}: " if len(found) > 1 else ""
            yield Line(label, f"{number}{found[0]}", "bad")
    for note in view.notes:
        if note.collector == "run" or note in view.memory.notes:
            yield Line("note", note.message)
