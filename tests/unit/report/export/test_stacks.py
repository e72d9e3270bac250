from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from kineto import Made, event_fields, write_trace
from lightning_memprof.account.memory.model import Site
from lightning_memprof.account.snapshot.replay import Holder
from lightning_memprof.account.trace.lanes import read_lanes
from lightning_memprof.report.export.stacks import Speedscope, holder_stacks, site_stacks
from speedscope import validate

HOSTILE = "a;b\nc </script><img onerror=alert(1)>"


def scope_of(directory: Path, *made: Made) -> Any:
    path = write_trace(directory / "a.pt.trace.json", [event_fields(span) for span in made])
    scope = Speedscope("a", "lightning-memprof 1")
    scope.add_lanes("", read_lanes(path))
    out = io.StringIO()
    scope.write(out)
    return json.loads(out.getvalue())


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


def test_a_site_without_python_s_frames_is_found_by_phase_and_module() -> None:
    plain = Site("aten::mm", "net.layers.0", None, (), 1, "forward", 10, 1)
    deep = Site("aten::mm", "net.0", "b.py(2): g", ("b.py(2): g", "a.py(1): f"), 2, "forward", 5, 1)
    assert site_stacks([plain, plain, deep], "cpu") == {
        ("cpu", "forward", "net", "layers", "0", "aten::mm"): 20,
        ("cpu", "a.py(1): f", "b.py(2): g", "net.0", "aten::mm"): 5,
    }
