from __future__ import annotations

from pathlib import Path

from fake_runs import make_run
from lightning_memprof.judge import Facts
from lightning_memprof.read.run.load import load_run


def test_evidence_of_a_window_has_its_file_its_steps_and_their_time(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path))
    facts = Facts.of(run)
    (evidence,) = facts.recorded(run.lead, "hooks", (3,))
    rows = {row["step"]: row for row in run.lead.pulse}
    start, duration = rows[3]["start_ns"], rows[3]["duration_ns"]
    assert start is not None
    assert duration is not None
    assert evidence.artifact == "memprofiler/window000/rank00000.hooks.jsonl"
    assert (evidence.window, evidence.steps) == (0, (3, 3))
    assert (evidence.start_ns, evidence.end_ns) == (start, start + duration)
    assert facts.recorded(run.lead, "hooks", (17,)) == ()
    assert facts.recorded(run.lead, "nobody") == ()
