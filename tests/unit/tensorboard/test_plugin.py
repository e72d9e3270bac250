from __future__ import annotations

from types import SimpleNamespace

import pytest
from tensorboard.plugins.base_plugin import TBContext
from werkzeug.test import Client

from fake_runs import FakeRun, make_run
from lightning_memprof.tensorboard.plugin import MemprofPlugin, log_directories


def served(top, **context):
    """Return the plug-in and a function that requests its routes without a server."""
    plugin = MemprofPlugin(TBContext(logdir=str(top), **context))
    apps = plugin.get_plugin_apps()

    def ask(route: str, **query: str):
        return Client(apps[f"/{route}"]).get(f"/data/plugin/memprof/{route}", query_string=query)

    return plugin, ask


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "logs" / "version_0", FakeRun(world_size=2, windows=((2, 3), (6, 7)), memory=None))


def test_the_tab_is_active_only_if_there_is_a_run(tmp_path, run):
    assert served(tmp_path)[0].is_active()
    (tmp_path / "empty").mkdir()
    assert not served(tmp_path / "empty")[0].is_active()
    plugin, ask = served("s3://bucket/logs")
    assert not plugin.is_active()
    assert ask("runs").json["places"] == []


def test_missing_resources_return_404_with_a_reason(tmp_path, run):
    _, ask = served(tmp_path / "logs")
    for route in ("live", "page"):
        answer = ask(route, run="../version_0")
        assert answer.status_code == 404
        assert "no such run" in answer.json["error"]
    assert ask("page.html", key="<b>").status_code == 404


def test_every_response_forbids_content_sniffing(tmp_path, run):
    _, ask = served(tmp_path / "logs")
    answers = [ask(name) for name in ("index.js", "live.js", "parts.js", "memprof.css", "page.css", "runs", "live")]
    assert {answer.headers["X-Content-Type-Options"] for answer in answers} == {"nosniff"}


def test_named_log_directories_are_searched(tmp_path):
    for name in ("a", "b"):
        make_run(tmp_path / name, FakeRun(trace=False, memory=None))
    flags = SimpleNamespace(logdir_spec=f"first:{tmp_path / 'a'},{tmp_path / 'b'},far:s3://bucket/x")
    found = log_directories(TBContext(logdir="", flags=flags))
    assert found == {"first": tmp_path / "a", str(tmp_path / "b"): tmp_path / "b"}
    _, ask = served("", flags=flags)
    assert len(ask("runs").json["runs"]) == 2


def test_a_live_run_shows_its_progress(tmp_path):
    run = make_run(
        tmp_path / "a", FakeRun(steps=20, world_size=2, endings={0: None, 1: None}, trace=False, memory=None)
    )
    _, ask = served(tmp_path)
    (found,) = ask("runs").json["runs"]

    def steps(parts):
        return [
            words for part in parts if part["part"] == "lines" for label, words, _ in part["rows"] if label == "steps"
        ]

    live = ask("live", run=found["id"]).json
    assert [words.split(" ")[0] for words in steps(live["parts"])] == ["20"]
    rows = [words for part in live["parts"] if part["part"] == "lines" for _, words, _ in part["rows"]]
    assert any("median" in words for words in rows)
    (table,) = [part for part in live["parts"] if part["part"] == "table"]
    assert table["columns"][:3] == ["rank", "status", "steps"]
    assert [row[:3] for row in table["rows"]] == [["0", "running", "20"], ["1", "running", "20"]]
    assert [max(part["values"]) > 0 for part in live["parts"] if part["part"] == "chart"] == [True, True]
    row = (run / "pulse.rank00000.csv").read_text().splitlines()[-1].split(",")
    with (run / "pulse.rank00000.csv").open("a") as stream:
        stream.write(",".join(["20", *row[1:]]) + "\n")
    assert [words.split(" ")[0] for words in steps(ask("live", run=found["id"]).json["parts"])] == ["21"]
