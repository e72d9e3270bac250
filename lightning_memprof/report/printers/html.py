"""A document as one HTML file that opens from the disk and loads nothing from a network."""

from __future__ import annotations

import datetime as dt
import html
import re
import secrets
from collections.abc import Mapping
from importlib import resources
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from msgspec.structs import replace

from lightning_memprof.account.estimate import Estimate
from lightning_memprof.compare.trial import Trial
from lightning_memprof.report.charts import charts, file_charts
from lightning_memprof.report.charts.embed import Chart, chart_resources
from lightning_memprof.report.charts.steps import live_chart
from lightning_memprof.report.charts.trial import trial_chart
from lightning_memprof.report.document import Cell, Column, Document
from lightning_memprof.report.files_view import FilesView
from lightning_memprof.report.printers.values import cell_text, clean, more_rows, words_text
from lightning_memprof.report.sections import document_of
from lightning_memprof.report.sections.estimate import estimate_document
from lightning_memprof.report.sections.trial import trial_document
from lightning_memprof.report.view import View
from lightning_memprof.units import percent

# No host, no plug-in, no frame, no form; only the scripts that carry this page's nonce.
POLICY: Final = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
    "base-uri 'none'; form-action 'none'"
)
# A script's text cannot hold its own end, so this finds each whole script, and nothing inside one.
SCRIPT: Final = re.compile(r"<script\b([^>]*)>(.*?)</script>", re.DOTALL | re.IGNORECASE)
FRAME: Final = (
    '<iframe srcdoc="{page}" style="width: 100%; height: 48em; border: 0" title="lightning-memprof report"></iframe>'
)
# Longer texts are not names; --format json has all of them.
MAX_TEXT: Final = 4000


def to_html(view: View | FilesView) -> str:
    """Return the page of a run, or of files, with its charts.

    Every text of the run is escaped, and its control characters are made visible.
    """
    document = document_of(view)
    try:
        drawn = file_charts(view.traces, view.snapshots) if isinstance(view, FilesView) else charts(view)
    except Exception as error:  # noqa: BLE001 the page is useful without its charts
        problem = f"The charts cannot be drawn ({type(error).__name__}: {error})"
        drawn = {}
        document = replace(document, incomplete=" · ".join(filter(None, (document.incomplete, problem))))
    return render_document(document, drawn)


def estimate_to_html(estimate: Estimate) -> str:
    """Return the page of an estimate, with its chart."""
    drawn = live_chart(estimate.live)
    return render_document(estimate_document(estimate), {} if drawn is None else {drawn.id: drawn})


def trial_to_html(trial: Trial) -> str:
    """Return the page of a trial, with its chart."""
    drawn = trial_chart(trial)
    return render_document(trial_document(trial), {} if drawn is None else {drawn.id: drawn})


def render_document(document: Document, drawn: Mapping[str, Chart]) -> str:
    """Return a document with its charts, each at its place."""
    nonce = secrets.token_urlsafe(16)
    environment = Environment(
        loader=PackageLoader("lightning_memprof.report.printers", "templates"),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "text": words_text,
        "percent": percent,
        "kind": _kind,
        "written": _written,
        "more": more_rows,
    }
    return environment.get_template("page.html.j2").render(
        page=document,
        made=dt.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %z"),
        policy=POLICY.format(nonce=nonce),
        nonce=nonce,
        charts={name: _Drawn(chart, nonce) for name, chart in drawn.items()},
        resources=_allowed(chart_resources(), nonce) if drawn else Markup(),
        style=_source("page.css"),
        script=_source("page.js"),
    )


def framed(page: str) -> str:
    """Return a page for a notebook: in a frame, where the styles of both stay apart."""
    # Without a base of its own, a link within the report opens the notebook in the frame.
    page = page.replace("<head>", '<head>\n<base href="about:srcdoc">', 1)
    return FRAME.format(page=html.escape(page))


class _Drawn:
    """A chart whose HTML goes into the page unescaped."""

    def __init__(self, chart: Chart, nonce: str) -> None:
        self.title = chart.title
        self.summary = chart.summary
        self.html = _allowed(chart.html, nonce)


def _kind(column: Column) -> str:
    """Return the class of a column's cells."""
    if column.alignment == "right":
        return "number"
    return "code" if column.unit == "path" else column.unit


def _written(cell: Cell, column: Column) -> str:
    words = cell_text(cell)
    return f"{words} · {percent(cell.share)}" if column.has_share and cell.share is not None else words


def _allowed(html: str, nonce: str) -> Markup:
    """Return HTML of this package whose scripts carry the nonce."""
    numbered = SCRIPT.sub(lambda found: f'<script nonce="{nonce}"{found[1]}>{found[2]}</script>', html)
    return Markup(numbered)  # noqa: S704 report.charts escapes the run's text  # nosec B704


def _source(name: str) -> Markup:
    text = resources.files("lightning_memprof.report.printers").joinpath("templates", name).read_text(encoding="utf-8")
    return Markup(text)  # noqa: S704 a file of this package  # nosec B704


def _visible(value: Any) -> Any:
    """Make control characters visible, and letters that no encoding has: recorded text must not control the page."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "\n".join(clean(line, MAX_TEXT) for line in value[:MAX_TEXT].split("\n"))
