"""The beginning of the page: the verdict's figures, the findings, and where each of them is seen."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings import Severity
from lightning_memprof.artifacts.series import PHASES
from lightning_memprof.report.columns import span
from lightning_memprof.report.labels import PEAKS, called
from lightning_memprof.report.page.cells import bars
from lightning_memprof.report.page.model import (
    Badge,
    Evidence,
    Figure,
    Figures,
    FindingCard,
    Findings,
    Part,
    Section,
    Stack,
)
from lightning_memprof.report.throughput import amount
from lightning_memprof.units import format_bytes, format_ns, percent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from lightning_memprof.analysis.findings import Finding
    from lightning_memprof.report.view import View

__all__ = ["badge", "finding_cards", "overview"]

BADGES: Final[Mapping[Severity, Badge]] = {
    Severity.NONE: "none",
    Severity.INFO: "info",
    Severity.WARNING: "warning",
    Severity.CRITICAL: "critical",
}
# Where a rule's figures are drawn, by what its name begins with.
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
    "files": "the list of files",
    "overhead": "our overhead",
}
# A finding of a run with thousands of files names each of them; the first ones are enough to look at.
MAX_EVIDENCE: Final = 8
MAX_NAME: Final = 42


def overview(view: View, places: Mapping[str, str], known: Sequence[str]) -> Section:
    """Return the first section of a run.

    Args:
        view: the run.
        places: the id of each listed file's row, by its path.
        known: ids of the other sections.

    """
    parts: list[Part] = [Figures(list(_figures(view)))]
    if (pulse := view.lead.statistics) is not None:
        whole = {phase: pulse.breakdown_ns[phase] for phase in PHASES}
        parts.append(
            Stack(
                "A step, where its time goes",
                format_ns(pulse.mean_ns),
                bars(whole, pulse.mean_ns, are_bytes=False),
                notes=(f"mean of {pulse.basis}, {pulse.clock} clock",),
            )
        )
    cards = finding_cards(view.findings, places, known)
    if cards:
        parts.append(Findings(cards))
    return Section("overview", "Overview", parts=parts)


def finding_cards(
    findings: Iterable[Finding], places: Mapping[str, str], known: Sequence[str]
) -> list[FindingCard]:  # fmt: skip
    """Return the findings as they are shown, each with links to where it is seen.

    That nothing was found is the verdict, above all of this.
    """
    return [
        FindingCard(
            id=f"finding-{number}",
            rule=finding.rule,
            badge=badge(finding.severity),
            sentence=finding.sentence,
            why=finding.why,
            next_steps=finding.next_steps,
            evidence=list(_evidence(finding, places, known)),
            means=_texts().get(finding.rule, {}).get("means", ()),
            when=_texts().get(finding.rule, {}).get("when", ()),
        )
        for number, finding in enumerate(findings)
        if finding.severity is not Severity.NONE
    ]


@cache
def _texts() -> Mapping[str, Mapping[str, Sequence[str]]]:
    """Return what the documentation's pages say of each rule: a page that is offline cannot show them."""
    text = resources.files("lightning_memprof.report").joinpath("templates", "findings.json").read_text("utf-8")
    found: Mapping[str, Mapping[str, Sequence[str]]] = json.loads(text)
    return found


def badge(severity: Severity) -> Badge:
    """Return the name that the style sheet has for a severity."""
    return BADGES[severity]


def _evidence(finding: Finding, places: Mapping[str, str], known: Sequence[str]) -> Iterator[Evidence]:
    section = next((found for start, found in SECTIONS if finding.rule.startswith(start)), None)
    first = finding.evidence[0].artifact if finding.evidence else ""
    if section not in known:
        section = _section_of(first, known)
    if section is not None:
        yield Evidence(f"see {SECTION_NAMES.get(section, section)}", f"#{section}")
    for found in finding.evidence[:MAX_EVIDENCE]:
        words = [_short(PurePosixPath(found.artifact).name or found.artifact)]
        if found.rank is not None:
            words.append(f"rank {found.rank}")
        if found.window is not None:
            words.append(f"window {found.window}")
        if found.steps is not None:
            words.append(span(found.steps if found.steps[0] != found.steps[1] else found.steps[:1]))
        if found.start_ns is not None and found.end_ns is not None and found.steps is None:
            words.append(format_ns(found.end_ns - found.start_ns))
        row = places.get(found.artifact)
        if row is not None or "files" in known:
            yield Evidence(", ".join(words), f"#{row or 'files'}")
    if len(finding.evidence) > MAX_EVIDENCE:
        yield Evidence(f"{len(finding.evidence) - MAX_EVIDENCE} more", "#files")


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
        detail = f"p90 {format_ns(pulse.p90_ns)}, slowest {format_ns(pulse.max_ns)}"
        yield Figure("a step, median", format_ns(pulse.median_ns), detail, "#steps")
        wait = format_ns(pulse.breakdown_ns["data_wait"] or 0)
        yield Figure(called("data_wait"), percent(pulse.share("data_wait")), f"{wait} of a mean step", "#steps")
    found = next((rate for rate in view.throughput if rate.rank == lead.rank), None)
    if found is not None:
        rate, unit = found.batches_per_s, "batches"
        for other, name in ((found.samples_per_s, "samples"), (found.tokens_per_s, "tokens")):
            rate, unit = (other, name) if other is not None else (rate, unit)
        spread = f"{amount(rate.p10)} to {amount(rate.p90)} in 8 of 10 steps"
        yield Figure(f"{unit} a second", amount(rate.mean), spread, "#steps")
    if lead.device is not None and lead.device.peak_allocated_bytes is not None:
        peak = format_bytes(lead.device.peak_allocated_bytes)
        yield Figure(
            PEAKS["device"].label, peak, f"{lead.device.device or ''} allocated, whole run".lstrip(), "#memory"
        )
    peak_rss = lead.host.peak_rss_bytes or lead.host.max_rss_bytes
    if peak_rss is not None:
        yield Figure(PEAKS["rss"].label, format_bytes(peak_rss), "the whole process, whole run", "#memory")
    if view.memory.lead.peak is not None:
        kept = view.memory.lead.peak
        yield Figure(
            PEAKS["tensors"].label, format_bytes(kept.total_bytes), f"tensors alone, step {kept.step}", "#memory"
        )
    if len(view.ranks) > 1:
        ended = sum(rank.status == "finished" for rank in view.ranks)
        yield Figure("ranks", str(len(view.ranks)), f"{ended} finished", "#ranks")
    if (cost := lead.overhead) is not None and cost.pulse_ns is not None and cost.steps:
        share = f"{percent(cost.pulse_ns / cost.run_ns)} of the run" if cost.run_ns else ""
        yield Figure("our pulse, a step", format_ns(cost.pulse_ns / cost.steps), share, "#overhead")
