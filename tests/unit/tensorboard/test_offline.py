from __future__ import annotations

import base64
import hashlib
import logging
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import pytest
from werkzeug.test import Client
from werkzeug.wrappers import Request, Response

from lightning_memprof.tensorboard import offline
from lightning_memprof.tensorboard.offline import OfflineProfilerPage

INDEX = files("torch_tb_profiler").joinpath("static", "index.html").read_text()
TRACE = files("torch_tb_profiler").joinpath("static", "trace_embedding.html").read_text()
VIEWER = files("torch_tb_profiler").joinpath("static", "trace_viewer_full.html").read_text()


@pytest.fixture
def profiler_class(monkeypatch: pytest.MonkeyPatch) -> type:
    """The class of torch-tb-profiler; its routes are restored after the test."""
    from torch_tb_profiler.plugin import TorchProfilerPlugin

    monkeypatch.setattr(TorchProfilerPlugin, "get_plugin_apps", TorchProfilerPlugin.get_plugin_apps)
    found: type = TorchProfilerPlugin
    return found


def routes(profiler_class: type, mode: str) -> dict[str, Any]:
    OfflineProfilerPage().load(SimpleNamespace(flags=SimpleNamespace(memprof_offline=mode)))
    # The constructor starts threads that never end; the routes do not need them.
    return profiler_class.get_plugin_apps(object.__new__(profiler_class))


def get(apps: dict[str, Any], path: str, query: str = "") -> Any:
    return Client(apps[path], Response).get(path, query_string=query)


def test_the_installed_pages_are_supported():
    charts = offline.charts_page(INDEX)
    trace = offline.trace_page(TRACE, VIEWER)
    assert charts is not None
    assert trace is not None
    assert offline.CHARTS_SCRIPT not in charts
    assert offline.ELEMENTS_SCRIPT not in trace
    assert "trace_embedding.html?scripts=local" in charts


@pytest.mark.parametrize(
    "page",
    [
        "<html></html>",
        INDEX.replace(offline.CHARTS_SCRIPT, "https://www.gstatic.com/charts/loader-2.js"),
        INDEX.replace("<body>", '<body><script src="https://example.com/more.js"></script>'),
        INDEX.replace("<body>", f'<body><script src="{offline.CHARTS_SCRIPT}"></script>'),
        INDEX.replace("./trace_embedding.html", "./frame.html"),
    ],
)
def test_an_unknown_page_is_not_changed(page):
    assert offline.charts_page(page) is None


def test_each_inline_script_has_its_hash():
    page = "<script>let a = 1;\r\n</script><script src='x.js'></script><script>b</script>"
    expected = [base64.b64encode(hashlib.sha256(text).digest()).decode() for text in (b"let a = 1;\n", b"b")]
    assert offline.script_hashes(page) == expected


@pytest.mark.slow
def test_always_serves_local_pages_and_their_policy_forbids_other_hosts(profiler_class):
    apps = routes(profiler_class, "always")
    for path in ("/index.html", "/trace_embedding.html"):
        for query in ("", "scripts=cdn", "scripts=local"):
            answer = get(apps, path, query)
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'self'" in policy
            assert "connect-src 'self';" in policy
            assert "'unsafe-inline'" not in policy.partition("script-src")[2]
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert "memprof/" in answer.get_data(as_text=True)


def test_never_does_not_change_the_plug_in(profiler_class):
    before = profiler_class.get_plugin_apps
    assert "/memprof/charts.js" not in routes(profiler_class, "never")
    assert profiler_class.get_plugin_apps is before


@pytest.mark.parametrize(("path", "page"), [("/index.html", INDEX), ("/trace_embedding.html", TRACE)])
def test_the_browser_chooses_and_with_internet_the_page_equals_the_installed_one(profiler_class, path, page):
    apps = routes(profiler_class, "auto")
    assert get(apps, path, "scripts=cdn").get_data() == page.encode()
    decides = get(apps, path)
    assert "memprof/decide.js" in decides.get_data(as_text=True)
    assert "default-src 'none'" in decides.headers["Content-Security-Policy"]
    assert "memprof/" in get(apps, path, "scripts=local").get_data(as_text=True)


def test_only_files_of_this_package_are_served_beside_the_pages(profiler_class):
    apps = routes(profiler_class, "always")
    ours = {path for path in apps if path.startswith("/memprof/")}
    assert "/memprof/charts_base.js" in ours
    assert not [path for path in ours if "*" in path]
    assert get(apps, "/memprof/charts.css").content_type.startswith("text/css")
    assert get(apps, "/memprof/decide.js").content_type.startswith("text/javascript")


def test_an_unknown_page_is_unchanged_and_logged_in_one_line(profiler_class, monkeypatch, caplog):
    @Request.application
    def other(request: Request) -> Response:
        return Response("<html>version 9</html>", content_type="text/html")

    apps = dict.fromkeys(("/index.html", "/trace_embedding.html", "/trace_viewer_full.html"), other)
    monkeypatch.setattr(profiler_class, "get_plugin_apps", lambda self: apps)
    with caplog.at_level(logging.WARNING, logger="tensorboard"):
        assert routes(profiler_class, "always") == apps
    assert len(caplog.messages) == 1
    assert "this version of lightning-memprof does not support its /index.html" in caplog.messages[0]


def test_a_second_server_in_one_process_has_its_own_mode(profiler_class):
    first = routes(profiler_class, "always")
    second = routes(profiler_class, "auto")
    assert "memprof/charts.js" in get(first, "/index.html", "scripts=cdn").get_data(as_text=True)
    assert get(second, "/index.html", "scripts=cdn").get_data() == INDEX.encode()
