"""TensorBoard's Memprof tab: runs below the log directory, their reports, and comparisons of two runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final

from tensorboard.backend.http_util import Respond
from tensorboard.plugins import base_plugin
from werkzeug.wrappers import Request, Response

from lightning_memprof.errors import MemprofError
from lightning_memprof.tensorboard.pages import PageRequest, Pages
from lightning_memprof.tensorboard.runs import FoundRun, RunList, live_document, revision

NAME: Final = "memprof"
STATIC: Final = {
    "index.js": "text/javascript",
    "live.js": "text/javascript",
    "parts.js": "text/javascript",
    "memprof.css": "text/css",
    "page.css": "text/css",
}
NOT_FOUND: Final = 404
DROPPED: Final = "this page is no longer cached; request it again"
UNREADABLE: Final = 500

Route = Callable[["MemprofPlugin", Request], Response]
App = Callable[[dict[str, Any], Any], Any]


class _Missing(Exception):  # noqa: N818 becomes a 404 response
    """The requested resource does not exist."""


class MemprofPlugin(base_plugin.TBPlugin):  # type: ignore[misc]  # TensorBoard ships no types
    """Server side of the tab. It serves pages, no files of a run.

    Args:
        context: TensorBoard's context.
    """

    plugin_name = NAME

    def __init__(self, context: base_plugin.TBContext) -> None:
        super().__init__(context)
        self._runs = RunList(log_directories(context))
        self._pages = Pages()

    def is_active(self) -> bool:
        """Whether there is a run."""
        return self._runs.any()

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """Describe the tab."""
        return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="Memprof", disable_reload=True)

    def get_plugin_apps(self) -> dict[str, App]:
        """Return the routes below ``/data/plugin/memprof``."""
        routes: dict[str, Route] = {
            "/runs": MemprofPlugin._list_runs,
            "/live": MemprofPlugin._live_state,
            "/page": MemprofPlugin._request_page,
            "/page.html": MemprofPlugin._serve_page,
            **{f"/{name}": MemprofPlugin._serve_static for name in STATIC},
        }
        return {path: self._app(route) for path, route in routes.items()}

    def _app(self, route: Route) -> App:
        def app(environ: dict[str, Any], start_response: Any) -> Any:
            request = Request(environ)
            # The tab shows errors, which are JSON.
            try:
                answer = route(self, request)
            except _Missing as missing:
                answer = _json(request, {"error": str(missing)}, NOT_FOUND)
            except (MemprofError, OSError) as error:
                answer = _json(request, {"error": str(error)}, UNREADABLE)
            return answer(environ, start_response)

        return app

    def _list_runs(self, request: Request) -> Response:
        return _json(request, self._runs.document())

    def _live_state(self, request: Request) -> Response:
        return _json(request, live_document(self._run(request, "run")))

    def _request_page(self, request: Request) -> Response:
        if request.args.get("key"):
            # A live run gets a new page per revision; the key identifies the page in progress.
            key = request.args["key"]
            return _json(request, self._state(key))
        runs = [self._run(request, "run")]
        if request.args.get("other"):
            # The other run is the baseline, A.
            runs.insert(0, self._run(request, "other"))
        state = ".".join(map(revision, runs))
        page = PageRequest(
            runs=tuple(runs), rank=_number(request, "rank"), window=_number(request, "window"), state=state
        )
        key = self._pages.request(page, retry="again" in request.args)
        return _json(request, {**self._state(key), "revision": state})

    def _state(self, key: str) -> dict[str, Any]:
        found = self._pages.state(key)
        if found is None:
            raise _Missing(DROPPED)
        return found

    def _serve_page(self, request: Request) -> Response:
        page = self._pages.page(request.args.get("key", ""))
        if page is None:
            raise _Missing(DROPPED)
        answer: Response = Respond(
            request, page.content, "text/html", content_encoding="gzip", csp_scripts_sha256s=list(page.scripts)
        )
        return answer

    def _serve_static(self, request: Request) -> Response:
        name = request.path.rpartition("/")[2]
        package, place = (
            ("lightning_memprof.report.printers", "templates") if name == "page.css" else (__package__, "static")
        )
        data = resources.files(package).joinpath(place, name).read_bytes()
        answer: Response = Respond(request, data, STATIC[name])
        return answer

    def _run(self, request: Request, name: str) -> FoundRun:
        found = self._runs.find(request.args.get(name, ""))
        if found is None:
            raise _Missing("no such run below the log directory")
        return found


def log_directories(context: base_plugin.TBContext) -> dict[str, Path]:
    """Return TensorBoard's local log directories by name, which prefixes the names of their runs."""
    if context.logdir:
        return {} if "://" in context.logdir else {"": Path(context.logdir).expanduser()}
    directories = {}
    for part in (getattr(context.flags, "logdir_spec", "") or "").split(","):
        name, colon, place = part.partition(":")
        if not colon or name.startswith(("/", ".", "~")):
            name, place = "", part
        if place and "://" not in place:
            directories[name or place] = Path(place).expanduser()
    return directories


def _number(request: Request, name: str) -> int | None:
    value = request.args.get(name, "")
    return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else None


def _json(request: Request, document: Mapping[str, Any], code: int = 200) -> Response:
    answer: Response = Respond(request, dict(document), "application/json", code=code)
    return answer
