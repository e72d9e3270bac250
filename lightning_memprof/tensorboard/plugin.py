"""TensorBoard's tab "Memprof": the runs below its log directory, their pages, and two beside each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tensorboard.backend.http_util import Respond
from tensorboard.plugins import base_plugin
from werkzeug.utils import send_file
from werkzeug.wrappers import Request, Response

from lightning_memprof.analysis.run.confined import run_files
from lightning_memprof.errors import MemprofError
from lightning_memprof.tensorboard.live import Live
from lightning_memprof.tensorboard.pages import Asked, Pages
from lightning_memprof.tensorboard.profiler_tab import place_in_profiler_tab
from lightning_memprof.tensorboard.runs import FoundRun, RunList, revision

if TYPE_CHECKING:
    from lightning_memprof.analysis.run.confined import RunFile

__all__ = ["MemprofPlugin"]

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
FORGOTTEN: Final = "this page is not kept any more; ask for it again"
UNREADABLE: Final = 500
# A trace above this has no place in a browser's string.
MOST_TRACE_BYTES: Final = 256 << 20

Answer = Callable[["MemprofPlugin", Request], Response]
App = Callable[[dict[str, Any], Any], Any]


class _Missing(Exception):  # noqa: N818 it is an answer and no error of ours
    """What is asked for is not there."""


def _answers(method: Answer) -> Callable[[MemprofPlugin, Request], Response]:
    """Turn what a route raises into an answer: a page that shows why is worth more than a server's traceback."""

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
    """The tab's server side. Every file that it reads is one that a manifest below the log directory names.

    Args:
        context: TensorBoard's.

    """

    plugin_name = NAME

    def __init__(self, context: base_plugin.TBContext) -> None:
        super().__init__(context)
        self._context = context
        places = log_directories(context)
        self._runs = RunList(places)
        self._has_one_place = len(places) == 1
        self._pages = Pages()
        self._live = Live()

    def is_active(self) -> bool:
        """Say whether there is a run."""
        return self._runs.any()

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """Describe the tab."""
        return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="Memprof", disable_reload=True)

    def get_plugin_apps(self) -> dict[str, App]:
        """Return what answers below ``/data/plugin/memprof``."""
        routes: dict[str, Answer] = {
            "/runs": MemprofPlugin._list_runs,
            "/live": MemprofPlugin._follow,
            "/page": MemprofPlugin._ask_page,
            "/page.html": MemprofPlugin._give_page,
            "/files": MemprofPlugin._list_files,
            "/file": MemprofPlugin._give_file,
            **{f"/{name}": MemprofPlugin._give_static for name in STATIC},
        }
        return {route: self._app(answer) for route, answer in routes.items()}

    def _app(self, answer: Answer) -> App:
        def app(environ: dict[str, Any], start_response: Any) -> Any:
            return answer(self, Request(environ))(environ, start_response)

        return app

    @_answers
    def _list_runs(self, request: Request) -> Response:
        return _json(request, {**self._runs.document(), "has_profiler_tab": self._has_profiler_tab()})

    @_answers
    def _follow(self, request: Request) -> Response:
        found = self._run(request, "run")
        return _json(request, {"run": self._runs.facts(found), **self._live.document(found)})

    @_answers
    def _ask_page(self, request: Request) -> Response:
        if request.args.get("key"):
            # For a live run each request may mean another page: the key identifies the one being made.
            key = request.args["key"]
            if (job := self._pages.job(key)) is None:
                raise _Missing(FORGOTTEN)
            return _json(request, job.document(key))
        runs = [self._run(request, "run")]
        if request.args.get("other"):
            # What is open is compared with a baseline, which is A.
            runs.insert(0, self._run(request, "other"))
        state = ".".join(map(revision, runs))
        asked = Asked(runs=tuple(runs), rank=_number(request, "rank"), window=_number(request, "window"), state=state)
        key, job = self._pages.ask(asked, again="again" in request.args)
        return _json(request, {**job.document(key), "revision": state})

    @_answers
    def _give_page(self, request: Request) -> Response:
        job = self._pages.job(request.args.get("key", ""))
        if job is None or job.state != "ready":
            raise _Missing(FORGOTTEN)
        answer: Response = Respond(
            request, job.page, "text/html", content_encoding="gzip", csp_scripts_sha256s=list(job.scripts)
        )
        return answer

    @_answers
    def _list_files(self, request: Request) -> Response:
        found = self._run(request, "run")
        files = run_files(found.directory, found.ranks, found.top)
        return _json(request, {"files": [self._file_row(found, file) for file in files]})

    @_answers
    def _give_file(self, request: Request) -> Response:
        found = self._run(request, "run")
        path = request.args.get("path")
        files = run_files(found.directory, found.ranks, found.top)
        run_file = next((file for file in files if file.path == path), None)
        if run_file is None:
            raise _Missing("no manifest below the log directory names this file, or it is outside")
        is_shown = request.args.get("as") == "text" and run_file.type == "trace"
        if is_shown and run_file.size_bytes > MOST_TRACE_BYTES:
            raise _Missing("this trace is too large for a browser; see lightning-memprof view --steps")
        return _file_answer(run_file, request.environ, is_shown=is_shown)

    @_answers
    def _give_static(self, request: Request) -> Response:
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
            raise _Missing("there is no such run below the log directory any more")
        return found

    def _has_profiler_tab(self) -> bool:
        return PROFILER in (self._context.plugin_name_to_instance or {})

    def _file_row(self, found: FoundRun, file: RunFile) -> dict[str, Any]:
        is_trace = file.type == "trace" and self._has_profiler_tab()
        return {
            "rank": file.rank,
            "window": file.window,
            "type": file.type,
            "path": file.path,
            "size_bytes": file.size_bytes,
            "profiler_tab": place_in_profiler_tab(file.file, found.top) if is_trace and self._has_one_place else None,
        }


def log_directories(context: base_plugin.TBContext) -> dict[str, Path]:
    """Return TensorBoard's log directories on this machine, by the name that stands before their runs'."""
    if context.logdir:
        return {} if "://" in context.logdir else {"": Path(context.logdir).expanduser()}
    found = {}
    for part in (getattr(context.flags, "logdir_spec", "") or "").split(","):
        name, colon, place = part.partition(":")
        if not colon or name.startswith(("/", ".", "~")):
            name, place = "", part
        if place and "://" not in place:
            found[name or place] = Path(place).expanduser()
    return found


def _number(request: Request, name: str) -> int | None:
    value = request.args.get(name, "")
    return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else None


def _json(request: Request, document: Mapping[str, Any], code: int = 200) -> Response:
    answer: Response = Respond(request, dict(document), "application/json", code=code)
    return answer


def _file_answer(file: RunFile, environ: dict[str, Any], *, is_shown: bool) -> Response:
    """Return a file unchanged; nothing in it runs in the browser."""
    packed = file.file.suffix == ".gz"
    answer = send_file(
        file.file.resolve(),
        environ,
        mimetype="application/json" if is_shown else "application/octet-stream",
        as_attachment=not is_shown,
        download_name=file.file.name.encode("ascii", "replace").decode("ascii"),
    )
    answer.headers["X-Content-Type-Options"] = "nosniff"
    answer.headers["Content-Security-Policy"] = "default-src 'none'; sandbox"
    answer.headers["Cache-Control"] = "no-cache, must-revalidate"
    if is_shown and packed:
        answer.headers["Content-Encoding"] = "gzip"
    return answer
