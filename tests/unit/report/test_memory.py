from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from fake_memory import FakeMemory
from fake_runs import FakeRun, make_run
from lightning_memprof.analysis.memory.allocations import run_allocations
from lightning_memprof.analysis.run.load import load_run
from lightning_memprof.report.memory import memory_sections, peak_allocations
from lightning_memprof.report.memory_tables import bar, cut, notes, over_time, sparkline, table, tops
from lightning_memprof.report.view import View, run_view
from lightning_memprof.units import MIB

LABELS = ["memory", "modules", "sites", "live", "functions", "what if"]


def view(root: Path, fake: FakeRun | None = None, *, traces: bool = True) -> View:
    run = load_run(make_run(root, fake))
    return run_view(run, run_allocations(run) if traces else ())


def sections(shown: View, width: int = 80, *, ascii_only: bool = False) -> list[list[str]]:
    """Give the lines of each section as plain text."""
    found = memory_sections(shown, width, ascii_only=ascii_only)
    return [["".join(text for text, _ in line) for line in lines] for lines in found]


def section(shown: View, label: str, width: int = 80) -> list[str]:
    return next(lines for lines in sections(shown, width) if lines[0].startswith(f"{label} "))


def rewrite(shown_in: Path, change: Any) -> View:
    path = shown_in / "window000" / "rank00000.saved_tensors.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(change(row)) + "\n" for row in rows))
    return run_view(load_run(shown_in))


def test_the_page_has_every_section_in_order(tmp_path: Path) -> None:
    assert [lines[0][:10].strip() for lines in sections(view(tmp_path))] == LABELS


def test_without_the_traces_there_are_no_sites_and_no_live_bytes(tmp_path: Path) -> None:
    shown = view(tmp_path, traces=False)
    assert [lines[0][:10].strip() for lines in sections(shown)] == ["memory", "modules", "kept", "functions", "what if"]


def test_a_run_that_recorded_none_of_it_has_no_section(tmp_path: Path) -> None:
    assert sections(view(tmp_path, FakeRun(memory=None, trace=False))) == []


def test_a_trace_without_allocations_says_how_to_get_them(tmp_path: Path) -> None:
    lines = section(view(tmp_path, FakeRun(memory=None)), "sites")
    assert "profile_memory=True" in " ".join(lines)


def test_categories_are_drawn_to_scale_and_sum_to_the_peak(tmp_path: Path) -> None:
    memory = FakeMemory(kept_bytes=1_199_570, unattributed_bytes=0, temporary_bytes=5 * MIB)
    lines = section(view(tmp_path, FakeRun(memory=memory)), "memory")
    assert lines[0] == "memory    24.8 MiB on cpu in step 2, by category"
    bars = {line[2:17].strip(): line.count("█") for line in lines[1:]}
    assert bars["optimizer state"] == pytest.approx(2 * bars["parameter"], abs=1)
    assert bars["temporary"] == bars["optimizer state"]
    assert bars["activation"] == max(bars.values()) > 40
    shares = [int(line[28:].split()[0].strip("<%")) for line in lines[1:-2]]
    assert sum(shares) == pytest.approx(100, abs=3)
    assert lines[-2].split() == ["sum", "24.8", "MiB", "100%"]
    assert lines[-1] == "  module_memory: the peak of the step"


def test_a_category_that_is_not_known_says_why_and_is_no_zero(tmp_path: Path) -> None:
    lines = section(view(tmp_path), "memory")
    (line,) = [line for line in lines if line.startswith("  temporary")]
    assert line.split(maxsplit=2)[1:] == ["-", "only ModuleMemory and FSDPMemory see it"]


def test_a_long_reason_is_told_in_full_below(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun())
    path = directory / "window000" / "rank00000.saved_tensors.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    note = "no backward of this step went through Lightning: what autograd kept is not seen"
    ends = [{**row, "note": note} for row in rows if row["point"] == "step_end"]
    path.write_text("".join(json.dumps(row) + "\n" for row in ends))
    lines = section(run_view(load_run(directory)), "memory")
    (line,) = [line for line in lines if line.startswith("  activation ")]
    assert line.split() == ["activation", "-", "see", "below"]
    assert f"activation: {note}" in " ".join(" ".join(lines).split())


def test_what_the_allocator_had_beyond_the_categories_is_said(tmp_path: Path) -> None:
    lines = section(view(tmp_path, FakeRun(device_bytes=lambda _: 300 * MIB)), "memory")
    assert lines[-1] == "  device peak 364 MiB, 345 MiB more than these"


def test_repeated_blocks_are_one_row_and_own_bytes_sum_to_all(tmp_path: Path) -> None:
    lines = section(view(tmp_path), "modules")
    assert lines[0] == "modules   8.52 MiB kept for backward in step 2, by module"
    names = [line.split()[0] for line in lines[2:]]
    assert names == ["net", "net.blocks", "net.blocks.0-3", "net.blocks.0-3.mix", "net.blocks.0-3.norm", "net.head",
                     "unattributed"]  # fmt: skip
    (mix,) = [line for line in lines if "mix" in line]
    assert mix.split() == ["net.blocks.0-3.mix", "4.00", "MiB", "4.00", "MiB", "1.00", "MiB", "1.00", "MiB", "4"]
    assert lines[-1].split() == ["unattributed", "16.0", "KiB"]


def test_of_many_modules_ten_are_shown_and_the_rest_is_summed(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun())

    def many(row: dict[str, Any]) -> dict[str, Any]:
        if "modules" not in row:
            return row
        modules = {f"layer{'x' * index}": [MIB, MIB, 1, 5, 5] for index in range(14)}
        return {**row, "activation_bytes": 14 * MIB, "unattributed_bytes": 0, "modules": modules}

    lines = section(rewrite(directory, many), "modules")
    assert len(lines) == 2 + 10 + 2
    assert lines[-2].split() == ["4", "more", "4.00", "MiB"]


def test_where_nothing_is_attributed_the_reason_is_shown(tmp_path: Path) -> None:
    lines = section(view(tmp_path, FakeRun(memory=FakeMemory(attribution="it is compiled"))), "modules")
    assert lines[1:] == ["  8.52 MiB unattributed: it is compiled"]


def test_values_whose_size_is_not_known_are_said(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun())
    shown = rewrite(directory, lambda row: {**row, "uncounted": 3} if "modules" in row else row)
    assert " ".join(" ".join(section(shown, "modules")).split()).endswith(
        "3 more are kept in a form whose size is not known: by a scripted module, or by hooks of the program's"
    )


def test_sites_sum_to_the_peak(tmp_path: Path) -> None:
    lines = section(view(tmp_path), "sites")
    assert lines[0] == "sites     10.6 MiB on cpu above the start of window 0 at its peak, step 3"
    assert lines[2].split() == ["addmm", "10.6", "MiB", "5", "-"]
    assert lines[-1].split() == ["unattributed", "0", "B"]


def test_sites_of_repeated_blocks_and_of_several_steps_are_one_row(tmp_path: Path) -> None:
    shown = view(tmp_path)
    found = peak_allocations(shown.memory.lead)
    assert found is not None
    _, device = found
    site = device.sites[0]
    line = "/home/me/code/a_long_name_of_a_file.py(12): forward"
    blocks = [
        replace(site, module=f"net.blocks.{index}", line=line, step=step, bytes=MIB, blocks=1)
        for index in range(4)
        for step in (2, 3)
    ]
    others = [replace(site, operator=f"aten::op{index}", bytes=1, blocks=1, phase="forward") for index in range(12)]
    changed = replace(device, sites=(*blocks, *others), unattributed_bytes=7, freed_outside_bytes=9)
    lead = replace(shown.memory.lead, allocations=(replace(shown.memory.lead.allocations[0], devices=(changed,)),))
    lines = section(replace(shown, memory=replace(shown.memory, lead=lead)), "sites")
    assert lines[2].split() == ["addmm", "8.00", "MiB", "8", "…me_of_a_file.py(12)", "net.blocks.0-3"]
    assert lines[3].split() == ["op0", "1", "B", "1", "(forward)"]
    assert [line.split() for line in lines[-3:]] == [
        ["3", "more", "3", "B", "3"],
        ["freed", "of", "before", "-9", "B"],
        ["unattributed", "7", "B"],
    ]


def test_live_bytes_and_those_at_the_marks_of_the_peaks_step_are_there(tmp_path: Path) -> None:
    lines = section(view(tmp_path), "live")
    assert len(lines[0]) == 80
    assert lines[0].count("█") > 1
    assert lines[1].strip() == "window 0 on cpu: 2.13 MiB, at most 10.6 MiB, then 4.26 MiB"
    assert lines[2].strip() == "step 3: step start 2.13 MiB, step end 4.26 MiB"
    assert lines[3].startswith("kept ")
    assert lines[4].strip() == "for backward, in 2 recorded steps from 2 to 3: 8.52 MiB in each"


def test_functions_have_their_mean_changes(tmp_path: Path) -> None:
    lines = section(view(tmp_path), "functions")
    assert lines[1].split() == ["function", "calls", "rss", "in", "forwards", "saved"]
    assert lines[2].split() == ["training_step", "2", "+3.00", "MiB", "+3.00", "MiB", "+8.52", "MiB"]


def test_what_checkpointing_would_trade_is_there_in_all_and_for_each(tmp_path: Path) -> None:
    lines = section(view(tmp_path), "what if")
    assert " ".join(lines[2].split()) == "net.blocks.0-3, all 4 7.00 MiB 1.75 MiB 1.00 MiB 4.40 ms"
    assert " ".join(lines[3].split()) == "each 1.75 MiB 256 KiB 1.10 ms"
    assert lines[4] == "  back: while a block is recomputed, its bytes are there again"


def test_times_that_recording_stretched_say_so(tmp_path: Path) -> None:
    def phases(_: int, step: int) -> dict[str, int]:
        times = {"data_wait": 1, "backward": 1, "optimizer": 1, "callbacks": 1, "other": 1}
        return {**times, "forward": 30_000_000 if step in (2, 3) else 10_000_000}

    words = " ".join(" ".join(section(view(tmp_path, FakeRun(phases=phases)), "what if")).split())
    assert words.endswith("a forward takes 30.0 ms in recorded steps and 10.0 ms in others")


@pytest.mark.parametrize("width", [40, 50, 60, 80])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_no_line_is_wider_than_the_page(tmp_path: Path, width: int, ascii_only: bool) -> None:
    directory = make_run(tmp_path, FakeRun(memory=FakeMemory(temporary_bytes=1)))

    def long(row: dict[str, Any]) -> dict[str, Any]:
        names = {name: f"{'deep.' * 20}{name}" for name in row.get("modules", {})}
        return {**row, **({"modules": {names[name]: row["modules"][name] for name in names}} if names else {})}

    for lines in sections(rewrite(directory, long), width, ascii_only=ascii_only):
        assert max(map(cell_len, lines)) <= width
        if ascii_only:
            assert not set("".join(lines)) & set("▏▎▍▌▋▊▉█▁▂▃▄▅▆▇")


def test_a_narrow_table_keeps_its_names_and_leaves_out_its_last_columns() -> None:
    lines = table(["module", "own", "inclusive", "calls"], [["net.head", "1.00 MiB", "1.00 MiB", "1"]], 30)
    assert [line[0][0].split() for line in lines] == [["module", "own"], ["net.head", "1.00", "MiB"]]


def test_names_cannot_steer_the_terminal(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun())
    hostile = "\x1b[31m\n\u202e"
    shown = rewrite(directory, lambda row: {**row, "modules": {hostile: [1, 1, 1, 1, 1]}} if "modules" in row else row)
    text = "".join("".join(lines) for lines in sections(shown))
    assert not set(text) & set("\x1b\n\u202e")
    assert "\\x1b[31m" in text


def test_numbers_that_no_memory_has_are_left_out_and_what_is_left_adds_up(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun())

    def change(row: dict[str, Any]) -> dict[str, Any]:
        if "modules" in row:
            return {**row, "modules": {**row["modules"], "net": [0, 10**400, True, 0, 0]}}
        return {**row, "held": {**row["held"], "buffer_bytes": 10**400, "input_bytes": float("nan")}}

    shown = rewrite(directory, change)
    peak = shown.memory.lead.peak
    assert peak is not None
    assert "buffer" not in peak.categories
    assert peak.categories["input"] is None
    assert sum(size or 0 for size in peak.categories.values()) == peak.total_bytes
    assert "net" not in [module.name for module in shown.memory.lead.activations.modules]
    assert sections(shown)


def test_a_bar_is_never_longer_than_its_place_nor_empty_for_something() -> None:
    assert bar(1, 4, ascii_only=False) == "████"
    assert bar(2, 4, ascii_only=True) == "####"
    assert bar(0.5, 4, ascii_only=False) == "██"
    assert bar(0, 4, ascii_only=False) == bar(-1, 4, ascii_only=True) == ""
    assert (bar(1e-9, 4, ascii_only=False), bar(1e-9, 4, ascii_only=True)) == ("▏", "#")


def test_a_curve_goes_from_zero_to_its_largest_value() -> None:
    assert sparkline([0, 50, 100], ascii_only=False) == "▁▄█"
    assert sparkline([0, 50, 100, -5], ascii_only=True) == "_-#_"
    assert sparkline([0, 0], ascii_only=False) == "▁▁"
    assert sparkline([], ascii_only=False) == ""


def test_values_that_share_a_place_keep_the_largest() -> None:
    assert tops([1, 9, 2, 3], 2) == [9, 3]
    assert tops([1, 2], 5) == [1, 2]
    assert tops([], 5) == []


def test_a_curve_over_time_stays_where_it_was_and_keeps_its_peaks() -> None:
    assert over_time([(0, 1), (10, 9), (11, 2), (50, 3), (100, 0)], 10) == [1, 9, 2, 2, 2, 3, 3, 3, 3, 3]
    assert over_time([(5, 1), (5, 4)], 3) == [4, 4, 4]


def test_texts_that_are_too_long_lose_their_front() -> None:
    assert cut("model.layers.0", 8) == "…ayers.0"
    assert cut("short", 8) == "short"
    assert (cut("long", 1), cut("long", 0)) == ("…", "")
    lines = table(["a", "b"], [["x" * 99, "1"]], 20)
    assert ["".join(text for text, _ in line) for line in lines] == [f"  a{'':<16}b", f"  …{'x' * 14}  1"]


def test_a_number_keeps_its_unit() -> None:
    assert ["".join(text for text, _ in line) for line in notes("about as much as 14.8 MiB more", 22)] == [
        "  about as much as",
        "  14.8 MiB more",
    ]
