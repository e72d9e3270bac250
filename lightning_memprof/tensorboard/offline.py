"""The page of torch-tb-profiler without internet: its routes, replaced in TensorBoard's process.

The page loads Google Charts, and its trace view a polyfill, from other hosts; without them it is an endless spinner.
What is installed stays as it is: the plug-in's routes are wrapped when TensorBoard asks for them.
"""

from __future__ import annotations

import argparse
import ipaddress
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

from lightning_memprof.tensorboard import offline_pages
from lightning_memprof.tensorboard.reachable import Reachable

__all__ = ["OfflineProfilerPage"]

App = Callable[..., Any]

_INDEX, _TRACE, _VIEWER = "/index.html", "/trace_embedding.html", "/trace_viewer_full.html"
_TYPES: Final = {".js": "text/javascript", ".css": "text/css"}
_HELP = """\
Whether the PyTorch profiler tab draws with charts of lightning-memprof's own in place of those that it loads from
www.gstatic.com and cdnjs.cloudflare.com. auto: where those cannot be reached. always: no page asks another host.
never: the tab as torch-tb-profiler has it. (default: auto)"""


class OfflineProfilerPage(base_plugin.TBLoader):  # type: ignore[misc]
    """Makes the profiler tab work without internet. It loads no plug-in, so that TensorBoard lists none."""

    def define_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add ``--memprof_offline``."""
        group = parser.add_argument_group("lightning-memprof")
        group.add_argument("--memprof_offline", choices=("auto", "always", "never"), default="auto", help=_HELP)

    def load(self, context: base_plugin.TBContext) -> None:
        """Wrap the routes of torch-tb-profiler, which TensorBoard asks for once all plug-ins are loaded."""
        mode = getattr(context.flags, "memprof_offline", "auto")
        if mode == "never":
            return
        try:
            from torch_tb_profiler.plugin import TorchProfilerPlugin
        except ImportError as error:
            _leave(f"torch-tb-profiler cannot be imported: {error}")
            return
        # A second server in this process wraps what the first one found.
        original = TorchProfilerPlugin.get_plugin_apps
        original = getattr(original, "__wrapped__", original)

        @wraps(original)
        def get_plugin_apps(plugin: Any) -> dict[str, App]:
            apps: dict[str, App] = original(plugin)
            return apps | _replacements(apps, always=mode == "always")

        TorchProfilerPlugin.get_plugin_apps = get_plugin_apps


def _leave(reason: str) -> None:
    """Say in one line of the log why the tab stays as it is."""
    tb_logging.get_logger().warning("memprof_offline: the profiler tab stays as it is: %s", reason)


def _replacements(apps: Mapping[str, App], *, always: bool) -> dict[str, App]:
    """The routes to replace and to add; none where the pages are not those that we know."""
    if not {_INDEX, _TRACE, _VIEWER} <= apps.keys():
        _leave(f"it has no {_INDEX}, {_TRACE} or {_VIEWER}")
        return {}
    charts = partial(_charts, apps[_INDEX])
    trace = partial(_traces, apps[_TRACE], apps[_VIEWER])
    for route, page in ((_INDEX, charts), (_TRACE, trace)):
        if page(EnvironBuilder(path=route).get_environ()) is None:
            _leave(f"its {route} is not one that this version of lightning-memprof knows")
            return {}
    ours = {f"/{offline_pages.FOLDER}/{name}": _file(name) for name in _names()}
    return ours | {
        _INDEX: _page(apps[_INDEX], charts, offline_pages.CHARTS_SCRIPT, always=always),
        _TRACE: _page(apps[_TRACE], trace, offline_pages.ELEMENTS_SCRIPT, always=always),
    }


def _text(app: App, environ: dict[str, Any]) -> str:
    """What a route of torch-tb-profiler answers."""
    environ = environ | {"REQUEST_METHOD": "GET", "QUERY_STRING": ""}
    environ.pop("HTTP_ACCEPT_ENCODING", None)
    return Response.from_app(app, environ).get_data(as_text=True)


def _charts(index: App, environ: dict[str, Any]) -> str | None:
    return offline_pages.charts_page(_text(index, environ))


def _traces(frame: App, viewer: App, environ: dict[str, Any]) -> str | None:
    # Each route answers by the name in the path.
    path = environ["PATH_INFO"].rpartition("/")[0]
    return offline_pages.trace_page(_text(frame, environ), _text(viewer, environ | {"PATH_INFO": path + _VIEWER}))


def _page(original: App, local: Callable[[dict[str, Any]], str | None], script: str, *, always: bool) -> App:
    """A route that gives the original page, ours, or the one that finds out which of the two.

    Args:
        original: torch-tb-profiler's route.
        local: our page.
        script: what the original loads from another host.
        always: whether only ours is given.

    """
    host = urlsplit(script).hostname or ""
    reachable = Reachable(host)

    def answer(environ: dict[str, Any], start_response: App) -> Any:
        request = Request(environ)
        asked = "local" if always else request.args.get("scripts")
        if asked not in {"cdn", "local"} and _browser_is_here(request) and not reachable():
            asked = "local"
        page = local(environ) if asked == "local" else None
        response: App
        if page is not None:
            hashes = offline_pages.script_hashes(page)
            response = http_util.Respond(request, page, "text/html", csp_scripts_sha256s=hashes)
        elif asked is None or asked not in {"cdn", "local"}:
            response = _decision(script, host)
        else:
            response = original
        return response(environ, start_response)

    return answer


def _decision(script: str, host: str) -> Response:
    policy = f"default-src 'none'; script-src 'self'; connect-src https://{host}"
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
    return Response(offline_pages.decision_page(script), content_type="text/html; charset=utf-8", headers=headers)


def _browser_is_here(request: Request) -> bool:
    """Whether what this machine can reach is what the browser can: no proxy has passed the request on."""
    if any(name in request.headers for name in ("Forwarded", "X-Forwarded-For", "X-Real-Ip")):
        return False
    try:
        return ipaddress.ip_address(request.remote_addr or "").is_loopback
    except ValueError:
        return False


def _names() -> list[str]:
    folder = files("lightning_memprof.tensorboard") / "static" / "offline"
    return sorted(found.name for found in folder.iterdir() if found.name.endswith(tuple(_TYPES)))


def _file(name: str) -> App:
    """A route that gives a file of ours."""
    content = (files("lightning_memprof.tensorboard") / "static" / "offline" / name).read_bytes()
    content_type = _TYPES[name[name.rindex(".") :]]

    def answer(environ: dict[str, Any], start_response: App) -> Any:
        response: App = http_util.Respond(Request(environ), content, content_type)
        return response(environ, start_response)

    return answer
