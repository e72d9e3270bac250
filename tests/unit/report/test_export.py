from __future__ import annotations

import csv
import io
import json
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest

from kineto import Made, event_fields, write_trace
from lightning_memprof.account.memory.model import Site
from lightning_memprof.account.snapshot.replay import Holder
from lightning_memprof.account.trace.lanes import read_lanes
from lightning_memprof.errors import ArtifactError, ReportError
from lightning_memprof.report.export.memory_viz import viewable, write_snapshot
from lightning_memprof.report.export.stacks import Speedscope, holder_stacks, site_stacks, write_folded
from lightning_memprof.report.export.tables import Table
from lightning_memprof.report.export.write import whole_file, write_csv, write_parquet
from snapshots import MODEL, block, event, segment, snapshot
from speedscope import validate

# What the reader of pytorch.org/memory_viz knows (torch/utils/viz/MemoryViz.js); any other opcode is a blank page.
READABLE = {
    "PROTO", "FRAME", "MEMOIZE", "STOP", "MARK", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "SETITEM", "SETITEMS",
    "APPEND", "APPENDS", "BININT", "BININT1", "BININT2", "LONG1", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT",
    "SHORT_BINUNICODE", "BINUNICODE", "NEWTRUE", "NEWFALSE", "NONE", "BINFLOAT", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
    "LIST", "DICT",
}  # fmt: skip
HOSTILE = "a;b\nc </script><img onerror=alert(1)>"


def scope_of(directory: Path, *made: Made) -> Any:
    path = write_trace(directory / "a.pt.trace.json", [event_fields(span) for span in made])
    scope = Speedscope("a", "lightning-memprof 1")
    scope.add_lanes("", read_lanes(path))
    out = io.StringIO()
    scope.write(out)
    return json.loads(out.getvalue())


def folded(stacks: dict[tuple[str, ...], int]) -> str:
    out = io.StringIO()
    write_folded(stacks, out)
    return out.getvalue()


def test_lanes_are_evented_profiles_that_keep_the_format(tmp_path: Path) -> None:
    document = scope_of(
        tmp_path,
        Made("outer", 100, 200),
        Made("/home/a/model.py(12): forward", 110, 130, "python_function"),
        Made(HOSTILE, 120, 190),
        Made("kernel", 140, 240, "kernel", thread=3),
        Made("kernel", 200, 260, "kernel", thread=3),
    )
    validate(document)
    assert [profile["type"] for profile in document["profiles"]] == ["evented", "evented"]
    assert {"name": "forward", "file": "/home/a/model.py", "line": 12} in document["shared"]["frames"]
    assert document["profiles"][0]["endValue"] == 160_000


def test_memory_is_a_sampled_profile_in_bytes(tmp_path: Path) -> None:
    scope = Speedscope("a", "lightning-memprof 1")
    scope.add_stacks("cuda:0", holder_stacks([Holder(("b.py(2): g", "a.py(1): f"), "b.py(2): g", 96, 2)], "cuda:0"))
    out = io.StringIO()
    scope.write(out)
    document = json.loads(out.getvalue())
    validate(document)
    (profile,) = document["profiles"]
    assert (profile["unit"], profile["weights"], profile["endValue"]) == ("bytes", [96], 96)
    names = [document["shared"]["frames"][at]["name"] for at in profile["samples"][0]]
    assert names == ["cuda:0", "f", "g"]


@pytest.mark.parametrize(
    "broken",
    [
        lambda d: d.pop("$schema"),
        lambda d: d["profiles"][0].update(unit="bananas"),
        lambda d: d["profiles"][0]["events"].pop(),
        lambda d: d["profiles"][0]["events"][0].update(frame=99),
        lambda d: d["profiles"][0]["events"][-1].update(at=-1),
        lambda d: d["shared"]["frames"][0].update(line="12"),
    ],
)
def test_the_check_of_the_format_finds_what_is_wrong(tmp_path: Path, broken) -> None:
    document = scope_of(tmp_path, Made("outer", 100, 200))
    broken(document)
    with pytest.raises((AssertionError, KeyError)):
        validate(document)


def test_folded_stacks_are_lines_of_frames_and_a_number() -> None:
    text = folded({("thread 1", HOSTILE): 12, ("thread 1",): 3, ("thread 1", "nothing"): 0, ("", "x y"): 4})
    assert text.splitlines() == [
        "(unknown);x y 4",
        "thread 1 3",
        "thread 1;a:b c </script><img onerror=alert(1)> 12",
    ]
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        assert stack
        assert int(count) > 0


def test_a_site_without_python_s_frames_is_found_by_phase_and_module() -> None:
    plain = Site("aten::mm", "net.layers.0", None, (), 1, "forward", 10, 1)
    deep = Site("aten::mm", "net.0", "b.py(2): g", ("b.py(2): g", "a.py(1): f"), 2, "forward", 5, 1)
    assert site_stacks([plain, plain, deep], "cpu") == {
        ("cpu", "forward", "net", "layers", "0", "aten::mm"): 20,
        ("cpu", "a.py(1): f", "b.py(2): g", "net.0", "aten::mm"): 5,
    }


def test_a_table_has_every_column_of_every_row_and_nested_values_as_json() -> None:
    given: list[dict[str, Any]] = [{"a": 1, "path": Path("/b")}, {"a": None, "c": [1, {"d": 2}]}]
    table = Table.of("x", given)
    assert table.columns == ("a", "path", "c")
    assert list(table.rows) == [(1, "/b", None), (None, None, '[1, {"d": 2}]')]


def test_csv_keeps_every_value_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    table = Table.of("x", [{"a": 1, "text": 'quote " comma , line\nend'}, {"a": None, "text": "\udc80"}])
    assert write_csv([table], tmp_path / "out") == [(tmp_path / "out" / "x.csv", 2)]
    with (tmp_path / "out" / "x.csv").open(newline="") as read:
        assert list(csv.reader(read)) == [["a", "text"], ["1", 'quote " comma , line\nend'], ["", "\\udc80"]]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["x.csv"]


@pytest.mark.slow
def test_parquet_has_one_type_a_column_and_nulls(tmp_path: Path) -> None:
    from pyarrow import parquet

    rows: list[dict[str, Any]] = [
        {"whole": 1, "part": 1, "flag": True, "text": "x", "mixed": 1, "huge": 1 << 70, "none": None},
        {"whole": None, "part": 0.5, "flag": None, "text": "\udc80", "mixed": "y", "huge": 1, "none": None},
    ]
    ((path, count),) = write_parquet([Table.of("x", rows)], tmp_path)
    table = parquet.read_table(path)
    assert count == table.num_rows == 2
    assert [str(field.type) for field in table.schema][:6] == ["int64", "double", "bool", "string", "string", "string"]
    assert table["whole"].to_pylist() == [1, None]
    assert table["huge"].to_pylist() == [str(1 << 70), "1"]
    assert table["text"].to_pylist() == ["x", "\\udc80"]


def test_a_file_that_fails_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("old")

    def fail() -> None:
        with whole_file(path) as out:
            out.write("new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match="name another place"), whole_file(tmp_path / "file" / "x.csv"):
        pass


def test_a_snapshot_is_written_in_opcodes_that_the_page_reads() -> None:
    ring = [event("alloc", 0x7F0000000000, 1 << 33, MODEL), event("oom", 0, 5, device_free=1)]
    data = snapshot([segment(block(0x7F0000000000, 1 << 33, {**MODEL, "name": "f" * 300}))], ring)
    out = io.BytesIO()
    write_snapshot(viewable(data, "made"), out)
    written = out.getvalue()
    codes = [(code.name, argument) for code, argument, _ in pickletools.genops(written)]
    assert codes[0] == ("PROTO", 4)
    assert {name for name, _ in codes} <= READABLE
    read = pickle.loads(written)  # noqa: S301 written a line above
    assert read["device_traces"] == data["device_traces"]
    assert read["segments"][0]["blocks"] == data["segments"][0]["blocks"]


@pytest.mark.parametrize("form", ["list", "no ring", "2.0"])
def test_old_forms_get_what_the_page_looks_at(form: str) -> None:
    old: Any = {"size": 512, "state": "active_allocated", "history": [{"real_size": 500, "frames": [MODEL]}]}
    rest: Any = {"size": 1536, "state": "inactive"}
    raw = {
        "device": 1,
        "address": 4096,
        "total_size": 2048,
        "stream": 0,
        "segment_type": "small",
        "blocks": [old, rest],
    }
    data: Any = {"list": [raw], "no ring": {"segments": [raw]}, "2.0": {"segments": [raw], "device_traces": [[]]}}[form]
    found = viewable(data, "made")
    assert found["device_traces"] == [[], []]
    (made,) = found["segments"]
    first, second = made["blocks"]
    assert (first["address"], first["requested_size"], first["frames"]) == (4096, 500, [MODEL])
    assert (second["address"], second["requested_size"], second["frames"]) == (4608, 1536, [])
    assert "frames" not in raw


def test_what_is_no_snapshot_is_not_written() -> None:
    with pytest.raises(ArtifactError):
        viewable({"weights": []}, "made")
    with pytest.raises(ArtifactError, match="the first 1024"):
        viewable(snapshot([segment(block(4096, 512), device=10**9)], []), "made")
