from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from lightning_memprof.artifacts.pulse import decode_pulse, encode_pulse
from lightning_memprof.artifacts.series import PHASES, PULSE_COLUMNS, PulseRow
from lightning_memprof.errors import ArtifactError
from recorded_rows import read_pulse, read_series

HEADER = ",".join(PULSE_COLUMNS) + "\n"
ROW = tuple(range(len(PULSE_COLUMNS)))
# Columns that later versions added.
LATER = ("core_wait_ns", "other_profiler")

rows = st.lists(st.tuples(*[st.none() | st.integers(1 - 10**18, 10**19 - 1)] * len(PULSE_COLUMNS)), max_size=5)


@pytest.fixture(scope="module")
def pulse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pulse") / "pulse.csv"


@pytest.mark.slow
@given(rows)
def test_every_row_of_integers_and_gaps_is_read_back(pulse: Path, written: list[tuple[int | None, ...]]) -> None:
    pulse.write_text(HEADER + encode_pulse(written))
    assert [astuple(row) for row in read_pulse(pulse)] == written


@pytest.mark.slow
@given(rows, st.integers(min_value=0))
def test_a_pulse_cut_anywhere_gives_the_rows_that_are_whole(
    pulse: Path, written: list[tuple[int | None, ...]], cut: int
) -> None:
    whole = HEADER + encode_pulse(written)
    text = whole[: cut % (len(whole) + 1)]
    pulse.write_text(text)
    assert [astuple(row) for row in read_pulse(pulse)] == written[: max(text.count("\n") - 1, 0)]


def test_rows_are_named_by_the_columns(pulse: Path) -> None:
    pulse.write_text(HEADER + encode_pulse([ROW]))
    (row,) = read_pulse(pulse)
    assert row == PulseRow(*ROW)
    assert astuple(row) == ROW
    assert row["other_profiler"] == row.other_profiler == ROW[-1]


def test_both_clocks_have_every_phase_in_order(pulse: Path) -> None:
    host, device = ([f"{clock}{phase}_ns" for phase in PHASES] for clock in ("", "device_"))
    memory = ["rss_bytes", "device_peak_bytes", "device_duration_ns"]
    assert list(PULSE_COLUMNS[PULSE_COLUMNS.index(host[0]) :]) == [*host, *memory, *device, *LATER]


@pytest.mark.parametrize("missing", [1, 2])
@pytest.mark.parametrize("damage", ["", "x" + "," * 20 + "\n"])
def test_a_pulse_of_before_the_last_columns_is_readable(pulse: Path, damage: str, missing: int) -> None:
    columns, *lines = (HEADER + encode_pulse([ROW, ROW])).splitlines()
    assert columns.endswith(",".join(["", *LATER]))
    older = [",".join(line.split(",")[:-missing]) + "\n" for line in (columns, *lines)]
    pulse.write_text("".join(older) + damage)
    read, problem = decode_pulse(pulse.read_bytes())
    assert [astuple(row) for row in read] == [(*ROW[:-missing], *[None] * missing)] * 2
    assert (problem is not None) == bool(damage)


def test_a_pulse_of_other_columns_is_refused(pulse: Path) -> None:
    pulse.write_text("step,loss\n1,2\n")
    with pytest.raises(ArtifactError, match="columns are not those of this version"):
        read_pulse(pulse)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "1,2",
        ",".join("x" * len(ROW)),
        ",".join(map(str, (*ROW, 1))),
        "1.5" + "," * 18,
        "9" * 400 + "," * (len(ROW) - 1),
    ],
)
def test_damage_before_the_last_line_names_the_line(pulse: Path, line: str) -> None:
    pulse.write_text(HEADER + encode_pulse([ROW]) + line + "\n" + encode_pulse([ROW]))
    with pytest.raises(ArtifactError, match=r"pulse\.csv:3: damaged"):
        read_pulse(pulse)


def test_bytes_that_are_no_text_are_damage_and_no_crash(pulse: Path) -> None:
    pulse.write_bytes(HEADER.encode() + b"\xff\x00\n")
    with pytest.raises(ArtifactError, match="damaged"):
        read_pulse(pulse)


def test_a_missing_pulse_is_an_artifact_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be read"):
        read_pulse(tmp_path / "nothing.csv")


def test_a_series_leaves_out_a_torn_last_line(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_series(tmp_path / "s.jsonl") == [{"step": 1}, {"step": 2}]
