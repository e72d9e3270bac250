from __future__ import annotations

import codecs
import gzip
import json
from pathlib import Path

import pytest

from kineto import write_trace
from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.trace import text as trace_text
from lightning_memprof.read.trace.events import full_events
from recorded_rows import Trace, read_events

OPERATOR = {
    "ph": "X",
    "cat": "cpu_op",
    "name": "aten::add",
    "pid": 4,
    "tid": 5,
    "ts": 4358914478488.649,
    "dur": 7.001,
    "args": {"External id": 12, "correlation": 3, "Input Dims": [[2, 3], []], "Ev Idx": 0},
}
MEMORY = {
    "ph": "i",
    "s": "t",
    "cat": "cpu_instant_event",
    "name": "[memory]",
    "pid": 4,
    "tid": 5,
    "ts": 4358914478490.0,
    "args": {"Bytes": -512, "Device Type": 1, "Total Allocated": 7},
}


def names(path: Path, chunk: int = 1 << 20) -> list[str]:
    return [event.name for event in Trace(path).events(chunk)]


def test_an_event_has_its_fields_and_exact_nanoseconds(tmp_path):
    trace = Trace(write_trace(tmp_path / "t.json", [OPERATOR, MEMORY], baseTimeNanoseconds=1_790_857_026_000_000_000))
    operator, memory = trace.events()
    assert (operator.ph, operator.cat, operator.name, operator.pid, operator.tid) == ("X", "cpu_op", "aten::add", 4, 5)
    assert (operator.start_ns, operator.duration_ns) == (4_358_914_478_488_649, 7_001)
    assert (operator.args.link, operator.args.correlation) == (12, 3)
    assert json.loads(bytes(operator.args.input_dims)) == [[2, 3], []]
    assert (memory.args.size, memory.args.device_type, memory.dur) == (-512, 1, 0)
    assert trace.time_origin_ns == 1_790_857_026_000_000_000


def test_metadata_before_and_behind_the_events_is_found(tmp_path):
    trace = Trace(write_trace(tmp_path / "t.json.gz", [OPERATOR], schemaVersion=1, distributedInfo={"rank": 3}))
    assert trace.metadata == {}
    assert len(list(trace.events())) == 1
    assert trace.metadata == {"schemaVersion": 1, "distributedInfo": {"rank": 3}, "traceName": "t.json.gz"}
    assert len(list(trace.events())) == 1


def test_a_plain_list_of_events_is_a_trace(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps([OPERATOR, OPERATOR]))
    assert names(path) == ["aten::add"] * 2


@pytest.mark.parametrize(
    "text", ['{"traceEvents": []}', '{"a": {"traceEvents": [1]}, "traceEvents" : [ ], "b": "]"}', "[]"]
)
def test_no_events_are_no_error(tmp_path, text):
    path = tmp_path / "t.json"
    path.write_text(text)
    assert names(path) == []


def test_compression_is_seen_from_the_content(tmp_path):
    path = write_trace(tmp_path / "t.json.gz", [OPERATOR])
    assert names(path.rename(tmp_path / "t.json")) == ["aten::add"]


@pytest.mark.parametrize("chunk", [16, 100, 1 << 20])
def test_arrays_of_objects_inside_an_event_do_not_cut_it(tmp_path, chunk):
    inner = {**OPERATOR, "args": {"list": [{"ph": 1}, {"ph": 2}, {"ph": 3}]}}
    path = write_trace(tmp_path / "t.json", [inner, OPERATOR, inner, inner])
    assert names(path, chunk) == ["aten::add"] * 4


@pytest.mark.parametrize("chunk", [16, 100, 1 << 20])
def test_metadata_behind_the_events_may_look_like_events(tmp_path, chunk):
    path = tmp_path / "t.json"
    tail = [{"ph": 1}, {"ph": 2}, {"ph": 3}]
    path.write_text(json.dumps({"traceEvents": [OPERATOR, OPERATOR], "notes": tail}))
    trace = Trace(path)
    assert len(list(trace.events(chunk))) == 2
    assert trace.metadata == {"notes": tail}


def test_values_of_other_types_are_read_where_they_make_sense(tmp_path):
    odd = {**OPERATOR, "ts": "12.5", "tid": "stream 7", "args": {"External id": "9", "Bytes": None, "Device Type": "x"}}
    bare = {"ph": "M", "name": "process_name", "pid": "Spans", "args": None}
    first, second = read_events(write_trace(tmp_path / "t.json", [odd, bare]))
    assert (first.ts, first.tid, first.args.link, first.args.size, first.args.device_type) == (
        12.5,
        "stream 7",
        9,
        0,
        "x",
    )
    assert (second.name, second.pid, second.ts) == ("process_name", "Spans", 0)


def test_numbers_that_json_lacks_and_bytes_that_are_no_text_are_mended(tmp_path):
    path = tmp_path / "t.json"
    first = b'{"ph": "X", "name": "nan, inf", "ts": 1, "args": {"memory bandwidth (GB/s)": inf, "x": -nan}}'
    path.write_bytes(b'{"traceEvents": [\n' + first + b',\n{"ph": "X", "name": "caf\xe9", "ts": 2}\n]}')
    assert names(path) == ["nan, inf", "caf\N{REPLACEMENT CHARACTER}"]


def test_memory_does_not_grow_with_the_file(tmp_path):
    path = tmp_path / "t.json"
    event = json.dumps(OPERATOR)
    path.write_text('{"traceEvents": [' + ",\n".join([event] * 40_000) + "]}")
    sizes = [len(batch) for batch in trace_text.TraceText(path).pieces(full_events)]
    assert sum(sizes) == 40_000
    assert max(sizes) * len(event) < 3 << 20


def damaged(tmp_path: Path) -> dict[str, Path]:
    whole = write_trace(tmp_path / "whole.json.gz", [OPERATOR] * 2000)
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(whole.read_bytes()[:-40])
    flipped = bytearray(whole.read_bytes())
    flipped[len(flipped) // 2] ^= 0xFF
    texts = {
        "empty": "",
        "html": "<html>",
        "other": '{"a": 1}',
        "number": '{"traceEvents": 3}',
        "cut-head": '{"schemaVersion": 1, "dev',
        "cut-events": '{"traceEvents": [{"ph": "X"}, {"ph"',
        "cut-tail": '{"traceEvents": [], "traceName": "',
        "no-json": '{"traceEvents": [{"ph": X}, {"ph": "X"}]}',
        "no-object": '{"traceEvents": [{"ph": "X"}, 3]}',
        "tail": '{"traceEvents": [{"ph": "X"}], "a": b}',
        "behind-list": "[] 3",
    }
    paths = {name: tmp_path / f"{name}.json" for name in texts}
    for name, text in texts.items():
        paths[name].write_text(text)
    plain = tmp_path / "plain.json.gz"
    plain.write_text('{"traceEvents": []}')
    bits = tmp_path / "bits.json.gz"
    bits.write_bytes(bytes(flipped))
    return {**paths, "cut": cut, "plain": plain, "bits": bits, "missing": tmp_path / "missing.json", "dir": tmp_path}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("empty", "is empty"),
        ("html", "is not a trace"),
        ("other", "has no `traceEvents`"),
        ("number", "has no `traceEvents`"),
        ("cut-head", "truncated"),
        ("cut-events", "truncated"),
        ("cut-tail", "truncated"),
        ("no-json", "not valid JSON"),
        ("no-object", "not valid JSON"),
        ("tail", "metadata is not valid JSON"),
        ("behind-list", "text after its events"),
        ("cut", "truncated"),
        ("plain", "is not gzip data"),
        ("bits", "bits"),
        ("missing", "no such file"),
        ("dir", "no such file"),
    ],
)
def test_what_is_no_whole_trace_is_refused_by_name(tmp_path, kind, words):
    path = damaged(tmp_path)[kind]
    with pytest.raises(ArtifactError, match=words) as refused:
        names(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_reading_loads_neither_torch_nor_pandas(run_python):
    loaded = "print(*{'torch', 'pandas', 'lightning'} & {*sys.modules})"
    code = f"import sys, lightning_memprof.account.trace.operators; {loaded}"
    assert run_python("-c", code).stdout == "\n"


def test_gzip_members_that_follow_each_other_are_one_trace(tmp_path):
    text = json.dumps({"traceEvents": [OPERATOR] * 3}).encode()
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(text[:50]) + gzip.compress(text[50:]))
    assert names(path) == ["aten::add"] * 3


@pytest.mark.parametrize("packed", [False, True])
def test_a_byte_order_mark_before_the_trace_is_no_part_of_it(tmp_path, packed):
    text = codecs.BOM_UTF8 + write_trace(tmp_path / "t.json", [OPERATOR]).read_bytes()
    path = tmp_path / ("marked.json.gz" if packed else "marked.json")
    path.write_bytes(gzip.compress(text) if packed else text)
    assert names(path) == ["aten::add"]


@pytest.mark.parametrize("keys", [("name", "ph"), ("ts", "ph"), ("args", "name", "ph")])
def test_metadata_may_have_another_order_of_keys_than_events(
    keys: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    careful = trace_text._Splitter._careful_cut

    def counting(splitter: trace_text._Splitter, buffer: bytes) -> tuple[int, int, bool] | None:
        counted.append(len(buffer))
        return careful(splitter, buffer)

    monkeypatch.setattr(trace_text._Splitter, "_careful_cut", counting)
    labels = {"name": "process_labels", "ph": "M", "ts": 0.0, "pid": 9, "tid": 0, "args": {"labels": "GPU 0"}}
    metadata = {**{key: labels[key] for key in keys}, **labels}
    path = write_trace(tmp_path / "a.json", [OPERATOR, *[metadata] * 40_000, OPERATOR])
    assert len(names(path)) == 40_002
    # Counting brackets takes several times as long: only for the last piece, which ends with the array.
    assert len(counted) <= 1
