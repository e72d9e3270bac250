from __future__ import annotations

import gzip
import io
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memprof.artifacts import trace_rewriting
from lightning_memprof.artifacts.trace_rewriting import (
    original_categories,
    range_name,
    tensorboard_categories,
    write_trace,
)
from recorded_rows import read_events

EVENT = """
  {
    "ph": "X",
    "cat": "%s",
    "name": "%s",
    "pid": 7,
    "tid": 8,
    "ts": %d.125,
    "dur": 2.500
    ,
    "args": {
      "External id": %d,"Ev Idx": 3
    }
  }"""
END = '\n  ],"traceName": "logs/[Strategy]/a.json" }'

FETCH = ("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
MODULE = ("cpu_op", "[pl][module]torch.nn.modules.linear.Linear: net.0")
ACTION = ("cpu_op", "[pl][profile][Callback]Save{'monitor': None}.on_train_start")
KERNEL = ("kernel", "gemm")
CALL = ("cuda_runtime", "cudaLaunchKernel")
STEPS = (("user_annotation", "ProfilerStep#3"), ("gpu_user_annotation", "ProfilerStep#3"))


def text(*events: tuple[str, str], head: str = "", end: str = END) -> bytes:
    written = ",".join(EVENT % (*event, 10 * i, i) for i, event in enumerate(events))
    return f'{{\n    "schemaVersion": 1,{head}\n    "traceEvents": [{written}{end}'.encode()


def rewritten(raw: bytes) -> bytes:
    target = io.BytesIO()
    tensorboard_categories(io.BytesIO(raw), target)
    return target.getvalue()


def loaded(raw: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(rewritten(raw))
    return found


@pytest.mark.parametrize(
    ("event", "category"),
    [
        (FETCH, "cpu_op"),
        (("user_annotation", "enumerate(DataPipe)#Shuffler"), "cpu_op"),
        (CALL, "runtime"),
        (("cuda_driver", "cuLaunchKernel"), "runtime"),
        (("xpu_runtime", "urEnqueue"), "runtime"),
        (STEPS[1], "gpu_step"),
        (("user_annotation", "[pl][module]T: net"), "cpu_op"),
    ],
)
def test_an_event_has_the_category_that_the_tab_reads_and_says_what_torch_wrote(event, category):
    (found,) = loaded(text(event))["traceEvents"]
    assert found["cat"] == category
    assert found["args"] == {"Original category": event[0], "External id": 0, "Ev Idx": 3}
    assert found["name"] == event[1]


@pytest.mark.parametrize(
    "event",
    [
        STEPS[0], KERNEL, MODULE, ACTION, ("cpu_op", "aten::mm"), ("user_annotation", "Optimizer.step#SGD.step"),
        ("gpu_user_annotation", "nccl:all_reduce"), ("user_annotation", "gloo:all_reduce"), ("overhead", "runtime"),
    ],
)  # fmt: skip
def test_what_the_tab_reads_already_stays_as_it_is(event):
    (found,) = loaded(text(event))["traceEvents"]
    assert (found["cat"], found["args"]) == (event[0], {"External id": 0, "Ev Idx": 3})


@pytest.mark.parametrize("name", ['a"b', "a\\b", "größe", "a\nb\x1b", "日本語\U0001f600", "&#x; &", "plain: net.0"])
def test_a_name_of_a_range_is_written_in_plain_letters_and_restored(name: str) -> None:
    written = range_name(f"[pl][module]{name}")
    assert written.isascii()
    assert written.isprintable()
    assert not {'"', "\\"} & set(written)
    (found,) = loaded(text(("cpu_op", written)))["traceEvents"]
    assert found["name"] == f"[pl][module]{name}"


def test_what_is_no_letter_stays_and_a_name_that_is_not_utf8_can_be_written() -> None:
    (found,) = loaded(text(("cpu_op", "&#9999999; &#65;")))["traceEvents"]
    assert found["name"] == "&#9999999; A"
    assert range_name("a\udcff") == "a?"


def test_modules_and_actions_make_it_a_trace_of_lightnings_but_not_where_stacks_name_torchs_modules():
    assert loaded(text(MODULE, ACTION))["Framework"] == "pytorch-lightning"
    stacks = loaded(text(MODULE, ACTION, head='\n      "with_stack": 1,'))
    assert "Framework" not in stacks
    assert [event["cat"] for event in stacks["traceEvents"]] == ["user_annotation"] * 2
    assert [event["args"]["Original category"] for event in stacks["traceEvents"]] == ["cpu_op"] * 2


@pytest.mark.parametrize("events", [(MODULE,), (ACTION,), (KERNEL,)])
def test_a_trace_without_modules_or_without_actions_is_no_trace_of_lightnings(events):
    # With it and without either, the tab answers with errors.
    assert "Framework" not in loaded(text(*events))


def test_no_bracket_stands_behind_the_events_because_the_tab_takes_the_last_one_for_their_end():
    for events in ((MODULE, ACTION), (KERNEL,)):
        end = rewritten(text(*events))
        assert end.rindex(b"]") > end.rindex(b'"ph"')
        assert b"traceName" not in end


def test_a_path_with_quotation_marks_leaves_the_trace_json():
    # Kineto writes the path into the file as it is.
    end = END.replace("logs", """it's a "log" ]""")
    assert [event["name"] for event in loaded(text(KERNEL, end=end))["traceEvents"]] == ["gemm"]


def test_readers_see_what_torch_wrote(tmp_path: Path):
    events = (FETCH, CALL, *STEPS, MODULE, ACTION, KERNEL)
    for head in ("", '\n      "with_stack": 1,'):
        raw, file = text(*events, head=head), tmp_path / "a.json"
        file.write_bytes(rewritten(raw))
        assert file.read_bytes() != raw
        assert [(event.cat, event.name) for event in read_events(file)] == list(events)


@given(
    events=st.lists(st.sampled_from([FETCH, CALL, *STEPS, MODULE, ACTION, KERNEL]), max_size=30),
    stacks=st.booleans(),
)
def test_every_byte_of_the_events_comes_back(events, stacks):
    raw = text(*events, head='\n      "with_stack": 1,' if stacks else "", end="\n  ] }")
    there = rewritten(raw)
    back = original_categories(there)
    assert back == raw or (back[: len(raw) - 4] == raw[:-4] and b"Framework" in there)


WORDS = (b'"Original category": "', b'"cat": "', b'"', b'", ', b'"ph"', b"runtime", b"{", b"}")


@given(garbage=st.binary(max_size=300), words=st.lists(st.sampled_from(WORDS)))
def test_text_that_is_no_trace_is_copied(garbage, words):
    raw = garbage + b"".join(words)
    assert rewritten(raw) == raw
    original_categories(raw)


def test_a_mark_that_belongs_to_no_category_stays():
    for hostile in (b'"Original category": "x", ', b'"cat": "a", "ph": "X", "Original category": "x", ',
                    b'"cat": "a", "Original category": "' + b"x" * 200 + b'", '):  # fmt: skip
        assert original_categories(hostile) == hostile


class Endless(io.RawIOBase):
    """A trace of some hundred MB of which no byte is stored."""

    def __init__(self, megabytes: int) -> None:
        self.piece = text(*[CALL, KERNEL, ("cpu_op", "aten::mm")] * 1000)
        self.left = megabytes * 1_000_000 // len(self.piece)

    def read(self, size: int = -1) -> bytes:
        self.left -= 1
        return self.piece if self.left >= 0 else b""


class Counted(io.RawIOBase):
    """Counts what is written, and the largest piece."""

    bytes = most = 0

    def write(self, data: Any) -> int:
        self.bytes += len(data)
        self.most = max(self.most, len(data))
        return len(data)


def test_a_large_trace_is_rewritten_in_small_pieces():
    source, target = Endless(50), Counted()
    tensorboard_categories(source, target)  # type: ignore[arg-type]
    assert target.bytes > 50_000_000
    assert target.most < 3_000_000


@pytest.mark.slow
def test_one_endless_word_is_not_collected():
    class Word(io.RawIOBase):
        left = 150

        def read(self, size: int = -1) -> bytes:
            self.left -= 1
            return b"x" * (1 << 18) if self.left >= 0 else b""

    target = Counted()
    tensorboard_categories(Word(), target)  # type: ignore[arg-type]
    assert (target.bytes, target.most < 20 << 20) == (150 << 18, True)


LAUNCH = '{"ph": "X", "cat": "cuda_runtime", "name": "launch", "pid": 1, "tid": 1, "ts": 1, "dur": 1, "args": {"a": 1}}'


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    file = tmp_path / "raw.json"
    file.write_text('{"traceEvents": [\n' + ",\n".join([LAUNCH] * 500) + "\n]}")
    return file


@pytest.fixture(
    params=[
        "here", "by a process", "here, because no process can be started", "here, because it died",
        "here, because it hung", "here, because the program is frozen",
    ]
)  # fmt: skip
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    way: str = request.param
    if way != "here":
        monkeypatch.setattr(trace_rewriting, "_SMALL_BYTES", 0)
    if way.endswith("process"):
        monkeypatch.setattr(trace_rewriting, "_write", lambda raw, target: pytest.fail("was done here"))
    if way.endswith("started"):
        monkeypatch.setattr(trace_rewriting, "own_program", lambda *_: ["/nowhere/python"])
    if way.endswith("died"):
        monkeypatch.setattr(
            trace_rewriting, "own_program", lambda *_: [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
        )
    if way.endswith("hung"):
        monkeypatch.setattr(trace_rewriting, "_START_SECONDS", 0.1)
        monkeypatch.setattr(
            trace_rewriting, "own_program", lambda *_: [sys.executable, "-c", "import time; time.sleep(600)"]
        )
    if way.endswith("frozen"):
        monkeypatch.setattr(sys, "frozen", True, raising=False)
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("the program was started again"))
    return way


def test_the_file_that_stays_is_compressed_and_has_the_tabs_categories(raw: Path, tmp_path: Path, way: str) -> None:
    target = tmp_path / "a b" / "out.gz"
    target.parent.mkdir()
    write_trace(raw, target)
    events = json.loads(gzip.decompress(target.read_bytes()))["traceEvents"]
    assert len(events) == 500
    assert {(event["cat"], event["args"]["Original category"]) for event in events} == {("runtime", "cuda_runtime")}


def test_a_target_that_cannot_be_written_is_an_error(raw: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        write_trace(raw, tmp_path / "nowhere" / "out.gz")


@pytest.mark.skipif(not subprocess._USE_POSIX_SPAWN, reason="needs posix_spawn")
def test_no_pipe_that_a_forked_worker_could_hold_open_is_waited_for(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pipe() -> tuple[int, int]:
        raise OSError("the writer waits until every fork has closed this")

    monkeypatch.setattr(trace_rewriting, "_SMALL_BYTES", 0)
    monkeypatch.setattr(trace_rewriting, "_write", lambda raw, target: pytest.fail("was done here"))
    monkeypatch.setattr(os, "pipe", pipe)
    # What Python 3.13 does in any case.
    monkeypatch.setattr(subprocess, "_HAVE_POSIX_SPAWN_CLOSEFROM", False, raising=False)
    write_trace(raw, tmp_path / "out.gz")
    assert (tmp_path / "out.gz").exists()


def test_the_process_holds_no_socket_of_the_training(tmp_path: Path) -> None:
    source, (here, there) = tmp_path / "raw", os.pipe()
    os.mkfifo(source)
    os.set_inheritable(there, True)
    program = f"from lightning_memprof.artifacts.trace_rewriting import main; main({str(source)!r}, '/dev/null')"
    with subprocess.Popen([sys.executable, "-c", program], close_fds=False) as process:
        os.close(there)
        # It waits for the trace by then.
        with source.open("wb"):
            assert select.select([here], [], [], 0)[0]
    os.close(here)
    assert process.returncode == 0


def test_the_process_knows_neither_torch_nor_lightning() -> None:
    code = (
        "import sys, lightning_memprof.artifacts.trace_rewriting\n"
        "print([name for name in ('torch', 'lightning', 'numpy') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
