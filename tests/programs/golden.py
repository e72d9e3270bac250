"""Compare what the commands say about recorded files with what they said before.

    python tests/programs/golden.py check [--only PATTERN]
    python tests/programs/golden.py record [--only PATTERN]

A case is a few commands over one recorded run, or over a folder of traces or snapshots, in ``tests/golden/recorded``.
What they print as JSON (tables: as CSV) is compared field by field with ``tests/golden/expected``: keys, numbers,
booleans, null and names exactly; prose, see ``PROSE``, is not. Where the shared corpus is available its traces and
snapshots are compared as well; of their text only hashes are stored.

Record after a field was added, renamed or removed on purpose, when ``check`` prints nothing else. Never record to get
rid of a difference: a figure that changes needs a reason of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gzip
import hashlib
import io
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

GOLDEN: Final = Path(__file__).resolve().parents[1] / "golden"
REPOSITORY: Final = GOLDEN.parents[1]

# Fields of prose, as paths without indexes and command; "*.why" is every why. They may be reworded.
PROSE: Final = (
    "*.title",
    "*.why",
    "*.next",
    "*.next_steps",
    "*.message",
    "*.reason",
    "*.reasons.*",
    "*.unknown.*",
    "oom.unavailable.*",
    "left_out.*",
    "*.missing",
    "*.moment",
    "*.attribution",
    "*.problem",
    "*.note",
    "*_note",
    "*.notes",
    "*.basis",
    "commands",
    "verdict",
    "differences.source",
    "differences.*.source",
    "oom.held.name",
    "*.numbers.cause",
)
# Conclusions: the rules decide them, and tests/verdicts and the tests of the rules compare them. Here only figures are.
CONCLUSIONS: Final = ("findings", "verdict", "findings.csv", "differences.needed", "differences.is_above_noise")
# How many commands are proposed is no figure, nor how many gaps of a snapshot are named.
ANY_LENGTH: Final = ("commands", "snapshots.missing")


@dataclass(frozen=True)
class Case:
    """Commands over recorded files.

    Attributes:
        name: of the file with the expected documents.
        commands: their arguments, without format and output; paths are relative to the directory of the files.
        archives: what is extracted; none for the corpus.

    """

    name: str
    commands: tuple[tuple[str, ...], ...]
    archives: tuple[str, ...] = ()


@dataclass(frozen=True)
class Difference:
    """A field that is not as expected."""

    path: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}: {self.old} -> {self.new}"


def _shown(name: str, *more: tuple[str, ...]) -> Case:
    return Case(name, (("show", name), *more), (name,))


RECORDED: Final = (
    _shown("default"),
    _shown("everything", ("show", "everything", "--window", "1")),
    Case("stages", tuple(("show", f"stages/log/{name}") for name in ("validate", "test", "predict")), ("stages",)),
    _shown("exception"),
    _shown("oom_host"),
    _shown("oom_device"),
    _shown("oom_fragmented"),
    _shown("two_ranks", ("show", "two_ranks", "--rank", "1")),
    _shown("two_ranks_killed"),
    _shown("killed"),
    _shown("profiler"),
    _shown("memprofiler_cfg"),
    _shown("device_traces", ("show", "device_traces/ranks")),
    _shown("snapshots"),
    Case(
        "compare",
        (
            ("compare", "default", "profiler"),
            ("compare", "two_ranks", "two_ranks_killed"),
            ("compare", "oom_device", "oom_fragmented"),
            ("compare", "device_traces/single/healthy.pt.trace.json.gz", "device_traces/ranks/rank0.pt.trace.json.gz"),
            ("compare", "snapshots/trained.pickle", "snapshots/fragmented.pickle"),
        ),
        (
            "default",
            "profiler",
            "two_ranks",
            "two_ranks_killed",
            "oom_device",
            "oom_fragmented",
            "device_traces",
            "snapshots",
        ),
    ),
    Case(
        "export",
        (
            ("export", "everything"),
            ("export", "two_ranks"),
            ("export", "device_traces/ranks"),
            ("export", "snapshots/trained.pickle"),
        ),
        ("everything", "two_ranks", "device_traces", "snapshots"),
    ),
)
CORPUS: Final = tuple(
    Case(f"corpus.{name}", (("show", f"{kind}/{name}"),))
    for kind, names in (
        ("traces", ("hta_amd_mi250", "hta_cpu_only_gloo", "hta_cuda_event_sync", "hta_ns_resolution",
                    "hta_rank_unavailable", "hta_sampled_128", "hta_trace_diff_control", "hta_triton",
                    "kineto_resnet50_nw0", "kineto_resnet50_nw0_legacy", "sidnb13_h100_transformer", "tl_h100_bert",
                    "tl_mi300_resnet_ddp_rank0of8")),
        ("snapshots", ("snap_cs336_nothanmin", "snap_cs336_silmont", "snap_cs336_wedson", "snap_llminf_torch20",
                       "snap_verl")),
    )
    for name in names
)  # fmt: skip
CASES: Final = (*RECORDED, *CORPUS)


def corpus() -> Path | None:
    """Return where the shared corpus is, or None."""
    root = Path(os.environ.get("MEMPROF_CORPUS") or REPOSITORY.parent / "shared" / "corpus")
    return root if (root / "references").is_dir() else None


def documents(case: Case, directory: Path, root: Path | None = None) -> dict[str, Any]:
    """Return what a case's commands say, by command.

    Args:
        case: what to run.
        directory: an empty one for extracted and exported files.
        root: the corpus, for a case of it.

    """
    for name in case.archives:
        with tarfile.open(GOLDEN / "recorded" / f"{name}.tar.gz") as archive:
            archive.extractall(directory, filter="data")
    here = root or directory
    said = {
        " ".join(command): _prepared(_said(command, here, directory / f"tables{number}"), (here, directory))
        for number, command in enumerate(case.commands)
    }
    return said if root is None else {command: _without_text(document) for command, document in said.items()}


def _said(command: Sequence[str], here: Path, tables: Path) -> Any:
    """Run one command in this process, in the directory with its files."""
    from lightning_memprof.__main__ import main

    if command[0] == "export":
        _run(main, [*command, "--to", "csv", "-o", str(tables)], here)
        return {path.name: _table(path) for path in sorted(tables.iterdir())}
    return json.loads(_run(main, [*command, "--format", "json"], here))


def _run(main: Any, arguments: list[str], here: Path) -> str:
    out, err, before, argv = io.StringIO(), io.StringIO(), Path.cwd(), sys.argv
    os.chdir(here)
    sys.argv = ["lightning-memprof", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main()
    finally:
        sys.argv = argv
        os.chdir(before)
    if code:
        raise SystemExit(f"lightning-memprof {' '.join(arguments)} exited with {code}:\n{err.getvalue()}")
    return out.getvalue()


def _table(path: Path) -> list[dict[str, Any]]:
    """Return the rows of an exported table; a cell that holds JSON is parsed."""
    with path.open(newline="", encoding="utf-8") as file:
        return [{key: _cell(value) for key, value in row.items()} for row in csv.DictReader(file)]


def _cell(value: str) -> Any:
    if value[:1] in {"[", "{"}:
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


def _prepared(value: Any, directories: Sequence[Path]) -> Any:
    """Replace the directories in all strings."""
    if isinstance(value, dict):
        return {key: _prepared(each, directories) for key, each in value.items()}
    if isinstance(value, list):
        return [_prepared(each, directories) for each in value]
    if isinstance(value, str):
        for directory in directories:
            for name in (str(directory.resolve()), str(directory)):
                value = value.replace(name, "<here>")
    return value


def _without_text(value: Any, path: str = "") -> Any:
    """Replace prose by nothing, and every other string by a hash."""
    if isinstance(value, dict):
        return {key: _without_text(each, _below(path, key)) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_text(each, path) for each in value]
    if isinstance(value, str):
        return "" if _matches(path, PROSE) else f"sha256:{hashlib.sha256(value.encode()).hexdigest()[:12]}"
    return value


def _below(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(path, pattern) or fnmatchcase(f".{path}", pattern) for pattern in patterns)


def differences(expected: Any, found: Any) -> list[Difference]:
    """Return how the documents of a case differ from the expected ones, by command and field."""
    compared: list[Difference] = []
    for command in dict.fromkeys((*expected, *found)):
        if command not in found:
            compared.append(Difference(command, "present", "missing"))
        elif command not in expected:
            compared.append(Difference(command, "missing", "present"))
        else:
            compared += _differences(expected[command], found[command], f"{command}:", "")
    return compared


def _differences(old: Any, new: Any, where: str, path: str) -> Iterator[Difference]:
    """Compare two values.

    Args:
        old: the expected one.
        new: the found one.
        where: the place as it is told, with indexes.
        path: the same without indexes and command, which the tables of this program name.

    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*old, *new)):
            place = f"{where}.{key}" if path else f"{where} {key}"
            if _matches(_below(path, key), CONCLUSIONS):
                continue
            if key not in new:
                yield Difference(place, _brief(old[key]), "missing")
            elif key not in old:
                yield Difference(place, "missing", _brief(new[key]))
            else:
                yield from _differences(old[key], new[key], place, _below(path, key))
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new) and not _matches(path, ANY_LENGTH):
            yield Difference(where, f"{len(old)} items", f"{len(new)} items")
        for index, (before, after) in enumerate(zip(old, new, strict=False)):
            yield from _differences(before, after, f"{where}[{index}]", path)
    elif type(old) is not type(new) or (old != new and not (isinstance(old, str) and _matches(path, PROSE))):
        yield Difference(where, _brief(old), _brief(new))


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def expected_documents(case: Case) -> Any:
    """Return what was recorded for a case."""
    return json.loads(gzip.decompress((GOLDEN / "expected" / f"{case.name}.json.gz").read_bytes()))


def found_documents(case: Case) -> Any:
    """Return what a case's commands say now."""
    with tempfile.TemporaryDirectory(prefix="golden-") as directory:
        return documents(case, Path(directory), None if case.archives else corpus())


def _record(case: Case) -> int:
    text = json.dumps(found_documents(case), separators=(",", ":"), ensure_ascii=False)
    path = GOLDEN / "expected" / f"{case.name}.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(f"{case.name}: recorded, {path.stat().st_size:,} bytes")
    return 0


def _check(case: Case) -> int:
    """Print how a case differs, and return in how many fields."""
    found = differences(expected_documents(case), found_documents(case))
    print("\n  ".join([f"{case.name}: {f'{len(found)} fields differ' if found else 'equal'}", *map(str, found)]))
    return len(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description="Compare what the commands say about recorded files with before.")
    parser.add_argument("command", choices=("check", "record"), help="compare, or write what is expected from now on")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="only the cases with such a name, as in 'oom_*'")
    arguments = parser.parse_args(argv)
    cases = [case for case in CASES if fnmatchcase(case.name, arguments.only)]
    if not cases:
        parser.error(f"no case is named {arguments.only}; there are {', '.join(case.name for case in CASES)}")
    if corpus() is None and any(not case.archives for case in cases):
        print("corpus: skipped, it is not here; set MEMPROF_CORPUS to its directory")
        cases = [case for case in cases if case.archives]
    if arguments.command == "record":
        return sum(map(_record, cases))
    return int(sum(map(_check, cases)) > 0)


if __name__ == "__main__":
    sys.exit(main())
