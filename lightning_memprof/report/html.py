"""The page as one HTML file that opens from the disk and asks for nothing outside of itself."""

from __future__ import annotations

import re
import secrets
from dataclasses import replace
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lightning_memprof.report.charts import chart_resources, charts, file_charts
from lightning_memprof.report.files_view import FilesView
from lightning_memprof.report.page import files_page, run_page
from lightning_memprof.report.page.model import ChartPlace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_memprof.report.charts import Chart
    from lightning_memprof.report.page import Page
    from lightning_memprof.report.view import View

__all__ = ["render_page", "to_html"]

# No host, no plug-in, no frame, no form; scripts only those that carry this page's own number.
POLICY: Final = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
    "base-uri 'none'; form-action 'none'"
)
# A script's text cannot hold its own end, so this finds each whole script, and nothing inside of one.
SCRIPT: Final = re.compile(r"<script\b([^>]*)>(.*?)</script>", re.DOTALL | re.IGNORECASE)
# What is longer is no name; the whole of it is in --format json.
MAX_TEXT: Final = 4000


def to_html(view: View | FilesView) -> str:
    """Return the page of a run, or of files, as HTML.

    Every text of the run is escaped, and its control characters are made visible.
    """
    page = files_page(view) if isinstance(view, FilesView) else run_page(view)
    try:
        drawn = file_charts(view.traces, view.snapshots) if isinstance(view, FilesView) else charts(view)
    except Exception as error:  # noqa: BLE001 the page is worth having without its charts
        problem = f"The charts cannot be drawn ({type(error).__name__}: {error})"
        drawn, page = {}, replace(page, incomplete=" · ".join(filter(None, (page.incomplete, problem))))
    return render_page(page, drawn)


def render_page(page: Page, drawn: Mapping[str, Chart]) -> str:
    """Return a page with its charts as HTML; a chart that no place was left for stands at its section's beginning."""
    nonce = secrets.token_urlsafe(16)
    environment = Environment(
        loader=PackageLoader("lightning_memprof.report", "templates"),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    placed = {part.id for section in page.sections for part in section.parts if isinstance(part, ChartPlace)}
    return environment.get_template("page.html.j2").render(
        page=page,
        policy=POLICY.format(nonce=nonce),
        nonce=nonce,
        charts={name: _Drawn(chart, nonce) for name, chart in drawn.items()},
        loose={
            section.id: [name for name, chart in drawn.items() if name not in placed and chart.section == section.id]
            for section in page.sections
        },
        resources=_allowed(chart_resources(), nonce) if drawn else Markup(),
        style=_source("page.css"),
        script=_source("page.js"),
    )


class _Drawn:
    """A chart whose HTML may stand in the page as it is."""

    def __init__(self, chart: Chart, nonce: str) -> None:
        self.title = chart.title
        self.summary = chart.summary
        script = f"<script>{chart.script}</script>" if chart.script else ""
        self.html = _allowed(chart.html + script, nonce)


def _allowed(html: str, nonce: str) -> Markup:
    """Let the scripts of our own HTML run."""
    numbered = SCRIPT.sub(lambda found: f'<script nonce="{nonce}"{found[1]}>{found[2]}</script>', html)
    return Markup(numbered)  # noqa: S704 report.charts escapes what it holds of the run  # nosec B704


def _source(name: str) -> Markup:
    text = resources.files("lightning_memprof.report").joinpath("templates", name).read_text(encoding="utf-8")
    return Markup(text)  # noqa: S704 a file of this package  # nosec B704


def _visible(value: Any) -> Any:
    """Make control characters visible, and what no encoding has: a name of the program must not steer the reader."""
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    short = value if len(value) <= MAX_TEXT else f"{value[: MAX_TEXT - 1]}…"
    return "".join(
        character
        if character.isprintable() or character == "\n"
        else character.encode("unicode_escape", "backslashreplace").decode("ascii")
        for character in short
    )
