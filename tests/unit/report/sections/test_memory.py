from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fake_memory import FakeMemory
from fake_runs import FakeRun, make_run
from lightning_memprof.account.memory.allocations import run_allocations
from lightning_memprof.read.run.load import load_run
from lightning_memprof.report.document import Chart, Paragraph, Table
from lightning_memprof.report.printers.values import words_text
from lightning_memprof.report.sections import run_document
from lightning_memprof.report.sections.memory import peak_allocations
from lightning_memprof.report.view import View, run_view
from lightning_memprof.units import GIB, MIB
from pages import full, table_of, tables_of, words


def view(root: Path, fake: FakeRun | None = None, *, traces: bool = True) -> View:
    run = load_run(make_run(root, fake))
    return run_view(run, run_allocations(run) if traces else ())


def rewrite(shown_in: Path, change: Any) -> View:
    path = shown_in / "window000" / "rank00000.saved_tensors.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(change(row)) + "\n" for row in rows))
    return run_view(load_run(shown_in))


def lead(shown: View, section: str) -> str:
    found = run_document(shown).section(section)
    assert found is not None
    return words_text(found.lead)


def notes(shown: View, table_id: str) -> list[str]:
    return [
        words_text(note) for table in tables_of(run_document(shown)) if table.id == table_id for note in table.notes
    ]


def tables(shown: View) -> list[str]:
    found = [run_document(shown).section(name) for name in ("memory", "sites", "modules")]
    return [part.id for section in found if section for part in section.parts if isinstance(part, Table)]


def test_memory_has_its_tables_in_order(tmp_path: Path) -> None:
    assert tables(view(tmp_path)) == [
        "peaks", "peak-owners", "categories", "checkpointing", "functions", "sites", "modules-alike",
    ]  # fmt: skip


def test_without_the_traces_there_are_no_sites_and_no_live_bytes(tmp_path: Path) -> None:
    shown = view(tmp_path, traces=False)
    assert "sites" not in tables(shown)
    assert "Live bytes" not in full(shown)


def test_a_run_that_recorded_no_memory_has_no_tables_but_the_peak_of_its_process(tmp_path: Path) -> None:
    shown = view(tmp_path, FakeRun(memory=None, trace=False))
    assert tables(shown) == ["peaks", "peak-owners"]
    assert "not available" in lead(shown, "memory")


def test_a_trace_without_allocations_says_how_to_get_them(tmp_path: Path) -> None:
    assert "profile_memory=True" in lead(view(tmp_path, FakeRun(memory=None)), "sites")


def test_categories_sum_to_the_peak(tmp_path: Path) -> None:
    memory = FakeMemory(kept_bytes=1_199_570, unattributed_bytes=0, temporary_bytes=5 * MIB)
    shown = view(tmp_path, FakeRun(memory=memory))
    assert lead(shown, "memory") == "Tensors peak at 24.8 MiB on cpu in step 2."
    *rows, total = table_of(shown, "categories")
    assert sum(int(row["share"].lstrip("<").rstrip("%")) for row in rows) == pytest.approx(100, abs=3)
    assert (total["category"], total["bytes"], total["share"]) == ("sum", "24.8 MiB", "100%")
    assert notes(shown, "categories") == ["module_memory: peak of the step"]


def test_the_peak_of_the_process_has_an_owner_for_each_byte(tmp_path: Path) -> None:
    shown = view(tmp_path)
    assert shown.byte_ledger is not None
    *rows, total = table_of(shown, "peak-owners")
    assert rows[-1]["category"] == "unattributed"
    assert {row["category"] for row in rows} >= {"saved activations", "parameter", "gradient", "optimizer state"}
    assert (total["category"], total["share"]) == ("sum", "100%")


def test_a_page_that_cuts_the_list_of_owners_shows_the_unattributed_bytes(tmp_path: Path) -> None:
    table = full(view(tmp_path)).partition("Peak memory by owner\n")[2].partition("\n\n")[0]
    assert re.search(r"\d+ more\n +unattributed +4\d\d MiB +\d\d%\n +sum ", table), table


@pytest.mark.parametrize(
    ("name", "size"),
    [("NVIDIA H200", "32.0 MiB"), ("NVIDIA A100-SXM4-80GB", "8.12 MiB"), ("NVIDIA H20", None), (None, None)],
)
def test_unattributed_bytes_of_a_known_gpu_name_the_workspaces_of_cublas(
    name: str | None, size: str | None, tmp_path: Path
) -> None:
    directory = make_run(tmp_path, FakeRun(device_bytes=lambda _: GIB))
    manifest = directory / "manifest.rank00000.jsonl"
    first, *others = manifest.read_text().splitlines(keepends=True)
    facts = json.loads(first)
    facts["environment"]["device_name"] = name
    manifest.write_text("".join([f"{json.dumps(facts)}\n", *others]))
    found = [note for note in notes(run_view(load_run(directory)), "peak-owners") if "cuBLAS" in note]
    kept = f"unattributed: cuBLAS keeps {size} by default for each thread that multiplies matrices"
    assert found == ([kept] if size else [])


def test_a_category_that_is_not_known_says_why_and_is_no_zero(tmp_path: Path) -> None:
    (row,) = [row for row in table_of(view(tmp_path), "categories") if row["category"] == "temporary"]
    assert (row["bytes"], row["not available"]) == ("-", "only ModuleMemory and FSDPMemory measure it")


def test_the_allocators_bytes_beyond_the_categories_are_noted(tmp_path: Path) -> None:
    shown = view(tmp_path, FakeRun(device_bytes=lambda _: 300 * MIB))
    assert notes(shown, "categories")[-1] == "device peak 364 MiB, 345 MiB more than these categories"


def test_repeated_blocks_are_one_row_and_self_bytes_sum_to_the_total(tmp_path: Path) -> None:
    shown = view(tmp_path)
    assert lead(shown, "modules") == "Saved activations in step 2: 8.52 MiB."
    rows = {row["module"]: list(row.values())[1:] for row in table_of(shown, "modules-alike")}
    assert list(rows) == [
        "net", "net.blocks", "net.blocks.0-3", "net.blocks.0-3.mix", "net.blocks.0-3.norm", "net.head", "unattributed",
    ]  # fmt: skip
    assert rows["net.blocks.0-3.mix"] == ["4.00 MiB", "4.00 MiB", "1.00 MiB", "1.00 MiB", "3.20 ms", "4"]
    assert rows["unattributed"][0] == "16.0 KiB"


def test_compiled_modules_are_listed_with_the_modules(tmp_path: Path) -> None:
    compiled = [f"blocks.{number}" for number in range(6)]
    shown = view(tmp_path, FakeRun(memory=FakeMemory(), training={"compiled": compiled}))
    assert "blocks.0, blocks.1, blocks.2, blocks.3 and 2 more." in full(shown)


def test_where_nothing_is_attributed_the_reason_is_shown(tmp_path: Path) -> None:
    shown = view(tmp_path, FakeRun(memory=FakeMemory(attribution="it is compiled")))
    assert "8.52 MiB are unattributed: it is compiled." in full(shown)


def test_values_whose_size_is_not_known_are_counted(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun())
    shown = rewrite(directory, lambda row: {**row, "uncounted": 3} if "modules" in row else row)
    section = run_document(shown).section("modules")
    assert section is not None
    last = section.parts[-1]
    assert isinstance(last, Paragraph)
    assert words_text(last.words).startswith("3 more values have an unknown size")


def test_sites_sum_to_the_peak(tmp_path: Path) -> None:
    shown = view(tmp_path)
    assert lead(shown, "sites") == "Live bytes on cpu peak at 10.6 MiB in step 3, window 0."
    first, *_, last = table_of(shown, "sites")
    assert (first["operator"], first["bytes"], first["blocks"]) == ("addmm", "10.6 MiB", "5")
    assert (last["operator"], last["bytes"]) == ("unattributed", "0 B")


def test_sites_of_repeated_blocks_and_of_several_steps_are_one_row(tmp_path: Path) -> None:
    shown = view(tmp_path)
    found = peak_allocations(shown.memory.lead)
    assert found is not None
    _, device = found
    site = device.sites[0]
    line = "/home/me/code/a_file.py(12): forward"
    blocks = [
        replace(site, module=f"net.blocks.{index}", line=line, step=step, bytes=MIB, blocks=1)
        for index in range(4)
        for step in (2, 3)
    ]
    others = [replace(site, operator=f"aten::op{index}", bytes=1, blocks=1, phase="forward") for index in range(12)]
    changed = replace(device, sites=(*blocks, *others), unattributed_bytes=7, freed_outside_bytes=9)
    rank = replace(shown.memory.lead, allocations=(replace(shown.memory.lead.allocations[0], devices=(changed,)),))
    shown = replace(shown, memory=replace(shown.memory, lead=rank))
    rows = [list(row.values()) for row in table_of(shown, "sites")]
    assert rows[0] == ["addmm", "8.00 MiB", "8", "net.blocks.0-3", "a_file.py(12)"]
    assert rows[1][:4] == ["op0", "1 B", "1", "(forward)"]
    assert [row[:2] for row in rows[-2:]] == [["freed, allocated before the window", "-9 B"], ["unattributed", "7 B"]]


def test_live_bytes_and_saved_activations_are_curves(tmp_path: Path) -> None:
    section = run_document(view(tmp_path)).section("memory")
    assert section is not None
    live, saved = [part for part in section.parts if isinstance(part, Chart) and part.values]
    assert live.title == "Live bytes, window 0 on cpu"
    assert words_text(live.words) == (
        "2.13 MiB at the start, max 10.6 MiB, 4.26 MiB at the end; step 3: step start 2.13 MiB, step end 4.26 MiB"
    )
    assert max(live.values) == pytest.approx(10.6 * MIB, rel=0.01)
    assert words_text(saved.words) == "steps 2–3, count 2: min 8.52 MiB, max 8.52 MiB"


def test_functions_have_their_mean_changes(tmp_path: Path) -> None:
    (row,) = table_of(view(tmp_path), "functions")
    assert row == {
        "function": "training_step",
        "count": "2",
        "RSS": "+3.00 MiB",
        "in forwards": "+3.00 MiB",
        "saved activations": "+8.52 MiB",
    }


def test_the_estimate_for_checkpointing_is_there_for_all_blocks_and_for_each(tmp_path: Path) -> None:
    both, each = (list(row.values()) for row in table_of(view(tmp_path), "checkpointing")[:2])
    assert both == ["net.blocks.0-3, all 4", "7.00 MiB", "1.75 MiB", "1.00 MiB", "4.40 ms"]
    assert each == ["  each", "1.75 MiB", "-", "256 KiB", "1.10 ms"]


def test_times_that_recording_stretched_say_so(tmp_path: Path) -> None:
    def phases(_: int, step: int) -> dict[str, int]:
        times = {"data_wait": 1, "backward": 1, "optimizer": 1, "callbacks": 1, "other": 1}
        return {**times, "forward": 30_000_000 if step in (2, 3) else 10_000_000}

    shown = view(tmp_path, FakeRun(phases=phases))
    assert notes(shown, "checkpointing")[-1] == "forward takes 30.0 ms in recorded steps, 10.0 ms in the others"


def test_numbers_that_no_memory_has_are_left_out_and_the_rest_adds_up(tmp_path: Path) -> None:
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
    assert shown.memory.lead.activations is not None
    assert "net" not in [module.name for module in shown.memory.lead.activations.modules]
    assert full(shown)


def test_named_regions_and_snapshots_have_a_row_each(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun())
    sizes = [("load", "start", 400), ("load", "end", 500), ("[red]x", "snapshot", 500), ("load", "start", 500),
             ("load", "end", 480), ("odd", "start", 480)]  # fmt: skip
    rows = [
        {"name": name, "point": point, "step": None, "global_step": None, "time_ns": 1, "rss_bytes": size * MIB}
        for name, point, size in sizes
    ]
    (directory / "snapshots.rank00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = run_view(load_run(directory))
    assert [list(row.values()) for row in table_of(shown, "named-sums")] == [
        ["load", "0", "2", "-", "+40.0 MiB", "+100 MiB", "-"],
        ["[red]x", "0", "1", "500 MiB", "-", "-", "-"],
        ["odd", "0", "1", "-", "-", "-", "1"],
    ]
    assert "[red]x" in words(full(shown))
