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
    deadline = time.monotonic() + 120
    while True:
        key, job = pages.request(page)
        if job.state in {"ready", "failed"}:
            return key, job
        assert time.monotonic() < deadline
        time.sleep(0.05)


def html(job) -> str:
    return gzip.decompress(job.page).decode()


@pytest.mark.slow
def test_a_page_is_rendered_once_per_revision_and_two_runs_are_compared(tmp_path):
    slow = {"data_wait": 9_000_000, "forward": 6_000_000, "backward": 10_000_000, "optimizer": 1, "callbacks": 1,
            "other": 1}  # fmt: skip
    make_run(tmp_path / "a", FakeRun(trace=False, memory=None))
    make_run(tmp_path / "b", FakeRun(trace=False, memory=None, phases=lambda rank, step: slow))
    a, b = sorted(RunList({"": tmp_path}).scan(), key=lambda run: run.label)
    pages = Pages()
    key, job = made(pages, PageRequest((a,), state="1"))
    assert job.state == "ready"
    assert len(job.scripts) >= 1
    assert "<h1>" in html(job)
    assert made(pages, PageRequest((a,), state="1"))[1] is job
    assert pages.job(key) is job
    assert pages.job("no such page") is None
    _, compared = made(pages, PageRequest((a, b)))
    text = html(compared)
    assert '<table class="sortable' in text
    assert "data_wait_ns" in text
    assert "step time +" in text  # B is slower


@pytest.mark.slow
def test_a_failed_page_shows_the_reason(tmp_path):
    run = make_run(tmp_path / "a", FakeRun(trace=False, memory=None))
    (found,) = RunList({"": tmp_path}).scan()
    (run / manifest_name(0)).unlink()
    _, job = made(Pages(), PageRequest((found,)))
    assert job.state == "failed"
    assert "no run is in it" in job.message


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
    _, job = made(Pages(), PageRequest((found,)))
    assert "a secret name" not in html(job)
    assert "is outside" in html(job)
    (run / "system.rank00000.jsonl").symlink_to(secret)
    _, job = made(Pages(), PageRequest((found,), state="2"))
    assert job.state == "failed"
    assert "is a link that leads out" in job.message
