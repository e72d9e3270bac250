"""TensorBoard's Memprof tab: runs below the log directory, their reports, and comparisons of two runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import resources
from pathlib import Path
from typing import Any, Final

from tensorboard.backend.http_util import Respond
from tensorboard.plugins import base_plugin
from werkzeug.utils import send_file
from werkzeug.wrappers import Request, Response

from lightning_memprof.errors import MemprofError
from lightning_memprof.read.run.confined import run_files
from lightning_memprof.read.run.model import ArtifactFile
from lightning_memprof.tensorboard.pages import PageRequest, Pages
from lightning_memprof.tensorboard.runs import FoundRun, LiveRuns, RunList, revision

NAME: Final = "memprof"
PROFILER: Final = "pytorch_profiler"
STATIC: Final = {
    "index.js": "text/javascript",
    "live.js": "text/javascript",
    "parts.js": "text/javascript",
    "trace.js": "text/javascript",
    "memprof.css": "text/css",
    "page.css": "text/css",
}
NOT_FOUND: Final = 404
DROPPED: Final = "this page is no longer cached; request it again"
UNREADABLE: Final = 500
# A browser cannot hold a larger trace in one string.
MAX_TRACE_BYTES: Final = 256 << 20

# Source: torch_tb_profiler.consts.WORKER_PATTERN.
_TRACE_NAME: Final = re.compile(r"(.*?)(\.\d+)?\.pt\.trace\.json(?:\.gz)?")

Route = Callable[["MemprofPlugin", Request], Response]
App = Callable[[dict[str, Any], Any], Any]


class _Missing(Exception):  # noqa: N818 becomes a 404 response
    """The requested resource does not exist."""


def _with_errors(method: Route) -> Callable[[MemprofPlugin, Request], Response]:
    """Turn exceptions of a route into JSON errors, which the tab shows."""

    @wraps(method)
    def answer(self: MemprofPlugin, request: Request) -> Response:
        try:
            return method(self, request)
        except _Missing as missing:
            return _json(request, {"error": str(missing)}, NOT_FOUND)
        except (MemprofError, OSError) as error:
            return _json(request, {"error": str(error)}, UNREADABLE)

    return answer


class MemprofPlugin(base_plugin.TBPlugin):  # type: ignore[misc]  # TensorBoard ships no types
    """Server side of the tab. It reads only files that a manifest below the log directory names.

    Args:
        context: TensorBoard's context.
    """

    plugin_name = NAME

    def __init__(self, context: base_plugin.TBContext) -> None:
        super().__init__(context)
        self._context = context
        directories = log_directories(context)
        self._runs = RunList(directories)
        self._has_one_directory = len(directories) == 1
        self._pages = Pages()
        self._live = LiveRuns()

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
            "/files": MemprofPlugin._list_files,
            "/file": MemprofPlugin._serve_file,
            **{f"/{name}": MemprofPlugin._serve_static for name in STATIC},
        }
        return {path: self._app(route) for path, route in routes.items()}

    def _app(self, route: Route) -> App:
        def app(environ: dict[str, Any], start_response: Any) -> Any:
            return route(self, Request(environ))(environ, start_response)

        return app

    @_with_errors
    def _list_runs(self, request: Request) -> Response:
        return _json(request, {**self._runs.document(), "has_profiler_tab": self._has_profiler_tab()})

    @_with_errors
    def _live_state(self, request: Request) -> Response:
        found = self._run(request, "run")
        return _json(request, {"run": self._runs.facts(found), **self._live.document(found)})

    @_with_errors
    def _request_page(self, request: Request) -> Response:
        if request.args.get("key"):
            # A live run gets a new page per revision; the key identifies the page in progress.
            key = request.args["key"]
            if (job := self._pages.job(key)) is None:
                raise _Missing(DROPPED)
            return _json(request, job.document(key))
        runs = [self._run(request, "run")]
        if request.args.get("other"):
            # The other run is the baseline, A.
            runs.insert(0, self._run(request, "other"))
        state = ".".join(map(revision, runs))
        page = PageRequest(
            runs=tuple(runs), rank=_number(request, "rank"), window=_number(request, "window"), state=state
        )
        key, job = self._pages.request(page, retry="again" in request.args)
        return _json(request, {**job.document(key), "revision": state})

    @_with_errors
    def _serve_page(self, request: Request) -> Response:
        job = self._pages.job(request.args.get("key", ""))
        if job is None or job.state != "ready":
            raise _Missing(DROPPED)
        answer: Response = Respond(
            request, job.page, "text/html", content_encoding="gzip", csp_scripts_sha256s=list(job.scripts)
        )
        return answer

    @_with_errors
    def _list_files(self, request: Request) -> Response:
        found = self._run(request, "run")
        files = run_files(found.directory, found.ranks, found.top)
        return _json(request, {"files": [self._file_row(found, file) for file in files]})

    @_with_errors
    def _serve_file(self, request: Request) -> Response:
        found = self._run(request, "run")
        path = request.args.get("path")
        files = run_files(found.directory, found.ranks, found.top)
        run_file = next((file for file in files if file.path == path), None)
        if run_file is None:
            raise _Missing(
                "no manifest below the log directory names this file, or the file is outside the log directory"
            )
        as_text = request.args.get("as") == "text" and run_file.type == "trace"
        if as_text and (run_file.size_bytes or 0) > MAX_TRACE_BYTES:
            raise _Missing("this trace is too large for a browser; select steps with lightning-memprof view --steps")
        return _file_answer(run_file, request.environ, as_text=as_text)

    @_with_errors
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

    def _has_profiler_tab(self) -> bool:
        return PROFILER in (self._context.plugin_name_to_instance or {})

    def _file_row(self, found: FoundRun, file: ArtifactFile) -> dict[str, Any]:
        is_trace = file.type == "trace" and self._has_profiler_tab()
        return {
            "rank": file.rank,
            "window": file.window,
            "type": file.type,
            "path": file.path,
            "size_bytes": file.size_bytes,
            "profiler_tab": place_in_profiler_tab(file.file, found.top)
            if is_trace and self._has_one_directory
            else None,
        }


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


def _file_answer(file: ArtifactFile, environ: dict[str, Any], *, as_text: bool) -> Response:
    """Serve a file unchanged; its content cannot run in the browser."""
    is_gzip = file.file.suffix == ".gz"
    answer = send_file(
        file.file.resolve(),
        environ,
        mimetype="application/json" if as_text else "application/octet-stream",
        as_attachment=not as_text,
        download_name=file.file.name.encode("ascii", "replace").decode("ascii"),
    )
    answer.headers["X-Content-Type-Options"] = "nosniff"
    answer.headers["Content-Security-Policy"] = "default-src 'none'; sandbox"
    answer.headers["Cache-Control"] = "no-cache, must-revalidate"
    if as_text and is_gzip:
        answer.headers["Content-Encoding"] = "gzip"
    return answer


def place_in_profiler_tab(file: Path, top: Path) -> dict[str, str] | None:
    """Return a trace's run, worker and span as in the selectors of the profiler tab; None if the tab does not list it.

    The run is the directory, the worker is the file name before the span, and the span is the 1-based index of its
    number among those of the worker, sorted as text.
    """
    real = file.resolve()
    match = _TRACE_NAME.fullmatch(real.name)
    if match is None:
        return None
    worker = match[1]
    try:
        below = real.parent.relative_to(top).as_posix()
        matches = [
            file_match
            for path in real.parent.iterdir()
            if (file_match := _TRACE_NAME.fullmatch(path.name)) and file_match[1] == worker
        ]
    except (OSError, ValueError):
        return None
    spans = sorted(other[2] for other in matches if other[2])
    span = str(spans.index(match[2]) + 1) if match[2] in spans else "default"
    return {"run": top.name if below == "." else below, "worker": worker, "span": span}
