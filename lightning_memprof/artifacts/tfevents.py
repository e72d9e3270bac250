"""TensorBoard event files: scalar curves and a custom-scalars layout.

tensorboard's ``RecordWriter`` writes the records. Its ``EventFileWriter`` needs a thread, imports TensorFlow if that is
installed, and chooses the file name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import layout_pb2, metadata
from tensorboard.summary.writer.record_writer import RecordWriter

Layout = dict[str, dict[str, "Sequence[str]"]]


class EventFile:
    """A TensorBoard event file.

    Args:
        path: the file to create; its name must contain ``.tfevents.``.
        time_s: Unix time of the first record, in seconds.

    Raises:
        FileExistsError: the file exists.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, time_s: float) -> None:
        self._records = RecordWriter(path.open("xb"))
        self._write(Event(wall_time=time_s, file_version="brain.Event:2"))

    def add(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Add one point to each of several curves; TensorBoard stores values as 32-bit floats.

        Args:
            step: position on the horizontal axis.
            time_s: Unix time in seconds.
            values: values by tag.

        Raises:
            OSError: the file cannot be written.
        """
        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(Event(wall_time=time_s, step=step, summary=Summary(value=points)))

    def add_layout(self, layout: Layout, time_s: float) -> None:
        """Add the layout of the custom-scalars dashboard.

        Args:
            layout: by category and chart, regular expressions for the tags of its curves.
            time_s: Unix time in seconds.

        Raises:
            OSError: the file cannot be written.
        """
        categories = [
            layout_pb2.Category(
                title=title,
                chart=[
                    layout_pb2.Chart(title=chart, multiline=layout_pb2.MultilineChartContent(tag=tags))
                    for chart, tags in charts.items()
                ],
            )
            for title, charts in layout.items()
        ]
        content = layout_pb2.Layout(category=categories).SerializeToString()
        value = Summary.Value(
            tag=metadata.CONFIG_SUMMARY_TAG,
            metadata=metadata.create_summary_metadata(),
            tensor=TensorProto(dtype=DT_STRING, tensor_shape={}, string_val=[content]),
        )
        self._write(Event(wall_time=time_s, summary=Summary(value=[value])))

    def flush(self) -> None:
        """Make the records written so far visible to readers."""
        self._records.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self._records.close()

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
