"""Compare what the page says of recorded training runs with what it said before.

    python tests/programs/golden_runs.py check [--only PATTERN]     what the pages say now and did not say before
    python tests/programs/golden_runs.py record [--only PATTERN]    write what they say now as expected
    python tests/programs/golden_runs.py pack RECORDING ...         add recordings of `make verdicts`

``tests/golden/runs`` has an archive of each recording, and beside it what its page says, as JSON: the findings in their
order with the ids of rules and remedies, owner and severity, and the main figures of the ledgers. No sentence is
compared. Record after a change of the rules, and read the difference as part of the change; a figure that changes
needs a reason of its own.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import lzma
import platform
import re
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parents[1] / "verdicts"))

from page_commands import shown

RUNS: Final = Path(__file__).resolve().parents[1] / "golden" / "runs"
# Nothing in an archive tells where it was recorded.
HOST: Final = "trainer-0"
HOME: Final = "/home/user"
PLATFORM: Final = "Linux-6.1.0-x86_64-with-glibc2.36"
FINDING: Final = ("rule", "owner", "severity")
DIGITS: Final = 6


def names() -> list[str]:
    return sorted(path.name.removesuffix(".tar.xz") for path in RUNS.glob("*.tar.xz"))


def expected(name: str) -> Any:
    return json.loads((RUNS / f"{name}.json").read_text(encoding="utf-8"))


def said(name: str) -> dict[str, Any]:
    """Give what the page of a packed recording says."""
    with extracted(name) as directory:
        return summary(shown(directory))


@contextmanager
def extracted(name: str) -> Iterator[Path]:
    """Yield the directory of a packed recording, which exists until the context is left."""
    with tempfile.TemporaryDirectory(prefix="golden-") as directory:
        with tarfile.open(RUNS / f"{name}.tar.xz") as archive:
            archive.extractall(directory, filter="data")
        yield Path(directory)


def summary(page: Mapping[str, Any]) -> dict[str, Any]:
    """Return the conclusions of a page in ids, and the main figures of its ledgers."""
    ledger = page["ledger"] or {}
    memory = ledger.get("memory") or {}
    return rounded({
        "findings": [conclusion(row) for row in page["findings"]],
        "steps": page["run"]["steps"],
        "step_ns": ledger.get("step_ns"),
        "parts_ns": ledger.get("parts_ns"),
        "ranks_ns": {str(rank["rank"]): rank["pulse"]["duration_ns"]["mean"] for rank in page["ranks"]},
        "traces_ns": [(trace["host_ledger"] or {}).get("parts_ns") for trace in page["traces"]],
        "peak_bytes": memory.get("peak_bytes"),
        "categories_bytes": memory.get("categories_bytes"),
    })  # fmt: skip


def conclusion(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a finding without its sentences."""
    found = {key: row[key] for key in FINDING if row.get(key) is not None}
    worth = row["recovers"]
    return {
        **found,
        "remedies": [remedy["id"] for remedy in row["remedies"]],
        **({"recovers": [worth["min"], worth["max"]]} if worth else {}),
    }


def rounded(value: Any) -> Any:
    """Round to six digits: sums of floats depend on the order, which a version of NumPy may change."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def text_of(document: Mapping[str, Any]) -> str:
    """Return a document as JSON with a line for each finding and each ledger."""
    lines = []
    for key, value in document.items():
        rows = [f"\n  {json.dumps(row)}" for row in value] if isinstance(value, list) and value else None
        lines.append(f" {json.dumps(key)}: " + (f"[{','.join(rows)}\n ]" if rows else json.dumps(value)))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def record(name: str) -> None:
    (RUNS / f"{name}.json").write_text(text_of(said(name)), encoding="utf-8")


def pack(recording: Path) -> str:
    """Write the archive of a recording: what the page reads of it, without a trace of the machine."""
    (run,) = recording.resolve().rglob("memprofiler")
    name = re.sub(r"-(fault|healthy)-\d+$", r"-\1", recording.name)
    files = {
        path.relative_to(run.parent).as_posix(): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()
    }
    for path in sorted(run.parent.glob("*.pt.trace.json.gz")):
        files[path.name.removesuffix(".gz")] = gzip.decompress(path.read_bytes())
    files = {place: anonymous(data, run.parent) for place, data in files.items()}
    files = {place: listed(data, files) if "manifest" in place else data for place, data in files.items()}
    RUNS.mkdir(parents=True, exist_ok=True)
    with (
        lzma.open(RUNS / f"{name}.tar.xz", "wb", preset=9) as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive,
    ):
        for place, data in files.items():
            member = tarfile.TarInfo(place)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return name


def anonymous(data: bytes, root: Path) -> bytes:
    """Replace the host, the directory of the run, the platform and every other directory of this machine."""
    host = platform.node().encode()
    data = data.replace(str(root).encode(), f"{HOME}/run".encode())
    data = data.replace(b'"host":"%b"' % host, f'"host":"{HOST}"'.encode())
    data = data.replace(b'"host_name": "%b"' % host, f'"host_name": "{HOST}"'.encode())
    data = re.sub(rb'"platform":"[^"]*"', f'"platform":"{PLATFORM}"'.encode(), data)
    left = re.findall(rb"(?:/tmp|/root|/work|/home(?!/user/run))/[^\s\"]*", data)
    if left:
        raise SystemExit(f"a directory of this machine is left: {left[:3]}")
    return data


def listed(manifest: bytes, files: Mapping[str, bytes]) -> bytes:
    """Return a manifest with the name, size and hash of the files as they are packed."""
    lines = []
    for line in manifest.decode().splitlines():
        row = json.loads(line)
        if row["kind"] == "artifact":
            place = PurePosixPath(row["path"])
            row["path"] = str(place.with_suffix("") if place.name.endswith(".trace.json.gz") else place)
            data = files.get(row["path"])
            if data is not None:
                row |= {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        lines.append(json.dumps(row, separators=(",", ":")))
    return "\n".join((*lines, "")).encode()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("check", "record", "pack"))
    parser.add_argument("recordings", type=Path, nargs="*", metavar="RECORDING")
    parser.add_argument("--only", metavar="PATTERN", default="*")
    options = parser.parse_args(argv)
    chosen = [name for name in names() if fnmatchcase(name, options.only)]
    if options.command == "pack":
        chosen = [pack(recording) for recording in options.recordings]
    if options.command != "check":
        for name in chosen:
            record(name)
        return 0
    differing = sum([is_different(name) for name in chosen])
    print(f"{len(chosen)} recordings, {differing} differ")
    return int(bool(differing))


def is_different(name: str) -> bool:
    """Print what a page says otherwise than before, and tell whether it does."""
    before, now = expected(name), said(name)
    for key in dict.fromkeys((*before, *now)):
        if before.get(key) != now.get(key):
            print(f"{name}: {key}: {json.dumps(before.get(key))}\n    -> {json.dumps(now.get(key))}")
    return bool(before != now)


if __name__ == "__main__":
    raise SystemExit(main())
