"""A real S3 server on loopback, which can be told to fail."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.request import Request, urlopen

from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "runs"
Fault = Callable[[str, str], "str | None"]


class S3Server:
    """moto's S3 behind a gate.

    ``fault`` is asked for every request by method and path and says ``"500"``, ``"cut"`` (the connection dies in the
    middle of the request) or None.
    """

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        self.fault: Fault = lambda _method, _path: None
        self.failed: list[tuple[str, str, str]] = []
        gate = self

        class Handler(WSGIRequestHandler):
            def run_wsgi(self) -> None:
                wanted = gate.fault(self.command, self.path)
                if wanted is None:
                    super().run_wsgi()
                    return
                gate.failed.append((wanted, self.command, self.path))
                self.close_connection = True
                if wanted == "cut":
                    self.connection.shutdown(socket.SHUT_RDWR)
                else:
                    self.send_response(500)
                    self.send_header("Content-Length", "0")
                    self.end_headers()

            def log(self, *_: object) -> None:
                pass

        application = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="s3")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def s3_server(setenv: Callable[[str, str], None]) -> Iterator[S3Server]:
    """Serve an empty bucket; the environment's variables say where to s3fs, here and in processes that are started."""
    import s3fs

    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        setenv(name, value)
    server = S3Server()
    setenv("AWS_ENDPOINT_URL", server.endpoint)
    # fsspec keeps a file system for the process, and with it the address of an earlier server.
    s3fs.S3FileSystem.clear_instance_cache()
    server.start()
    try:
        # What an earlier server of this process was given.
        with urlopen(Request(f"{server.endpoint}/moto-api/reset", method="POST")):  # noqa: S310 our own server
            s3fs.S3FileSystem().mkdir(BUCKET)
        yield server
    finally:
        server.stop()
        s3fs.S3FileSystem.clear_instance_cache()
