from __future__ import annotations

import json
from pathlib import Path

import pytest

from fake_memory import FakeMemory
from fake_runs import FakeRun, make_run
from lightning_memprof.cli.main import main
from lightning_memprof.units import MIB
from snapshots import MODEL, block, event, segment, snapshot, write_snapshot


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "a")
    make_run(root / "b", FakeRun(memory=FakeMemory(kept_bytes=2 * MIB)))
    return str(root / "a"), str(root / "b")


def test_a_run_compared_with_itself_is_exit_code_0_and_says_so(runs, capsys) -> None:
    a, _ = runs
    assert main(["compare", a, a, "--fail-on", "peak_allocated_bytes>5%", "step_ns>5%"]) == 0
    out = capsys.readouterr().out
    assert "no difference above noise" in out
    assert out.count("pass  ") == 2


def test_a_broken_limit_is_exit_code_1_and_names_what_grew(runs, capsys) -> None:
    a, b = runs
    assert main(["compare", a, b, "--fail-on", "peak_allocated_bytes>5%"]) == 1
    out = capsys.readouterr().out
    assert "fail      peak_allocated_bytes>5%" in out
    assert "blocks.0" in out


def test_without_a_limit_a_difference_is_exit_code_0(runs, capsys) -> None:
    a, b = runs
    assert main(["compare", a, b]) == 0
    assert "B differs from A" in capsys.readouterr().out


def test_limits_may_be_given_one_by_one(runs, capsys) -> None:
    a, b = runs
    limits = ["--fail-on", "step_ns>50%", "--fail-on", "activation_bytes>1MiB"]
    assert main(["compare", a, b, *limits, "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)["limits"]
    assert [(one["limit"], one["status"]) for one in found] == [
        ("step_ns>50%", "pass"),
        ("activation_bytes>1MiB", "fail"),
    ]


def test_markdown_is_for_a_comment_on_a_change(runs, capsys) -> None:
    a, b = runs
    assert main(["compare", a, b, "--format", "markdown"]) == 0
    assert capsys.readouterr().out.startswith("**B differs from A")


def test_a_limit_that_the_shell_cut_is_one_line_that_says_how_to_write_it(runs, capsys) -> None:
    a, b = runs
    assert main(["compare", a, b, "--fail-on", "peak_allocated_bytes"]) == 1
    err = capsys.readouterr().err
    assert "in quotes" in err
    assert err.count("\n") == 1


def test_a_run_and_a_snapshot_are_refused(runs, tmp_path: Path, capsys) -> None:
    ring = [event("alloc", 4096, MIB, MODEL)]
    file = write_snapshot(tmp_path / "s.pickle", snapshot([segment(block(4096, MIB, MODEL))], ring))
    assert main(["compare", runs[0], str(file)]) == 1
    assert "compare two of the same kind" in capsys.readouterr().err
    assert main(["compare", str(file), str(file)]) == 0
    assert "peak_requested_bytes" in capsys.readouterr().out


@pytest.mark.slow
def test_compare_and_export_need_neither_torch_nor_lightning(runs, tmp_path: Path, run_python) -> None:
    program = (
        "import sys\n"
        "for name in ('torch', 'lightning', 'pytorch_lightning'): sys.modules[name] = None\n"
        "from lightning_memprof.cli.main import main\n"
        "a, b = sys.argv[1:]\n"
        "codes = [main(['compare', a, b])]\n"
        "codes += [main(['export', a, '--to', form]) for form in ('csv', 'speedscope', 'memory_viz')]\n"
        "sys.exit(max(codes))\n"
    )
    done = run_python("-c", program, *runs)
    assert done.returncode == 0, done.stderr
    assert "B differs from A" in done.stdout
