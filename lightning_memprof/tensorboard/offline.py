"""The page of torch-tb-profiler (0.4.x) without internet: routes replaced in TensorBoard's process.

Its `static/index.html` loads Google Charts from www.gstatic.com, and its `static/trace_embedding.html` loads a
custom-elements polyfill from cdnjs.cloudflare.com; offline, the tab stays a spinner. The plug-in's routes are wrapped
when TensorBoard requests them; the installed package is not modified.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import re
from collections.abc import Callable, Mapping
from functools import partial, wraps
from importlib.resources import files
from typing import Any, Final
from urllib.parse import urlsplit

from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from tensorboard.util import tb_logging
from werkzeug.test import EnvironBuilder
from werkzeug.wrappers import Request, Response

App = Callable[..., Any]

_INDEX, _TRACE, _VIEWER = "/index.html", "/trace_embedding.html", "/trace_viewer_full.html"
_TYPES: Final = {".js": "text/javascript", ".css": "text/css"}
_HELP = """\
Serve the PyTorch profiler tab with lightning-memprof's own charts instead of scripts from www.gstatic.com and
cdnjs.cloudflare.com. auto: if the browser cannot reach those hosts. always: no page contacts another host. never: the
tab as torch-tb-profiler ships it. (default: auto)"""
CHARTS_SCRIPT = "https://www.gstatic.com/charts/loader.js"
ELEMENTS_SCRIPT = "https://cdnjs.cloudflare.com/ajax/libs/webcomponentsjs/0.7.24/webcomponents.min.js"
# Path of this package's files, relative to the page's address.
FOLDER = "memprof"

_CHARTS = ("charts_base.js", "charts_parts.js", "charts_axes.js", "charts_timeline.js", "charts.js")
_VIEWER_IMPORT = '<link rel="import" href="trace_viewer_full.html" onerror="onTraceViewerImportFail(event)">'
_FRAME = 'src:"./trace_embedding.html"'
_EXTERNAL = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)\s*=\s*[\"']?(?:https?:)?//", re.IGNORECASE)
_INLINE = re.compile(r"<script>(.*?)</script>", re.DOTALL)


class OfflineProfilerPage(base_plugin.TBLoader):  # type: ignore[misc]
    """Makes the profiler tab work without internet; ``load`` returns no plug-in, so TensorBoard lists none."""

    def define_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add ``--memprof_offline``."""
        group = parser.add_argument_group("lightning-memprof")
        group.add_argument("--memprof_offline", choices=("auto", "always", "never"), default="auto", help=_HELP)

    def load(self, context: base_plugin.TBContext) -> None:
        """Wrap the routes of torch-tb-profiler; TensorBoard requests them once all plug-ins are loaded."""
        mode = getattr(context.flags, "memprof_offline", "auto")
        if mode == "never":
            return
        try:
            from torch_tb_profiler.plugin import TorchProfilerPlugin
        except ImportError as error:
            _warn_unchanged(f"torch-tb-profiler cannot be imported: {error}")
            return
        # A second server in this process wraps the original method, not the first server's wrapper.
        original = TorchProfilerPlugin.get_plugin_apps
        original = getattr(original, "__wrapped__", original)

        @wraps(original)
        def get_plugin_apps(plugin: Any) -> dict[str, App]:
            apps: dict[str, App] = original(plugin)
            return apps | _replacements(apps, always=mode == "always")

        TorchProfilerPlugin.get_plugin_apps = get_plugin_apps


def _warn_unchanged(reason: str) -> None:
    """Log why the tab is not changed."""
    tb_logging.get_logger().warning("memprof_offline: the profiler tab is unchanged: %s", reason)


def _replacements(apps: Mapping[str, App], *, always: bool) -> dict[str, App]:
    """Return the routes to replace and to add; empty if the pages are unknown."""
    if not {_INDEX, _TRACE, _VIEWER} <= apps.keys():
        _warn_unchanged(f"{_INDEX}, {_TRACE} or {_VIEWER} is missing")
        return {}
    charts = partial(_charts, apps[_INDEX])
    trace = partial(_traces, apps[_TRACE], apps[_VIEWER])
    for route, page in ((_INDEX, charts), (_TRACE, trace)):
        if page(EnvironBuilder(path=route).get_environ()) is None:
            _warn_unchanged(f"this version of lightning-memprof does not support its {route}")
            return {}
    assets = {f"/{FOLDER}/{name}": _file(name) for name in _names()}
    return assets | {
        _INDEX: _page(apps[_INDEX], charts, CHARTS_SCRIPT, always=always),
        _TRACE: _page(apps[_TRACE], trace, ELEMENTS_SCRIPT, always=always),
    }


def _text(app: App, environ: dict[str, Any]) -> str:
    """Return the response body of a torch-tb-profiler route."""
    environ = environ | {"REQUEST_METHOD": "GET", "QUERY_STRING": ""}
    environ.pop("HTTP_ACCEPT_ENCODING", None)
    return Response.from_app(app, environ).get_data(as_text=True)


def _charts(index: App, environ: dict[str, Any]) -> str | None:
    return charts_page(_text(index, environ))


def _traces(frame: App, viewer: App, environ: dict[str, Any]) -> str | None:
    # Each route selects its file by the name in the path.
    path = environ["PATH_INFO"].rpartition("/")[0]
    return trace_page(_text(frame, environ), _text(viewer, environ | {"PATH_INFO": path + _VIEWER}))


def _page(original: App, local: Callable[[dict[str, Any]], str | None], script: str, *, always: bool) -> App:
    """Return a route that serves the original page, the local page, or the page that chooses between them.

    Args:
        original: torch-tb-profiler's route.
        local: builds the local page, None if the original is unknown.
        script: URL that the original loads from another host.
        always: serve only the local page.
    """

    def answer(environ: dict[str, Any], start_response: App) -> Any:
        request = Request(environ)
        choice = "local" if always else request.args.get("scripts")
        page = local(environ) if choice == "local" else None
        response: App
        if page is not None:
            hashes = script_hashes(page)
            response = http_util.Respond(request, page, "text/html", csp_scripts_sha256s=hashes)
        elif choice in {"cdn", "local"}:
            response = original
        else:
            response = _decision(script)
        return response(environ, start_response)

    return answer


def _decision(script: str) -> Response:
    """Return a page that tries to load a script, then reloads itself with ``scripts=cdn`` or ``scripts=local``."""
    page = (
        f'<!doctype html><html lang="en" data-script="{script}"><head><meta charset="utf-8"><title>Profiler</title>'
        f'<script src="{FOLDER}/decide.js"></script></head><body></body></html>'
    )
    policy = f"default-src 'none'; script-src 'self'; connect-src https://{urlsplit(script).hostname}"
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
    return Response(page, content_type="text/html; charset=utf-8", headers=headers)


def _names() -> list[str]:
    folder = files("lightning_memprof.tensorboard") / "static" / "offline"
    return sorted(file.name for file in folder.iterdir() if file.name.endswith(tuple(_TYPES)))


def _file(name: str) -> App:
    """Return a route that serves one file of this package."""
    content = (files("lightning_memprof.tensorboard") / "static" / "offline" / name).read_bytes()
    content_type = _TYPES[name[name.rindex(".") :]]

    def answer(environ: dict[str, Any], start_response: App) -> Any:
        response: App = http_util.Respond(Request(environ), content, content_type)
        return response(environ, start_response)

    return answer


def charts_page(page: str) -> str | None:
    """Return its index.html with local charts.

    Returns:
        The page, whose trace frame requests `trace_page`; None if the page is unknown.
    """
    scripts = "".join(f'<script src="{FOLDER}/{name}"></script>' for name in _CHARTS)
    # Empty icon: otherwise the browser requests one that no route serves.
    local = f'<link rel="icon" href="data:,"><link rel="stylesheet" href="{FOLDER}/charts.css">{scripts}'
    local_page = _replaced(page, _script(CHARTS_SCRIPT), local)
    return _replaced(local_page, _FRAME, f'{_FRAME[:-1]}?scripts=local"')


def trace_page(page: str, viewer: str) -> str | None:
    """Return its trace_embedding.html with local custom elements and the viewer inlined: HTML imports were removed.

    Args:
        page: the frame's page.
        viewer: trace_viewer_full.html.

    Returns:
        The page; None if either page is unknown.
    """
    start, end = re.search(r"<head\b[^>]*>", viewer), viewer.rfind("</head>")
    if start is None or end < start.end():
        return None
    # Browsers never displayed an imported page: its modules stay hidden.
    local = f'<style>dom-module {{ display: none; }}</style><script src="{FOLDER}/custom_elements.js"></script>'
    local_page = _replaced(page, _script(ELEMENTS_SCRIPT), local)
    return _replaced(local_page, _VIEWER_IMPORT, viewer[start.end() : end])


def script_hashes(page: str) -> list[str]:
    """Return the Base64 SHA-256 of each inline script, as in a content security policy."""
    # A browser hashes the parsed text, where line endings are normalized to a line feed.
    texts = (found[1].replace("\r\n", "\n").replace("\r", "\n") for found in _INLINE.finditer(page))
    return [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]


def _script(address: str) -> str:
    return f'<script src="{address}"></script>'


def _replaced(page: str | None, old: str, new: str) -> str | None:
    """Return the page with ``old`` replaced; None unless it occurs once, or if the page still loads from a host."""
    if page is None or page.count(old) != 1:
        return None
    before, after = page.split(old)
    replaced = before + new + after
    return replaced if not old.startswith("<script") or _EXTERNAL.search(replaced) is None else None
