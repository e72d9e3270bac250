"""A document as one HTML file that opens from the disk and loads nothing from a network."""

from __future__ import annotations

import datetime as dt
import html
import re
import secrets
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from msgspec.structs import replace

from lightning_memprof.report.charts import charts, file_charts
from lightning_memprof.report.charts.embed import Chart, chart_resources
from lightning_memprof.report.document import Cell, Column, Document, Words
from lightning_memprof.report.files_view import FilesView
from lightning_memprof.report.printers.values import cell_text, clean, more_rows, words_text
from lightning_memprof.report.sections import document_of
from lightning_memprof.report.view import View
from lightning_memprof.units import percent

# No host, no plug-in, no frame, no form; only the scripts that carry this page's nonce.
POLICY: Final = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
    "base-uri 'none'; form-action 'none'"
)
FRAME: Final = (
    '<iframe srcdoc="{page}" style="width: 100%; height: 48em; border: 0" title="lightning-memprof report"></iframe>'
)
# Words of this package; on the page each has a tooltip, and a line in a legend.
TERMS: Final[Mapping[str, str]] = {
    "step": "one batch, from the wait for its data to the callbacks after it",
    "pulse": "times and memory of every step, over the whole run",
    "window": "some steps that all collectors record in detail, which makes them slower",
    "stall": "a step of more than twice the median whose excess is in forward, backward or optimizer",
    "untracked": "time of a step outside data wait, forward, backward, optimizer and callbacks",
}
# A step is in every second line: the legend says what it is.
TERM: Final = re.compile(r"\b(pulse|window|stall|untracked)s?\b")
# Longer texts are not names; --format json has all of them.
MAX_TEXT: Final = 4000


def to_html(view: View | FilesView) -> str:
    """Return the page of a run, or of files, with its charts.

    Every text of the run is escaped, and its control characters are made visible.
    """
    # A file does not change: it has no live section.
    document = document_of(view if isinstance(view, FilesView) else replace(view, live=None))
    try:
        drawn = file_charts(view.traces, view.snapshots) if isinstance(view, FilesView) else charts(view)
    except Exception as error:  # noqa: BLE001 the page is useful without its charts
        problem = f"The charts cannot be drawn ({type(error).__name__}: {error})"
        drawn = {}
        document = replace(document, incomplete=" · ".join(filter(None, (document.incomplete, problem))))
    return render_document(document, drawn.values())


def render_document(document: Document, drawn: Iterable[Chart | None] = ()) -> str:
    """Return a document with its charts, each at its place."""
    placed = {chart.id: chart for chart in drawn if chart is not None}
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
        "explained": _explained,
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
        charts=placed,
        # A chart's own script is data, which needs no nonce.
        resources=Markup(chart_resources(nonce)) if placed else "",  # noqa: S704 files of packages  # nosec B704
        style=_source("page.css"),
        terms=TERMS.items(),
        script=_source("page.js"),
    )


def framed(page: str) -> str:
    """Return a page for a notebook: in a frame, where the styles of both stay apart."""
    # Without a base of its own, a link within the report opens the notebook in the frame.
    page = page.replace("<head>", '<head>\n<base href="about:srcdoc">', 1)
    return FRAME.format(page=html.escape(page))


def _explained(words: Words | Cell) -> Markup:
    """Return words as HTML, with a tooltip for each term of this package."""
    text = str(escape(_visible(words_text(words))))
    explained = TERM.sub(lambda found: f'<abbr title="{TERMS[found[1]]}">{found[0]}</abbr>', text)
    return Markup(explained)  # noqa: S704 escaped above  # nosec B704


def _kind(column: Column) -> str:
    """Return the class of a column's cells."""
    if column.alignment == "right":
        return "number"
    return "code" if column.unit == "path" else column.unit


def _written(cell: Cell, column: Column) -> str:
    words = cell_text(cell)
    return f"{words} · {percent(cell.share)}" if column.has_share and cell.share is not None else words


def _source(name: str) -> Markup:
    text = resources.files("lightning_memprof.report.printers").joinpath("templates", name).read_text(encoding="utf-8")
    return Markup(text)  # noqa: S704 a file of this package  # nosec B704


def _visible(value: Any) -> Any:
    """Make control characters visible, and letters that no encoding has: recorded text must not control the page."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "\n".join(clean(line, MAX_TEXT) for line in value[:MAX_TEXT].split("\n"))
