from __future__ import annotations

from pathlib import Path

import pytest

from lightning_memprof import ConfigError
from lightning_memprof.cli.main import main
from lightning_memprof.integration.attached import load_options

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 9)
)
FILES = {
    "aliases of aliases": (LAUGHS, "more than 10,000 values"),
    "a value that contains itself": ("schedule: &a {wait: *a}", "one that contains itself"),
    "deep": ("{a: " * 3_000, "recursion"),
    "a date of a 13th month": ("a: 2001-13-01", "month must be in 1..12"),
    "an object": ("!!python/object/apply:os.mkdir [made]", "could not determine a constructor"),
    "a number without end": ("a: " + "9" * 5_000, "digits"),
    "zeros": ("\0", "unacceptable character"),
    "two mebibytes": ("#" * (2 << 20), "it is larger than 1.00 MiB"),
}

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_options_that_is_hostile_is_one_line_and_makes_nothing(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    content, words = FILES[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(content)
    (tmp_path / "train.py").touch()
    with pytest.raises(ConfigError) as refusal:
        load_options(Path("a.yaml"))
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert main(["run", "--config", "a.yaml", "train.py"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.yaml", "train.py"]
