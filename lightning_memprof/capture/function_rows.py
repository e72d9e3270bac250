"""The file of memory at functions that finetuning-scheduler's users know."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from lightning_memprof.artifacts.naming import Edge, StatsFormat, memory_stats_name
from lightning_memprof.artifacts.sink import ArtifactSpec, Sink

# The newest protocol that every Python supported by torch can read.
_PROTOCOL: Final = 4

Stats = dict[str, dict[str, Any]]


def stats_key(rank: int, function: str, number: int, edge: Edge) -> str:
    """Return the key of one start or end: ``{rank}.{function}.{number}.{start|end}``."""
    return f"{rank}.{function}.{number}.{edge}"


def write_memory_stats(
    sink: Sink, collector: str, stats: Mapping[str, Mapping[str, Any]], forms: Sequence[StatsFormat]
) -> None:
    """Add entries to the rank's files in the run directory, each written atomically.

    Args:
        sink: of the run.
        collector: the collector under which the files are listed, as artifacts of type ``blob``.
        stats: plain values by name, by :func:`stats_key`; they replace entries of the file.
        forms: ``"yaml"`` for plain mappings that ``yaml.safe_load`` reads, ``"pickle"`` for a dict of dicts.
    """
    for form in forms:
        path = sink.place.directory / memory_stats_name(sink.rank, form)
        new: Stats = {key: dict(values) for key, values in stats.items()}
        add = _add_yaml if form == "yaml" else _add_pickle
        with sink.file(ArtifactSpec(path=path, type="blob", collector=collector)) as temporary:
            add(path, temporary, new)


def _add_yaml(before: Path, target: Path, new: Stats) -> None:
    # Consecutive mappings in block style are one mapping: the existing file need not be parsed.
    if before.exists():
        shutil.copyfile(before, target)
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    with target.open("ab") as file:
        file.write(yaml.dump(new, Dumper=dumper, sort_keys=False, allow_unicode=True, encoding="utf-8"))


class _Plain(pickle.Unpickler):
    """Reads plain values only: others may be able to write into the run directory."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(
            f"the memory stats file refers to {module}.{name}, which is not allowed; remove the file"
        )


def _add_pickle(before: Path, target: Path, new: Stats) -> None:
    known: Stats = {}
    if before.exists():
        with before.open("rb") as file:
            known = _Plain(file).load()
    target.write_bytes(pickle.dumps(known | new, protocol=_PROTOCOL))
