from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import textwrap

import pytest

import lightning_memprof
from fake_runs import make_run
from lightning_memprof.cli.main import COMMANDS, main
from lightning_memprof.errors import ArtifactError, MemprofError

UNIMPORTABLE = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "lightning", "pytorch_lightning", "lightning_fabric"):
            raise ImportError(f"{name} must not be imported here")

sys.meta_path.insert(0, Blocker())
"""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["shw"], "invalid choice: 'shw'"),
        (["report"], "TARGET"),
        (["show", "x", "--format", "xml"], "choose from"),
        (["doctor", "y"], "y"),
        (["demo", "--oot", "x"], "--oot"),
        (["demo", "--ou", "x"], "--ou"),
        (["run"], "name a program"),
        (["run", "--conifg", "x", "train.py"], "--conifg"),
    ],
)
def test_a_wrong_command_line_is_one_line_on_stderr_and_exit_code_2(arguments, words, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("lightning-memprof: error: ")
    assert words in err
    assert err.count("\n") == 1


def test_no_command_at_all_shows_the_help_on_stderr_and_is_exit_code_2(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "lightning-memprof demo" in err


@pytest.mark.parametrize(
    "arguments",
    [["--help"], *([command, "-h"] for command in COMMANDS)],
    ids=lambda arguments: arguments[0],
)
def test_every_command_has_a_help_that_fits_80_columns(arguments, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("usage: lightning-memprof")
    assert max(map(len, out.splitlines())) <= 80


def test_version_is_the_packages(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lightning-memprof {lightning_memprof.__version__}\n"


def test_our_errors_are_one_line_and_exit_code_1(tmp_path, capsys):
    assert main(["show", str(tmp_path / "nothing")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("lightning-memprof: error: ")
    assert "nothing" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("where", [["--debug", "show"], ["show", "--debug"]])
def test_debug_lets_the_exception_itself_through(where, tmp_path):
    with pytest.raises(MemprofError):
        main([*where, str(tmp_path / "nothing")])


def test_an_unforeseen_exception_is_one_line_that_names_its_type_and_debug(monkeypatch, capsys):
    def broken(*_: object):
        raise ZeroDivisionError("three\nlines\nhere")

    monkeypatch.setattr("lightning_memprof.report.opened.opened", broken)
    assert main(["show", "x"]) == 1
    err = capsys.readouterr().err
    assert err == "lightning-memprof: error: ZeroDivisionError: three lines here (--debug shows the traceback)\n"


@pytest.mark.parametrize("as_lightning_does_it", [False, True])
def test_ctrl_c_is_exit_code_130_and_says_nothing(as_lightning_does_it, monkeypatch, capsys):
    def press_ctrl_c():
        raise KeyboardInterrupt

    def interrupted(*_: object):
        try:
            press_ctrl_c()
        except KeyboardInterrupt:
            if as_lightning_does_it:
                sys.exit(1)
            raise

    monkeypatch.setattr("lightning_memprof.report.opened.opened", interrupted)
    assert main(["show", "x"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (RuntimeError("release unlocked lock"), 130, ""),
        (ArtifactError("a.json: cannot be removed"), 1, "lightning-memprof: error: a.json: cannot be removed\n"),
    ],
)
def test_of_errors_that_ctrl_c_causes_only_ours_are_told(error, status, said, monkeypatch, capsys):
    def interrupted(*_: object):
        try:
            raise KeyboardInterrupt
        finally:
            raise error

    monkeypatch.setattr("lightning_memprof.report.opened.opened", interrupted)
    assert main(["show", "x"]) == status
    assert capsys.readouterr() == ("", said)


@pytest.mark.slow
def test_a_reader_that_went_away_is_no_error_message(environment):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "lightning_memprof", "--help"],
            stdout=writer,
            stderr=subprocess.PIPE,
            env=environment | {"PYTHONUNBUFFERED": ""},
            check=False,
        )
    finally:
        os.close(writer)
    assert ended.stderr == b""
    assert ended.returncode == 141


@pytest.mark.slow
def test_the_command_line_loads_neither_torch_nor_lightning(run_python):
    program = UNIMPORTABLE + textwrap.dedent(
        """
        from lightning_memprof.cli.main import COMMANDS, main
        assert main(["--help"]) == 0
        heavy = {"torch", "lightning", "numpy", "lightning_memprof.report"} & set(sys.modules)
        sys.exit(f"loaded: {heavy}" if heavy else 0)
        """
    )
    ended = run_python("-c", program)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("form", ["terminal", "json"])
def test_show_works_where_torch_and_lightning_cannot_be_imported(form, run_python, tmp_path):
    make_run(tmp_path / "run")
    program = (
        UNIMPORTABLE
        + f"from lightning_memprof.cli.main import main\nsys.exit(main(['show', 'run', '--format', {form!r}]))"
    )
    ended = run_python("-c", program)
    assert ended.returncode == 0, ended.stderr
    if form == "json":
        assert json.loads(ended.stdout)["pulse"]["steps"] == 30
    else:
        assert ended.stdout.startswith("verdict ")


def test_a_name_in_an_error_cannot_steer_the_terminal(tmp_path, capsys):
    assert main(["show", str(tmp_path / "a\x1b[31m\nb\x07")]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.rstrip("\n").isprintable()
    assert "a\\x1b[31m\\nb\\x07" in err


@pytest.mark.slow
def test_ctrl_c_while_a_command_is_imported_is_exit_code_130_and_no_traceback(run_python, tmp_path):
    stub = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n"
    (tmp_path / "jsonargparse.py").write_text(stub)
    ended = run_python("-m", "lightning_memprof", "show", "x", PYTHONPATH=str(tmp_path))
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["show", "run"], ["show", "run", "--format", "json"], ["--help"]])
def test_standard_output_that_is_closed_is_one_line(arguments, environment, tmp_path):
    make_run(tmp_path / "run")
    command = shlex.join([sys.executable, "-m", "lightning_memprof", *arguments])
    ended = subprocess.run(
        ["/bin/sh", "-c", f"{command} >&-"],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("lightning-memprof: error: standard output is closed")
    assert ended.stderr.count("\n") == 1
