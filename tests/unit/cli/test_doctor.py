from __future__ import annotations

import pytest

from lightning_memprof.cli.doctor import memory_limit_bytes
from lightning_memprof.units import GIB


@pytest.fixture
def groups(tmp_path):
    """Lay out a tree of control groups: ``groups(membership, {file: content})`` gives the two paths to ask with."""

    def lay_out(membership, files):
        (tmp_path / "cgroup").write_text(membership)
        for name, content in files.items():
            file = tmp_path / "mount" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        return tmp_path / "cgroup", tmp_path / "mount"

    return lay_out


def test_the_tightest_limit_above_the_process_counts(groups):
    files = {"a/b/memory.max": "max\n", "a/memory.max": f"{3 * GIB}\n", "memory.max": f"{5 * GIB}\n"}
    assert memory_limit_bytes(*groups("0::/a/b\n", files)) == 3 * GIB


def test_a_limit_of_version_1_is_found_beside_other_controllers(groups):
    files = {
        "memory/job/memory.limit_in_bytes": f"{2 * GIB}\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert memory_limit_bytes(*groups("5:cpu,cpuacct:/\n4:memory:/job\n0::/\n", files)) == 2 * GIB


def test_a_container_that_sees_only_the_top_of_its_groups_has_that_limit(groups):
    assert memory_limit_bytes(*groups("0::/docker/0123\n", {"memory.max": f"{GIB}\n"})) == GIB


@pytest.mark.parametrize(
    "files", [{}, {"memory.max": "max\n"}, {"memory/memory.limit_in_bytes": "9223372036854771712\n"}]
)
def test_no_limit_is_none(groups, files):
    assert memory_limit_bytes(*groups("4:memory:/\n0::/\n", files)) is None


def test_a_system_without_control_groups_has_no_limit(tmp_path):
    assert memory_limit_bytes(tmp_path / "nothing", tmp_path) is None


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
        'profiler="fts_extended"',
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
