"""Collectives that differ between ranks, compared with the analyzer of torch itself on the same flight recorder."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fake_runs import FakeRun, make_run
from lightning_memprof.account.ranks.hangs import difference
from lightning_memprof.artifacts.naming import collectives_name
from lightning_memprof.read.run.load import load_run

SUPPORT = Path(__file__).parents[1] / "support"


def first_mismatch(directory: Path) -> Any:
    """Return the first collective that torch's analyzer does not match; None where it matches all."""
    builder = pytest.importorskip("torch.distributed.flight_recorder.components.builder")
    loader = pytest.importorskip("torch.distributed.flight_recorder.components.loader")
    config = pytest.importorskip("torch.distributed.flight_recorder.components.config_manager")
    arguments = config.JobConfig().parse_args(["-p", "trace_", str(directory)])
    try:
        details, version = loader.read_dir(arguments)
    finally:
        # The analyzer is a program of its own, and disables it for its whole life.
        gc.enable()
    for dump in details.values():
        # Gloo leaves the name of its group empty here, and the analyzer fails: as NCCL writes it.
        dump["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    found = builder.build_db(details, arguments, version).collectives
    assert len(found) >= 7
    return next((collective for collective in found if not collective.pass_check), None)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("fault", ["missed", "reordered", "none"])
def test_the_first_collective_that_differs_is_that_of_torchs_analyzer(tmp_path: Path, fault: str) -> None:
    started = os.environ | {"PYTHONPATH": str(SUPPORT), "TORCH_FR_BUFFER_SIZE": "2000", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, str(SUPPORT / "recorded_collectives.py"), str(tmp_path)]
    ranks = [subprocess.Popen([*program, str(rank), fault], env=started) for rank in range(2)]
    assert [rank.wait(200) for rank in ranks] == [0, 0]
    directory = make_run(tmp_path / "run", FakeRun(world_size=2))
    for rank in range(2):
        (tmp_path / f"rows{rank}").rename(directory / collectives_name(rank))
    ours, theirs = difference(load_run(directory).ranks), first_mismatch(tmp_path)
    if fault == "none":
        assert ours is None
        assert theirs is None
        return
    assert ours is not None
    assert ours.number == theirs.collective_seq_id == 7
    assert ours.odd == 1
    assert theirs.collective_name.endswith(ours.calls[0].operation or "?")
