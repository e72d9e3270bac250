"""The file of memory at the start and end of functions, as finetuning-scheduler's users know it."""

from __future__ import annotations

import pickle
import shutil
from typing import TYPE_CHECKING, Any, Final

import yaml

from lightning_memprof.artifacts.naming import Edge, StatsFormat, memory_stats_name
from lightning_memprof.artifacts.sink import Artifact

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from lightning_memprof.artifacts.sink import Sink

__all__ = ["stats_key", "write_memory_stats"]

# The newest that every Python reads which torch supports.
_PROTOCOL: Final = 4

Stats = dict[str, dict[str, Any]]


def stats_key(rank: int, function: str, number: int, edge: Edge) -> str:
    """Key of one moment: ``{rank}.{function}.{number}.{start|end}``."""
    return f"{rank}.{function}.{number}.{edge}"


def write_memory_stats(
    sink: Sink, collector: str, stats: Mapping[str, Mapping[str, Any]], forms: Sequence[StatsFormat]
) -> None:
    """Add moments to the rank's files in the run directory, each of which is written whole or not at all.

    Args:
        sink: of the run.
        collector: in whose name the files are listed, as artifacts of type ``blob``.
        stats: plain values by name, by :func:`stats_key`; later ones win over what the file has.
        forms: ``"yaml"`` for plain mappings that ``yaml.safe_load`` reads, ``"pickle"`` for a dict of dicts.

    """
    for form in forms:
        path = sink.place.directory / memory_stats_name(sink.rank, form)
        new: Stats = {key: dict(values) for key, values in stats.items()}
        add = _add_yaml if form == "yaml" else _add_pickle
        with sink.file(Artifact(path, "blob", collector)) as temporary:
            add(path, temporary, new)


def _add_yaml(before: Path, target: Path, new: Stats) -> None:
    # Mappings in block style, one behind the other, are one mapping: what is there need not be read.
    if before.exists():
        shutil.copyfile(before, target)
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    with target.open("ab") as file:
        file.write(yaml.dump(new, Dumper=dumper, sort_keys=False, allow_unicode=True, encoding="utf-8"))


class _Plain(pickle.Unpickler):
    """Reads values without a class: the file is this run's own, unless somebody else may write into the directory."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse."""
        raise pickle.UnpicklingError(f"the file of memory names {module}.{name}, which it never does; remove it")


def _add_pickle(before: Path, target: Path, new: Stats) -> None:
    there: Stats = {}
    if before.exists():
        with before.open("rb") as file:
            there = _Plain(file).load()
    target.write_bytes(pickle.dumps(there | new, protocol=_PROTOCOL))
