from __future__ import annotations

import gzip
import json
import time

import pytest

from fake_runs import FakeRun, make_run
from lightning_memprof.artifacts.naming import manifest_name
from lightning_memprof.tensorboard.pages import PageRequest, Pages
from lightning_memprof.tensorboard.runs import RunList


def made(pages, page):
    """Return the key of a page once it is ready, or the reason once it has failed."""
    deadline = time.monotonic() + 120
    while (state := pages.state(key := pages.request(page)))["state"] not in {"ready", "failed"}:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return key if state["state"] == "ready" else state["message"]


def html(pages, key) -> str:
    return gzip.decompress(pages.page(key).content).decode()


@pytest.mark.slow
def test_a_page_is_rendered_once_per_revision_and_two_runs_are_compared(tmp_path):
    slow = {"data_wait": 9_000_000, "forward": 6_000_000, "backward": 10_000_000, "optimizer": 1, "callbacks": 1,
            "other": 1}  # fmt: skip
    make_run(tmp_path / "a", FakeRun(trace=False, memory=None))
    make_run(tmp_path / "b", FakeRun(trace=False, memory=None, phases=lambda rank, step: slow))
    a, b = sorted(RunList({"": tmp_path}).scan(), key=lambda run: run.label)
    pages = Pages()
    key = made(pages, PageRequest((a,), state="1"))
    page = pages.page(key)
    assert len(page.scripts) >= 1
    assert "<h1>" in html(pages, key)
    assert made(pages, PageRequest((a,), state="1")) == key
    assert pages.page(key) is page
    assert pages.state("no such page") is None
    text = html(pages, made(pages, PageRequest((a, b))))
    assert '<table class="sortable' in text
    assert "data_wait_ns" in text
    assert "step time +" in text  # B is slower


@pytest.mark.slow
def test_a_failed_page_shows_the_reason(tmp_path):
    run = make_run(tmp_path / "a", FakeRun(trace=False, memory=None))
    (found,) = RunList({"": tmp_path}).scan()
    (run / manifest_name(0)).unlink()
    assert "no run is in it" in made(Pages(), PageRequest((found,)))


@pytest.mark.slow
def test_files_outside_the_log_directory_are_not_read(tmp_path):
    run = make_run(tmp_path / "logs" / "a", FakeRun(memory=None))
    secret = tmp_path / "secret.pt.trace.json"
    (trace,) = (tmp_path / "logs" / "a").glob("*.gz")
    secret.write_bytes(gzip.decompress(trace.read_bytes()).replace(b"aten::linear", b"a secret name"))
    row = {"kind": "artifact", "path": str(secret), "type": "trace", "collector": "operator_trace", "window": 1,
           "size_bytes": secret.stat().st_size}  # fmt: skip
    with (run / manifest_name(0)).open("a") as stream:
        stream.write(json.dumps(row) + "\n")
    (found,) = RunList({"": tmp_path / "logs"}).scan()
    pages = Pages()
    text = html(pages, made(pages, PageRequest((found,))))
    assert "a secret name" not in text
    assert "is outside" in text
    (run / "system.rank00000.jsonl").symlink_to(secret)
    assert "is a link that leads out" in made(pages, PageRequest((found,), state="2"))
