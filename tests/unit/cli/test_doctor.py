from __future__ import annotations

import importlib
import warnings

import pytest

from lightning_memprof.cli.command import quiet_lightning


@pytest.mark.slow
def test_doctor_says_of_every_default_collector_whether_it_records_here(run_python):
    ended = run_python("-m", "lightning_memprof", "doctor", COLUMNS="80")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    states = [line.split()[:2] for line in ended.stdout.splitlines() if line.startswith(("ok ", "no ", "broken "))]
    lines = {name: state for state, name in states}
    for name in (
        "pulse",
        "host",
        "hooks",
        "functions",
        "saved_tensors",
        "oom",
        "operator_trace",
        "torch",
        "lightning",
        "kineto",
        'profiler="memprof"',
    ):
        assert lines[name] == "ok"
    assert {lines["allocator"], lines["allocator_history"]} <= {"ok", "no"}
    assert max(map(len, ended.stdout.splitlines())) <= 80
    assert ended.stderr == ""


@pytest.mark.slow
def test_doctor_names_what_is_broken_and_is_exit_code_1(run_python, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libtorch.so: cannot open shared object file')")
    ended = run_python("-m", "lightning_memprof", "doctor", COLUMNS="200")
    assert ended.returncode == 1
    assert "OSError: libtorch.so: cannot open shared object file" in ended.stdout
    assert "Not ready: torch" in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr


def test_the_trainer_of_the_check_does_not_warn_that_a_gpu_is_idle() -> None:
    importlib.import_module("lightning.pytorch")
    with warnings.catch_warnings(record=True) as caught, quiet_lightning():
        warnings.simplefilter("always", append=True)
        warnings.warn("GPU available but not used. You can set it by doing `Trainer(accelerator='gpu')`.", stacklevel=1)
        warnings.warn("another", stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["another"]
