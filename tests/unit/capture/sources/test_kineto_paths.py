from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lightning_memprof.capture.sources import kineto
from lightning_memprof.capture.sources.kineto import TraceFile, plain_directory

ODD_NAMES = ["a\nb", "a\rb", "a\\b", 'a"b', "a\x1bb", "\udcff", "x%d{}y"]


def recorded() -> profile:
    with profile(activities=[ProfilerActivity.CPU]) as made:
        torch.zeros(1)
    return made


@pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
def test_torch_writes_a_whole_trace_into_a_directory_of_any_name(name: str, tmp_path: Path) -> None:
    raw = tmp_path / name / "raw.json"
    assert TraceFile(raw, tmp_path / "trace").take(recorded()) == raw.stat().st_size
    assert json.loads(raw.read_bytes())["traceEvents"]
    assert list(raw.parent.iterdir()) == [raw]


def test_nothing_stays_open_and_without_proc_the_directory_has_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with plain_directory(tmp_path / "new") as plain:
        assert Path(plain).samefile(tmp_path / "new")
        assert plain != str(tmp_path / "new")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    monkeypatch.setattr(kineto, "_OPENED", tmp_path / "nowhere")
    with plain_directory(tmp_path / "new") as plain:
        assert plain == str(tmp_path / "new")


def test_a_truncated_trace_is_removed_and_the_error_has_its_bytes_the_free_bytes_and_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(path: str) -> None:
        Path(f"{path}.tmp").write_bytes(b"{" * 300)

    results = SimpleNamespace(save=save, trace_start_ns=lambda: 1)
    profiler: Any = SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))
    monkeypatch.setattr(kineto.shutil, "disk_usage", lambda _: SimpleNamespace(free=5 << 30))
    with pytest.raises(OSError, match=r"wrote 300 B of the trace, which is truncated; 5.00 GiB free") as caught:
        TraceFile(tmp_path / "raw.json", tmp_path / "trace").take(profiler)
    assert caught.value.filename == str(tmp_path / "raw.json")
    assert list(tmp_path.iterdir()) == []
