"""The page at the end of a training: made beside it, waited for by nobody."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import lightning_memprof
from fake_runs import FakeRun, make_run
from lightning_memprof import ExtendedPyTorchProfiler, MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.artifacts.sink import RunPlace
from lightning_memprof.collectors import HostMemory, OperatorTrace, Pulse
from lightning_memprof.integration.background import start_report
from lightning_memprof.report.opened import opened
from lightning_memprof.report.printers.html import to_html
from training import Perceptron, Raises, loader, only_run, program, trainer
from waiting import wait_until

PROGRAM = program("""
import hashlib, os
import psutil
from lightning.pytorch import Callback, seed_everything
from lightning_memprof import ExtendedPyTorchProfiler, MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.collectors import HostMemory, Pulse

place, page = Path(sys.argv[1]), bool(sys.argv[2])

class Late(Callback):
    def on_train_end(self, *_):
        if not (child := os.fork()):
            os._exit(0)
        os.waitpid(child, 0)

seed_everything(3, verbose=False)
model = Perceptron()
recorder = MemProfilerCallback(
    Schedule(wait=1, active=1), [Pulse(), HostMemory()], output=OutputOptions(summary=False, report=page)
)
trainer(place, recorder, Late()).fit(model, loader(), loader(2))
print(hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters())).hexdigest())
print(len(psutil.Process().children(recursive=True)))
""")


def callback(*collectors) -> MemProfilerCallback:
    kept = OutputOptions(summary=False, report=True, on_error="raise")
    return MemProfilerCallback(Schedule(wait=1, active=1), [Pulse(), *collectors], output=kept)


def wait_for(path: Path) -> str:
    wait_until(path.exists)
    return path.read_text(encoding="utf-8")


def makers(directory: Path) -> list[psutil.Process]:
    return [
        process for process in psutil.process_iter(["cmdline"]) if str(directory) in (process.info["cmdline"] or [])
    ]  # fmt: skip


def wait_until_ended(directory: Path) -> None:
    wait_until(lambda: not makers(directory))


def test_a_fit_leaves_its_page_and_does_not_wait_for_it(tmp_path):
    trainer(tmp_path, callback(HostMemory())).fit(Perceptron(), loader(), loader(2))
    run = only_run(tmp_path)
    (maker,) = makers(run)
    assert maker.pid not in {child.pid for child in psutil.Process().children(recursive=True)}
    assert not (run / "report.html").exists()
    page = wait_for(run / "report.html")
    assert page.rstrip().endswith("</html>")
    assert "fit of Perceptron" in page
    assert ">finished<" in page
    wait_until_ended(run)
    assert not (run / "report.log").exists()


def test_the_page_at_the_end_has_all_that_the_command_has_traces_included(tmp_path):
    trainer(tmp_path, callback(OperatorTrace())).fit(Perceptron(), loader(4))
    run = only_run(tmp_path)
    page = wait_for(run / "report.html")
    wait_until_ended(run)
    with opened([str(run)]) as view:
        assert view.traces
        again = to_html(view)
    assert 'id="traces"' in page
    assert texts(page) == texts(again)


def texts(page: str) -> list[str]:
    """Return what a page says, without when it was made."""
    bare = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
    found = [line.strip() for line in re.sub(r"<[^>]+>", "\n", bare).splitlines()]
    return [line for line in found if line and not line.startswith("Made at ")]


@pytest.mark.parametrize("how", ["default", "profiler", "stage"])
def test_no_page_is_made_where_none_is_asked_for(tmp_path, monkeypatch, how):
    started: list[RunPlace] = []
    monkeypatch.setattr("lightning_memprof.integration.adapter.start_report", started.append)
    if how == "default":
        quiet = MemProfilerCallback(Schedule(wait=1, active=1), [Pulse()], output=OutputOptions(summary=False))
        trainer(tmp_path, quiet).fit(Perceptron(), loader(3))
    elif how == "profiler":
        trainer(tmp_path, profiler=ExtendedPyTorchProfiler()).fit(Perceptron(), loader(3))
    else:
        trainer(tmp_path, callback()).validate(Perceptron(), loader(3), verbose=False)
    assert started == []


def test_a_run_at_a_url_is_left_to_the_command(tmp_path):
    assert start_report(RunPlace(tmp_path, 1, "memory://b/run")) is False


def test_an_exception_leaves_a_page_too(tmp_path, monkeypatch):
    started: list[RunPlace] = []
    monkeypatch.setattr("lightning_memprof.integration.adapter.start_report", started.append)

    with pytest.raises(RuntimeError, match="mine"):
        trainer(tmp_path, callback()).fit(Raises(RuntimeError("mine"), 0), loader())
    assert [place.root for place in started] == [tmp_path / "log"]


def test_starting_it_loads_no_printer_waits_for_no_page_and_holds_no_pipe(tmp_path, environment):
    run = make_run(tmp_path / "log", FakeRun(steps=5))
    program = (
        "import sys; from pathlib import Path; from lightning_memprof.artifacts.sink import RunPlace\n"
        "from lightning_memprof.integration.background import start_report\n"
        "done = start_report(RunPlace(Path(sys.argv[1]), 1))\n"
        "print(done, Path(sys.argv[2]).exists(), 'bokeh' in sys.modules, 'jinja2' in sys.modules)\n"
    )
    # Reading to the end of its output would wait for whoever still holds it.
    said = subprocess.run(
        [sys.executable, "-c", program, str(run.parent), str(run / "report.html")],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    assert said.stdout.split() == ["True", "False", "False", "False"]
    wait_for(run / "report.html")
    wait_until_ended(run)


def test_the_package_of_the_training_writes_it_and_no_module_of_the_directory_it_was_started_in(tmp_path, environment):
    run = make_run(tmp_path / "log", FakeRun(steps=5))
    installed = Path(lightning_memprof.__file__).parent
    copied = tmp_path / "vendored" / "lightning_memprof"
    shutil.copytree(installed, copied, ignore=shutil.ignore_patterns("__pycache__"))
    template = copied / "report" / "printers" / "templates" / "page.html.j2"
    template.write_text(template.read_text(encoding="utf-8") + "<!-- vendored -->\n", encoding="utf-8")
    started_in = tmp_path / "scripts"
    started_in.mkdir()
    for name in ("copy", "queue", "json", "lightning_memprof", "torch", "lightning"):
        (started_in / f"{name}.py").write_text("open('trained_again', 'w').close(); raise SystemExit\n")
    program = (
        f"import sys; sys.path.insert(0, {str(copied.parent)!r})\n"
        "from pathlib import Path; from lightning_memprof.artifacts.sink import RunPlace\n"
        "from lightning_memprof.integration.background import start_report\n"
        "sys.exit(not start_report(RunPlace(Path(sys.argv[1]), 1)))\n"
    )
    command = [sys.executable, "-I", "-c", program, str(run.parent)]
    subprocess.run(command, check=True, env=environment, cwd=started_in)
    assert "<!-- vendored -->" in wait_for(run / "report.html")
    assert not (started_in / "trained_again").exists()
    wait_until_ended(run)


@pytest.mark.parametrize(("name", "value"), [("frozen", True), ("executable", ""), ("executable", None)])
def test_a_program_that_is_no_interpreter_is_not_started_again(tmp_path, monkeypatch, name, value):
    monkeypatch.setattr(sys, name, value, raising=False)
    monkeypatch.setattr(subprocess, "run", lambda *_arguments, **_options: pytest.fail("started"))
    assert start_report(RunPlace(tmp_path, 1)) is False


def test_a_shell_that_is_missing_costs_a_line_of_the_log(tmp_path, monkeypatch, caplog):

    def missing(*_arguments, **_options):
        raise FileNotFoundError("/bin/sh")

    monkeypatch.setattr(subprocess, "run", missing)
    assert start_report(RunPlace(tmp_path, 1)) is False
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_on_a_full_disk_neither_a_part_of_the_page_nor_an_empty_log_is_left(tmp_path, environment):
    run = make_run(tmp_path / "log", FakeRun(steps=5))
    before = sorted(run.rglob("*"))
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "from lightning_memprof.report.written import main; sys.exit(main(sys.argv[1:]))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(run)], capture_output=True, text=True, check=False, env=environment
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "")
    assert sorted(run.rglob("*")) == before


def test_a_training_from_stdin_with_a_forked_child_ends_as_it_does_without_the_page_to_the_last_bit(
    tmp_path, environment
):
    ended = []
    for wanted in ("", "page"):
        place = tmp_path / (wanted or "bare")
        place.mkdir()
        done = subprocess.run(
            [sys.executable, "-", str(place), wanted],
            input=PROGRAM, capture_output=True, text=True, check=False, env=environment, cwd=place,
        )  # fmt: skip
        said = done.stderr.replace(str(place), "PLACE").splitlines()
        ended.append((done.returncode, done.stdout, [line for line in said if "HTML report" not in line]))
    wait_until_ended(tmp_path / "page" / "log" / "memprofiler")
    assert ended[0] == ended[1]
    assert ended[0][0] == 0
    assert (tmp_path / "page" / "log" / "memprofiler" / "report.html").exists()
