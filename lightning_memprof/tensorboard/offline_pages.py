"""The pages of torch-tb-profiler (0.4.x) with scripts of ours in place of those of other hosts.

Its `static/index.html` asks www.gstatic.com for Google Charts and its `static/trace_embedding.html` asks
cdnjs.cloudflare.com for the custom elements that browsers have dropped; everything else is in the two pages and in
`static/trace_viewer_full.html`.
"""

from __future__ import annotations

import base64
import hashlib
import re

__all__ = ["CHARTS_SCRIPT", "ELEMENTS_SCRIPT", "FOLDER", "charts_page", "decision_page", "script_hashes", "trace_page"]

CHARTS_SCRIPT = "https://www.gstatic.com/charts/loader.js"
ELEMENTS_SCRIPT = "https://cdnjs.cloudflare.com/ajax/libs/webcomponentsjs/0.7.24/webcomponents.min.js"
# Where the pages find our files, seen from their own address.
FOLDER = "memprof"

_CHARTS = ("charts_base.js", "charts_parts.js", "charts_axes.js", "charts_timeline.js", "charts.js")
_VIEWER = '<link rel="import" href="trace_viewer_full.html" onerror="onTraceViewerImportFail(event)">'
_FRAME = 'src:"./trace_embedding.html"'
_ELSEWHERE = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)\s*=\s*[\"']?(?:https?:)?//", re.IGNORECASE)
_INLINE = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def charts_page(page: str) -> str | None:
    """Its index.html with our charts.

    Returns:
        The page, whose trace frame asks for `trace_page`; None where it is not the page that we know.

    """
    scripts = "".join(f'<script src="{FOLDER}/{name}"></script>' for name in _CHARTS)
    # An empty icon: opened alone, the page would request one that nobody serves.
    ours = f'<link rel="icon" href="data:,"><link rel="stylesheet" href="{FOLDER}/charts.css">{scripts}'
    page_with_ours = _replaced(page, _script(CHARTS_SCRIPT), ours)
    return _replaced(page_with_ours, _FRAME, f'{_FRAME[:-1]}?scripts=local"')


def trace_page(page: str, viewer: str) -> str | None:
    """Its trace_embedding.html with our custom elements, and the viewer in it: browsers no longer import pages.

    Args:
        page: the frame's page.
        viewer: trace_viewer_full.html.

    Returns:
        The page; None where one of the two is not as we know it.

    """
    start, end = re.search(r"<head\b[^>]*>", viewer), viewer.rfind("</head>")
    if start is None or end < start.end():
        return None
    # What a module defines is not for display: an imported page never was.
    ours = f'<style>dom-module {{ display: none; }}</style><script src="{FOLDER}/custom_elements.js"></script>'
    page_with_ours = _replaced(page, _script(ELEMENTS_SCRIPT), ours)
    return _replaced(page_with_ours, _VIEWER, viewer[start.end() : end])


def decision_page(script: str) -> str:
    """The page that tries to load a script, and then asks for itself with ``scripts=cdn`` or ``scripts=local``."""
    return (
        f'<!doctype html><html lang="en" data-script="{script}"><head><meta charset="utf-8"><title>Profiler</title>'
        f'<script src="{FOLDER}/decide.js"></script></head><body></body></html>'
    )


def script_hashes(page: str) -> list[str]:
    """The SHA-256 of each script in a page, in base64, as a content security policy names them."""
    # A browser hashes the text that its parser made, in which each line ends with a line feed.
    texts = (found[1].replace("\r\n", "\n").replace("\r", "\n") for found in _INLINE.finditer(page))
    return [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]


def _script(address: str) -> str:
    return f'<script src="{address}"></script>'


def _replaced(page: str | None, old: str, new: str) -> str | None:
    """The page with its one ``old`` replaced; None where it has none or several, or asks another host for more."""
    if page is None or page.count(old) != 1:
        return None
    before, after = page.split(old)
    made = before + new + after
    return made if not old.startswith("<script") or _ELSEWHERE.search(made) is None else None
