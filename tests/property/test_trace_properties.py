from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from kineto import DEVICE_CATEGORIES, Made, event_fields, torch_table, write_trace
from lightning_memprof.account.trace.operators import TableOptions, operator_table
from lightning_memprof.errors import ArtifactError
from recorded_rows import Trace

HOSTILE = [
    '}, {"ph"',
    '}, {"ph": "X"}, {',
    "],",
    '"',
    "\\",
    '\\"',
    "\\\\",
    "]}",
    "[{",
    "é中",
    "\n",
    "traceEvents",
    "nan",
    "",
]
PROFILE = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])

names = st.one_of(st.sampled_from(HOSTILE), st.text(st.characters(codec="utf-8"), max_size=20))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**31), 2**31) | names,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["ph", "a", "name"]), inner, max_size=2)
    ),
    max_leaves=6,
)


@st.composite
def raw_events(draw: st.DrawFn) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "ph": draw(st.sampled_from(["X", "i", "M"])),
        "name": draw(names),
        "cat": draw(names),
        "pid": draw(st.integers(-5, 2**40) | names),
        "tid": draw(st.integers(-(2**40), 2**40) | names),
        "ts": draw(st.integers(0, 7_800_000_000_000_000)) / 1000,
        "dur": draw(st.integers(0, 10**12)) / 1000,
        "args": {"other": draw(json_values), "External id": draw(st.integers(0, 2**40))},
    }
    order = draw(st.permutations(list(fields)) if draw(st.booleans()) else st.just(list(fields)))
    return {key: fields[key] for key in order}


@pytest.mark.slow
@PROFILE
@given(
    events=st.lists(raw_events(), max_size=25),
    chunk=st.sampled_from([1, 7, 64, 500, 1 << 20]),
    gap=st.sampled_from([",", ", ", ",\n  ", "\n,\n"]),
    suffix=st.sampled_from([".json", ".json.gz"]),
)
def test_any_events_in_any_chunks_come_back_unchanged(events, chunk, gap, suffix):
    with TemporaryDirectory() as directory:
        path = write_trace(Path(directory) / f"t{suffix}", events, gap=gap, schemaVersion=1, note='"traceEvents": [')
        trace = Trace(path)
        found = list(trace.events(chunk))
    assert [(e.ph, e.name, e.cat, e.pid, e.tid, e.ts, e.dur, e.args.link) for e in found] == [
        (e["ph"], e["name"], e["cat"], e["pid"], e["tid"], e["ts"], e["dur"], e["args"]["External id"]) for e in events
    ]
    assert [e.start_ns for e in found] == [round(e["ts"] * 1000) for e in events]
    assert trace.metadata == {"schemaVersion": 1, "note": '"traceEvents": [', "traceName": path.name}


@PROFILE
@given(name=st.text(st.characters(codec="utf-8", exclude_characters='\n\r\\"}]', exclude_categories=["Cc", "Cs"])))
def test_a_name_with_bare_quotes_is_read_as_it_was_meant(name):
    """Kineto writes the quotes of a name unescaped, which is no JSON."""
    wanted = f'a"{name}"b'
    lines = (
        '{"traceEvents": [\n{\n"ph": "X",\n"name": "%s",\n"ts": 1\n},\n{\n"ph": "X",\n"name": "next",\n"ts": 2\n}\n]}'
    )
    with TemporaryDirectory() as directory:
        path = Path(directory) / "t.json"
        path.write_text(lines % wanted, encoding="utf-8")
        assert [event.name for event in Trace(path).events()] == [wanted, "next"]


@st.composite
def profiles(draw: st.DrawFn) -> list[Made]:
    """Any intervals on two threads, with device work, memory and shapes; names repeat, so that twins occur."""
    times = st.integers(0, 40)
    spans = st.tuples(times, times).map(sorted)
    found: list[Made] = []
    for number in range(1, draw(st.integers(1, 14))):
        start, end = draw(spans)
        found.append(
            Made(
                draw(st.sampled_from(["a", "b", "aten::is_leaf", "ProfilerStep#1", "ProfilerStep#2"])),
                start,
                end,
                draw(st.sampled_from(["cpu_op", "user_annotation"])),
                draw(st.sampled_from([7, 8])),
                number,
                shapes=draw(st.sampled_from([[], [[2, 3], []], [[[2], [3]], [4]]])),
            )
        )
    operators = len(found)
    for _ in range(draw(st.integers(0, 6)) if operators else 0):
        start, end = draw(spans)
        cat = draw(st.sampled_from([*DEVICE_CATEGORIES, "cuda_runtime"]))
        # torch moves a linked runtime call to its operator's thread, where the file has it already.
        owner = found[draw(st.integers(0, operators - 1))]
        link = owner.id if cat != "cuda_runtime" or owner.name != "aten::is_leaf" else 0
        found.append(Made(draw(st.sampled_from(["a", "k"])), start, end, cat, owner.thread, link=link))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(times)
        size, device = draw(st.integers(-5000, 5000)), draw(st.sampled_from([0, 1]))
        found.append(Made("[memory]", at, at, "cpu_instant_event", 7, bytes=size, device_type=device))
    return found


# A call of CUDA's runtime and no kernel: the profile was one of a GPU all the same.
@pytest.mark.slow
@example(
    events=[
        Made("a", 0, 0, id=1),
        Made("a", 0, 0, "cuda_runtime"),
        Made("[memory]", 0, 0, "cpu_instant_event", bytes=1, device_type=1),
    ],
    by_shapes=False,
    sort_by=None,
    limit=-1,
    top=False,
)
# A kernel before a runtime call of its name and time: of rows that begin together the first one in the file is first.
@example(
    events=[Made("a", 0, 0, id=1), Made("a", 0, 1, "kernel", link=1), Made("a", 0, 1, "cuda_runtime", link=1)],
    by_shapes=False,
    sort_by=None,
    limit=-1,
    top=False,
)
@PROFILE
@given(
    events=profiles(),
    by_shapes=st.booleans(),
    sort_by=st.sampled_from(
        [None, "count", "cpu_time", "self_cpu_time_total", "self_cuda_time_total", "cuda_time_total"]
    ),
    limit=st.sampled_from([-1, 0, 3, 100]),
    top=st.booleans(),
)
def test_the_table_is_torchs_table(events, by_shapes, sort_by, limit, top):
    # Device time of annotations alone is more than torch's table can print.
    assume(any(e.cat in DEVICE_CATEGORIES[:3] and e.end > e.start for e in events) or not any(e.link for e in events))
    wanted = torch_table(events, by_shapes=by_shapes, sort_by=sort_by, row_limit=limit, top_level_events_only=top)
    options = TableOptions(sort_by=sort_by, row_limit=limit, group_by_input_shapes=by_shapes, top_level_events_only=top)
    with TemporaryDirectory() as directory:
        path = write_trace(Path(directory) / "t.json", [event_fields(e) for e in events])
        if not wanted:
            with pytest.raises(ArtifactError, match="no operator"):
                operator_table([path], options)
            return
        found = operator_table([path], options)
    assert found == wanted + "Windows: 1\n", json.dumps([event_fields(e) for e in events])
