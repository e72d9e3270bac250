from __future__ import annotations

import os

import pytest

from lightning_memprof.cli.main import main, split_program


@pytest.mark.parametrize(
    ("arguments", "options", "program"),
    [
        (["train.py"], [], ["train.py"]),
        (["train.py", "--config", "x", "--help", "--", "-m"], [], ["train.py", "--config", "x", "--help", "--", "-m"]),
        (["--config", "a.yaml", "train.py", "--config=b"], ["--config", "a.yaml"], ["train.py", "--config=b"]),
        (["--config=a.yaml", "train.py"], ["--config=a.yaml"], ["train.py"]),
        (["--debug", "--", "-odd.py", "x"], ["--debug"], ["-odd.py", "x"]),
        (["-m", "pkg.train", "-m", "--help"], [], ["-m", "pkg.train", "-m", "--help"]),
        (["-mpkg", "a"], [], ["-mpkg", "a"]),
        (["--help"], ["--help"], []),
        (["--config"], ["--config"], []),
        ([], [], []),
    ],
)
def test_everything_from_the_program_on_belongs_to_the_program(arguments, options, program):
    assert split_program(["run", *arguments]) == (["run", *options], program)


@pytest.mark.parametrize(
    ("arguments", "options", "program"),
    [
        (["train.py", "--device", "L4", "--devices", "2"], ["--device", "L4"], ["train.py", "--devices", "2"]),
        (["train.py", "--batch-size", "8"], [], ["train.py", "--batch-size", "8"]),
        (["train.py", "--batch-size", "max"], ["--batch-size", "max"], ["train.py"]),
        (
            ["fit", "--config", "a.yaml", "--devices", "8", "--strategy", "fsdp2", "--batch-size=4"],
            ["--devices", "8", "--strategy", "fsdp2", "--batch-size=4"],
            ["fit", "--config", "a.yaml"],
        ),
    ],
)
def test_options_of_estimate_may_follow_the_program_where_they_cannot_be_its_own(arguments, options, program):
    assert split_program(["estimate", *arguments]) == (["estimate", *options], program)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.py"], "nothing.py"),
        (["--config", "nothing.yaml", "train.py"], "nothing.yaml"),
        (["--config", ".", "train.py"], "directory"),
        (["--config", "broken.yaml", "train.py"], "not a YAML file"),
        (["--config", "misspelled.yaml", "train.py"], "no option 'schedul'; did you mean schedule?"),
        (["-m"], "-m needs the name of a module"),
    ],
)
def test_what_is_not_there_is_said_before_anything_runs(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("the program was started"))
    (tmp_path / "train.py").touch()
    (tmp_path / "misspelled.yaml").write_text("schedul: {wait: 1}")
    (tmp_path / "broken.yaml").write_text("schedule: {wait: 1\nother: ]")
    assert main(["run", *arguments]) == 1
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
    assert "LIGHTNING_MEMPROF" not in os.environ
