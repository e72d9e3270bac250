"""A chart as HTML: its data as JSON that cannot end its script, and the JavaScript that draws it."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Final

import msgspec
from bokeh.embed import json_item
from bokeh.models import Model

from lightning_memprof.report.printers.values import clean

# Longer texts are not stacks; --format json has all of them.
_MAX_TEXT: Final = 4000
# Escapes of a JSON string, matched from the left: an escaped backslash does not start an escape.
_ESCAPE: Final = re.compile(r"\\(?:ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}|u[0-9a-f]{4}|.)")


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """A chart whose ``html`` is safe to embed (``Markup(chart.html)``).

    Attributes:
        id: that of its place in the document; also the id of its element, with ``chart-`` before it.
        title: plain text, not escaped.
        summary: the caption below the chart. Plain text, not escaped.
        html: the element, with its data as JSON in a script that does not run and that the data cannot end.
    """

    id: str
    title: str
    summary: str
    html: str


def made(chart_id: str, title: str, summary: str, model: Model, *, height: int, strings: Sequence[str] = ()) -> Chart:
    """Return a chart; its columns refer to the ``strings`` by index."""
    data = {"item": json_item(model), "strings": [_short(text) for text in strings]}
    label = html.escape(clean(title))
    written = (
        f'<figure class="chart" id="chart-{html.escape(chart_id)}" role="group" aria-label="{label}">'
        f'<div class="chart-place" style="min-height:{height}px"></div>'
        f"<figcaption>{html.escape(clean(summary))}</figcaption>"
        f'<script type="application/json">{inert(json.dumps(data, separators=(",", ":")))}</script>'
        "</figure>"
    )
    return Chart(id=chart_id, title=title, summary=summary, html=written)


def inert(document: str) -> str:
    """Return JSON, of ASCII letters alone, in which nothing can end a script or begin a comment.

    Control characters, and those that turn a line's direction, are made visible, as everywhere on the page.
    """
    visible = _ESCAPE.sub(_visible, document)
    return visible.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _visible(found: re.Match[str]) -> str:
    escape = found[0]
    if escape in {"\\n", '\\"', "\\\\", "\\/"} or json.loads(f'"{escape}"').isprintable():
        return escape
    return f"\\{escape}"


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"


def chart_resources(nonce: str = "") -> str:
    """Return the style and the scripts that all charts of a page need, as HTML for its head.

    About 1.3 MB, of which nearly all is bokeh's. ``nonce`` is that of the page's policy.
    """
    library = (files("bokeh") / "server/static/js/bokeh.min.js").read_text(encoding="utf-8")
    own = files(__package__)
    style = (own / "charts.css").read_text(encoding="utf-8")
    starts = (own / "charts.js").read_text(encoding="utf-8")
    # "</script" ends a script element even inside a string, where the backslash changes nothing.
    scripts = (script.replace("</script", "<\\/script") for script in (library, starts))
    return f"<style>{style}</style>" + "".join(f'<script nonce="{nonce}">{script}</script>' for script in scripts)
