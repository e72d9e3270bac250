from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from html import unescape
from itertools import chain
from pathlib import Path

import pytest
from msgspec.structs import replace

from fake_runs import FakeRun, make_run
from lightning_memprof import judge
from lightning_memprof.account.parts import Part
from lightning_memprof.judge import Evidence, Finding, Severity, remedies, verdict
from lightning_memprof.read.run.targets import find_targets
from lightning_memprof.report.document import Lines
from lightning_memprof.report.files_view import FilesView, files_view
from lightning_memprof.report.opened import OpenOptions, opened
from lightning_memprof.report.printers import html as html_module
from lightning_memprof.report.printers.html import to_html
from lightning_memprof.report.printers.markdown import to_markdown
from lightning_memprof.report.printers.values import words_text
from lightning_memprof.report.sections import document_of
from lightning_memprof.report.sections.labels import (
    BEFORE_RECORDING,
    PEAKS,
    Counter,
    called,
    counter,
    device_parts,
    reserved_parts,
)
from lightning_memprof.report.sections.memory import run_peaks
from lightning_memprof.report.view import View
from lightning_memprof.units import MIB, format_bytes
from next_steps import step
from pages import full, table_of
from snapshots import block, segment, snapshot, unused, write_snapshot
from trace_reports import gpu_times, idle, trace

DOCS = Path(__file__).parents[4] / "docs"


@pytest.fixture(autouse=True)
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the charts, which take a second each time."""
    monkeypatch.setattr(html_module, "charts", lambda _view: {})
    monkeypatch.setattr(html_module, "file_charts", lambda *_: {})


def words_of(page: str) -> str:
    """Return the texts of a page, each between bars, without the explanations of rules and terms."""
    bare = re.sub(r"<(script|style)\b.*?</\1>|<details>.*?</details>|</?abbr[^>]*>", "", page, flags=re.DOTALL)
    return "|".join(part.strip() for part in unescape(re.sub(r"<[^>]+>", "\0", bare)).split("\0") if part.strip())


def run_view(path: Path, fake: FakeRun | None = None) -> View:
    with opened([str(make_run(path / "log", fake))]) as view:
        assert isinstance(view, View)
        return view


def files(path: Path) -> FilesView:
    file = write_snapshot(
        path / "snap.pickle",
        snapshot([segment(block(0, 2 * MIB), unused(2 * MIB, MIB), block(3 * MIB, MIB, state="active_pending_free"))]),
    )
    view = files_view(find_targets([file]))
    causes = tuple(idle(cause, 1_000_000) for cause in Part if cause.group == "device idle")
    traced = trace(causes=causes, gpu_window=gpu_times(100_000_000, 40_000_000, exposed_ns=5_000_000))
    return replace(view, traces=(traced,), sizes={**view.sizes, traced.file: 1})


def test_a_trace_and_a_snapshot_use_the_same_words_in_each_format(tmp_path: Path) -> None:
    view = files(tmp_path)
    (device,) = view.snapshots[0].devices
    assert sum(reserved_parts(device).values()) == device.snapshot.reserved_bytes
    window = view.traces[0].gpu_window
    assert window is not None
    assert sum(device_parts(window).values()) == window.window_ns
    shown, page = full(view, 100), words_of(to_html(view))
    names = [name for name, size in {**reserved_parts(device), **device_parts(window)}.items() if size]
    for label in [*map(called, names), *(called(cause.cause) for cause in view.traces[0].idle[:5])]:
        assert re.search(rf"^ *{re.escape(label)} ", shown, re.MULTILINE), label
        assert f"|{label}|" in page, label
    for name in ("requested", "reserved"):
        assert PEAKS[name].label in shown
        assert f"{PEAKS[name].label}: {PEAKS[name].counts}; {PEAKS[name].span}" in page
    for text in (shown, page):
        assert not re.search(r"in use|in no use|waiting for data|loading", text)


def test_a_run_uses_the_same_words_in_each_format(tmp_path: Path) -> None:
    view = run_view(tmp_path, FakeRun(world_size=2, device_bytes=lambda _: 300 * MIB))
    shown, page, markdown = full(view, 100), words_of(to_html(view)), to_markdown(document_of(view), is_full=True)
    for label in (called("data_wait"), "RSS", PEAKS["rss"].label, PEAKS["device"].label):
        assert re.search(rf"^ *{re.escape(label)} ", shown, re.MULTILINE), label
        assert f"|{label}|" in page, label
        assert f"| {label} |" in markdown, label
    assert not re.search(r"data fetch|waiting for data|resident size|rss, peak", shown + page)


def test_each_peak_says_what_it_counts_and_over_which_time_in_each_format(tmp_path: Path) -> None:
    view = run_view(tmp_path, FakeRun(device_bytes=lambda _: 300 * MIB))
    found = run_peaks(view)
    assert [peak.label for peak, _ in found] == ["peak RSS", "device peak", "tensors peak", "live bytes peak"]
    page, markdown = words_of(to_html(view)), to_markdown(document_of(view), is_full=True)
    rows = [list(row.values()) for row in table_of(view, "peaks")]
    for peak, size in found:
        assert [peak.label, format_bytes(size), peak.counts, peak.span] in rows
        assert f"|{peak.label}|{format_bytes(size)}|{peak.counts}|{peak.span}|" in page
        assert f"| {peak.label} | {format_bytes(size)} | {peak.counts} | {peak.span} |".replace("~", "\\~") in markdown


def test_the_documentation_has_every_peak_in_the_same_words() -> None:
    text = (DOCS / "start" / "reading-a-report.md").read_text(encoding="utf-8")
    for peak in PEAKS.values():
        assert f"| {peak.label} | {peak.counts} | {peak.span} |" in text


def documented() -> dict[str, dict[str, str | list[str]]]:
    file = Path(html_module.__file__).with_name("templates") / "findings.json"
    texts: dict[str, dict[str, str | list[str]]] = json.loads(file.read_text(encoding="utf-8"))
    return texts


def test_the_pages_of_findings_are_those_of_the_rules() -> None:
    script = (
        "import finding_texts, json; print(json.dumps(finding_texts.texts())); "
        "assert all(page.read_text() == text for page, text in finding_texts.pages().items())"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=DOCS, capture_output=True, text=True, check=True)
    assert documented() == json.loads(done.stdout), "python docs/finding_texts.py"


def test_every_rule_is_documented() -> None:
    modules = [path.read_text(encoding="utf-8") for path in Path(judge.__file__).parent.rglob("*.py")]
    rules = {rule for text in modules for rule in re.findall(r'\brule="(\w+)"', text)}
    rows = {row.id for row in chain.from_iterable(verdict.ROWS.values())}
    texts = documented()
    assert len(rules | rows) > 40
    assert not (rules | rows) - texts.keys(), (
        "describe them in docs/reference/findings/, then run docs/finding_texts.py"
    )
    assert all(text["means"] and text["when"] for text in texts.values())


def test_every_remedy_is_documented() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference" / "findings").glob("*.md"))
    found = {value.id for value in vars(remedies).values() if isinstance(value, remedies.Remedy)}
    assert {remedy for remedy in found if f"(`{remedy}`" not in pages} == {"report_error"}


def test_a_finding_explains_its_rule_and_names_its_page_of_the_documentation(tmp_path: Path) -> None:
    view = run_view(tmp_path)
    finding = Finding(
        rule="slow_steps",
        severity=Severity.INFO,
        title="s.",
        why="w.",
        remedies=(step("n."),),
        evidence=(Evidence(artifact="f"),),
    )
    page = unescape(to_html(replace(view, findings=(finding,))))
    (details,) = re.findall(r"<details>.*?</details>", page, re.DOTALL)
    text = documented()["slow_steps"]
    assert f"<p>{text['means'][0]}</p>" in details
    assert f"<b>When</b> {text['when'][0]}</p>" in details
    assert "docs/reference/findings/host.md#slow_steps" in details
    own = Finding(rule="a_rule_of_yours", severity=Severity.INFO, title="s.", why="w.", remedies=(step("n."),))
    assert "<details>" not in to_html(replace(view, findings=(own,)))


def test_blocks_from_before_the_recording_are_called_so_in_each_format(tmp_path: Path) -> None:
    view = files(tmp_path)
    assert BEFORE_RECORDING in full(view, 100)
    assert BEFORE_RECORDING in words_of(to_html(view))


def test_files_that_were_too_large_are_named_with_the_command_that_analyses_one(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "log")
    with opened([str(directory)], OpenOptions(max_file_bytes=1)) as view:
        assert isinstance(view, View)
        section = document_of(view).section("notes")
        assert section is not None
        (lines,) = [part for part in section.parts if isinstance(part, Lines)]
        (line,) = [words_text(row.words) for row in lines.rows if "not analysed" in words_text(row.words)]
        (left,) = [artifact for artifact in view.run.artifacts if artifact.type == "trace"]
        assert left.path in line
        assert f"lightning-memprof report {shlex.quote(str(left.file))}" in line
        assert left.path in words_of(to_html(view))


def test_the_end_of_a_counters_name_is_its_unit_on_every_page():
    assert counter("gpu0_power_w") == Counter("gpu0 power", "W", 1, "watts")
    assert counter("gpu0_temperature_c").axis == "degrees Celsius"
    assert counter("disk_read_bytes_per_s") == Counter("disk read", "bytes/s", 1, "bytes per second")
    assert counter("page_faults") == Counter("page faults", "", 1, "")
