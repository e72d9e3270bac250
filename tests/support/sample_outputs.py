"""The sample outputs of the documentation, as the code prints them: ``python tests/support/sample_outputs.py``.

Each is made from a synthetic run and replaces the block of its page; a test compares the two.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from fake_runs import FakeRun, make_run
from lightning_memprof.artifacts.sink import RunPlace, Sink
from lightning_memprof.cli.main import main
from lightning_memprof.read.run.load import load_run
from lightning_memprof.report.summary import print_autopsy
from lightning_memprof.units import GIB
from many_ranks import make_many_ranks

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
MS: Final = 1_000_000


@contextlib.contextmanager
def produced() -> Iterator[Path]:
    """Work in an empty directory, 80 columns wide."""
    before, columns = Path.cwd(), os.environ.get("COLUMNS")
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        os.environ["COLUMNS"] = "80"
        try:
            yield Path(directory)
        finally:
            os.chdir(before)
            del os.environ["COLUMNS"]
            if columns is not None:
                os.environ["COLUMNS"] = columns


def command(*arguments: str) -> str:
    """Give what a command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(list(arguments))
    return out.getvalue()


def finding(directory: Path) -> str:
    """A finding in the JSON of ``show``."""

    def waiting(rank: int, step: int) -> dict[str, int]:
        return {"data_wait": 53 * MS, "forward": 15 * MS, "backward": 25 * MS, "optimizer": 5 * MS, "callbacks": MS,
                "other": MS}  # fmt: skip

    make_run(directory / "run", FakeRun(phases=waiting, memory=None, trace=False))
    shown = json.loads(command("show", "run", "--format", "json"))["findings"][0]
    kept = {name: shown[name] for name in ("rule", "severity", "title", "why", "remedies")}
    return json.dumps(kept, indent=2, ensure_ascii=False)


def straggler(directory: Path) -> str:
    """The verdict about a slow rank."""
    make_many_ranks(directory / "run", 72, straggler=5)
    return command("show", "run").partition("\n\n")[0]


def comparison(directory: Path) -> str:
    """The first page of a comparison, with a broken limit."""

    def slower(rank: int, step: int) -> dict[str, int]:
        jitter = 1 + (step % 5) * 0.01
        return {"data_wait": 400_000, "forward": int(9 * MS * jitter), "backward": int(16 * MS * jitter),
                "optimizer": 1_200_000, "callbacks": 100_000, "other": 500_000}  # fmt: skip

    make_run(directory / "runs/before")
    make_run(directory / "runs/after", FakeRun(phases=slower))
    return command("compare", "runs/before", "runs/after", "--fail-on", "step_ns>10%")


def autopsy(directory: Path) -> str:
    """The report of a device that ran out of memory."""
    event: dict[str, Any] = {
        "number": 0, "memory": "device", "device": "cuda:0", "rank": 0, "stage": "fit", "seen": "observer",
        "ended_run": True, "exception": "OutOfMemoryError: CUDA out of memory.", "step": 412, "global_step": 412,
        "epoch": 1, "phase": "forward", "function": None, "point": "after_forward", "window": None,
        "module": "blocks.3.mlp", "module_class": "MLP", "asked_bytes": 5 * GIB, "asked_source": "allocator",
        "limit_bytes": 80 * GIB, "total_bytes": 80 * GIB, "free_bytes": GIB,
        "statistics": {"allocated_bytes.all.current": 78 * GIB, "reserved_bytes.all.current": 79 * GIB},
        "held": {"parameter_bytes": 4 * GIB, "gradient_bytes": 4 * GIB}, "snapshot": "cuda_oom_rank_0.pickle",
        "stack": [["model.py", 33, "forward"]], "unavailable": {},
        "forwards": {"sources": [["model.py", 30, 40]], "modules": {"": ["Net", None], "mlp": ["MLP", 0]}},
        "tensors": [],
    }  # fmt: skip
    run = make_run(directory, FakeRun(device_bytes=lambda _: GIB, endings={0: "OutOfMemoryError: CUDA out of memory."}))
    sink = Sink(RunPlace(directory, 1), 0)
    sink.manifest.append("oom", **event)
    sink.close()
    (run / "oom.rank00000.json").write_text(json.dumps({"events": [event]}))
    size = 70 * GIB
    block = {"address": 1 << 40, "size": size, "requested_size": size, "state": "active_allocated",
             "frames": [{"filename": "model.py", "line": 33, "name": "forward"}]}  # fmt: skip
    segment = {"device": 0, "address": 1 << 40, "total_size": size, "allocated_size": size, "active_size": size,
               "stream": 0, "segment_type": "large", "blocks": [block]}  # fmt: skip
    snapshot = {"segments": [segment], "device_traces": [[]]}
    (run / "cuda_oom_rank_0.pickle").write_bytes(pickle.dumps(snapshot, protocol=4))
    file = io.StringIO()
    print_autopsy(load_run(run).directory.relative_to(directory), 0, file)
    return file.getvalue().strip("\n")


# Page, language of the block, the first of its kind on the page.
OUTPUTS: Final[dict[str, tuple[str, Callable[[Path], str]]]] = {
    "reference/findings/index.md": ("json", finding),
    "guides/multi-node.md": ("text", straggler),
    "guides/compare.md": ("text", comparison),
    "guides/out-of-memory.md": ("text", autopsy),
}


def block_of(page: str) -> re.Match[str]:
    """Give the page's block of sample output; its group 1 is the output."""
    language = OUTPUTS[page][0]
    found = re.search(rf"```{language}\n(.*?)\n```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    if found is None:
        raise ValueError(f"{page} has no block of {language}")
    return found


def rewrite() -> None:
    """Write the outputs into their pages."""
    for page, (_, produce) in OUTPUTS.items():
        with produced() as directory:
            output = produce(directory.resolve()).rstrip("\n")
        block = block_of(page)
        text = (DOCS / page).read_text(encoding="utf-8")
        (DOCS / page).write_text(text[: block.start(1)] + output + text[block.end(1) :], encoding="utf-8")


if __name__ == "__main__":
    rewrite()
