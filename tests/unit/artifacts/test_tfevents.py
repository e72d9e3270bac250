from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader, RawEventFileLoader
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from lightning_memprof.artifacts.tfevents import EventFile


def written(path):
    file = EventFile(path, 12.5)
    file.add_layout({"memory": {"MiB": ["^a/x$", "^a/y$"], "of \N{LATIN SMALL LETTER E WITH ACUTE}ach": ["^b$"]}}, 13.0)
    file.add(0, 14.0, {"a/x": 1.5, "a/y": -2.0})
    file.add(3_000_000_000, 15.0, {"b" * 200: 0.0})
    return file


def test_tensorboard_reads_what_was_written(tmp_path):
    path = tmp_path / "events.out.tfevents.rank00000"
    written(path).close()
    head, layout, first, last = EventFileLoader(str(path)).Load()
    assert (head.wall_time, head.file_version) == (12.5, "brain.Event:2")
    (category,) = Layout.FromString(layout.summary.value[0].tensor.string_val[0]).category
    assert [(chart.title, list(chart.multiline.tag)) for chart in category.chart] == [
        ("MiB", ["^a/x$", "^a/y$"]),
        ("of \N{LATIN SMALL LETTER E WITH ACUTE}ach", ["^b$"]),
    ]
    assert [(value.tag, value.tensor.float_val[0]) for value in first.summary.value] == [("a/x", 1.5), ("a/y", -2.0)]
    assert (last.step, last.wall_time, last.summary.value[0].tag) == (3_000_000_000, 15.0, "b" * 200)


def test_what_was_flushed_can_be_read_while_the_run_goes_on(tmp_path):
    path = tmp_path / "events.out.tfevents.rank00000"
    file = written(path)
    file.flush()
    assert len(list(RawEventFileLoader(str(path)).Load())) == 4
    file.close()


def test_nothing_is_written_over(tmp_path):
    path = tmp_path / "events.out.tfevents.rank00000"
    written(path).close()
    with pytest.raises(FileExistsError):
        EventFile(path, 0.0)


@pytest.mark.slow
def test_writing_starts_no_thread_and_loads_no_tensorflow(tmp_path):
    (tmp_path / "tensorflow.py").write_text("raise RuntimeError('imported')")
    program = (
        "import sys, threading; from pathlib import Path; from lightning_memprof.artifacts.tfevents import EventFile\n"
        "EventFile(Path('a.tfevents.0'), 0.0).close()\n"
        "print(threading.active_count(), sorted({'torch', 'tensorflow'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "1 []\n"
