from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch.profilers import PassThroughProfiler

from lightning_memprof import MemProfilerCallback
from lightning_memprof.integration.callback import AttachedCallback
from lightning_memprof.trial.program import _redirect
from training import trainer


@pytest.mark.parametrize("is_recorded", [True, False])
def test_only_the_recorded_run_keeps_what_the_name_and_the_environment_attach(
    is_recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_MEMPROF", "1" if is_recorded else "")
    tried = trainer(tmp_path, profiler="memprof")
    _redirect(tried, str(tmp_path / "tried"))
    kept = [type(callback) for callback in tried.callbacks if isinstance(callback, MemProfilerCallback)]
    assert kept == [AttachedCallback] * is_recorded
    assert isinstance(tried.profiler, PassThroughProfiler) is not is_recorded
