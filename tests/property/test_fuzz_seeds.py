"""What `make fuzz` begins with, and what it found once, in short: every seed, and some hundred inputs made of each."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz_mutations import mutated
from fuzz_targets import SEEDS, TARGETS, target

FUZZ = Path(__file__).parents[1] / "fuzz"
# A run directory is read in some 30 ms, a file in one.
MADE = {"trace": 150, "snapshot": 150, "manifest": 25}


def seeds(name: str) -> list[Path]:
    return sorted((SEEDS / name).iterdir())


@pytest.mark.parametrize("name", TARGETS)
def test_every_seed_is_read_or_refused_with_one_line(tmp_path: Path, name: str) -> None:
    read = target(name, tmp_path)
    said = {path.name: read(path.read_bytes()) for path in seeds(name)}
    # Those that do not begin with `crash` are whole.
    assert {path: words for path, words in said.items() if words and not path.startswith("crash")} == {}
    assert len(said) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_what_is_made_of_the_seeds_is_read_or_refused_with_one_line(tmp_path: Path, name: str) -> None:
    chance = random.Random(name)
    read, pool = target(name, tmp_path), [path.read_bytes() for path in seeds(name)]
    refused = 0
    for number in range(MADE[name]):
        content = mutated(name, chance.choice(pool), chance)
        try:
            refused += bool(read(content))
        except Exception as error:
            (tmp_path / "crash").write_bytes(content)
            raise AssertionError(f"input {number}, left at {tmp_path / 'crash'}") from error
        if number % 3 == 0:
            pool.append(content)
    assert 0 < refused < MADE[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["snapshot"])
def test_fuzzing_by_chance_reads_inputs_and_keeps_what_is_new(tmp_path: Path, name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(FUZZ / "fuzz.py"), "--only", name, "--seconds", "1", "--without-atheris",
         "--out", str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "by chance" in done.stdout
    assert "no crash" in done.stdout
    # What the seconds are: the start of the process is none of them.
    assert f"{name}: 1 s of fuzzing each, beside the start" in done.stdout
    assert re.search(r"inputs in [1-9]\d* s of fuzzing \(\d+ s with its start\)", done.stdout)
    assert list((tmp_path / "corpus" / name).iterdir())


def test_no_time_is_refused_in_one_line() -> None:
    command = [sys.executable, str(FUZZ / "fuzz.py"), "--seconds", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("--seconds 0: must be at least 1")
