"""Whether the page of a training names what keeps its memory: twelve seeded leaks, and twenty healthy trainings.

    python tests/programs/leaks.py [--only NAME ...] [--directory DIRECTORY]

Each training (``tests/support/seeded_leaks.py``, ``healthy_growth.py``) is a process with the callback's defaults,
whose recording is then opened. The chain and the line of a leak must be in the sentence of the finding; a healthy
training must have no finding about growth. Where objgraph is installed, its chain from a module to a leaked object
must contain the same holder; of the cycle that is torch's graph of the garbage. Without ``--only`` the result is
written to ``docs/measured/leaks.md``.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger
from torch.utils.viz._cycles import create_graph

import seeded_leaks
from healthy_growth import HEALTHY
from lightning_memprof import MemProfilerCallback, load_run
from lightning_memprof.units import format_bytes
from measured import table, write_fragment
from seeded_leaks import LEAKS, Leak, arguments

PLACE: Final = Path(seeded_leaks.__file__)
SOURCE: Final = PLACE.read_text(encoding="utf-8").splitlines()
GROWTH: Final = frozenset({"memory_growth", "worker_memory", "validation_memory"})
CPP: Final = "C++ holder"
OBJGRAPH: Final = "objgraph"
# Of a holder's words, those that are no name in the program.
WORDS: Final = frozenset({"closure", "cycle", "forward", "hook", "locals", "lru_cache", "of", "reference", "variable"})
ORACLE: Final = "oracle: "
OUTPUT: Final = "output.txt"


@dataclass(frozen=True)
class Row:
    """What the page of a training says; ``oracle`` is whether the oracle names the same holder, None without one."""

    name: str
    chain: bool
    line: bool
    first: bool
    growth: int | None
    oracle: bool | None
    title: str

    @property
    def right(self) -> bool:
        return self.chain and self.line


def train(name: str, directory: Path) -> None:
    """Train; print what an oracle finds about a leak."""
    leak = LEAKS.get(name)
    if leak is not None:
        model, data, options = arguments(leak, directory)
    else:
        healthy = HEALTHY[name]
        model, data, options = healthy.model(), healthy.data(directory), healthy.options(directory)
    quiet = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "enable_progress_bar": False, "logger": True}
    options = {**quiet, "default_root_dir": directory, **options}
    if options["logger"] is True:
        options["logger"] = CSVLogger(directory)
    callbacks = [*options.pop("callbacks", ()), MemProfilerCallback()]
    trainer = pl.Trainer(callbacks=callbacks, **options)
    trainer.fit(model, data)
    if leak is not None:
        print(ORACLE + " ".join(oracle(name, leak, model, trainer)))


def oracle(name: str, leak: Leak, model: pl.LightningModule, trainer: pl.Trainer) -> Iterator[str]:
    """Yield the names in the chain from a module to a leaked object, or in the garbage."""
    if name == "reference cycle":
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        yield from (node.label.split("\n")[0] for node in create_graph(gc.garbage, context=lambda _: None))
    elif leak.leaked is not None and importlib.util.find_spec(OBJGRAPH):
        objgraph = importlib.import_module(OBJGRAPH)
        # It does not see the variables of running functions.
        vars(seeded_leaks)["trainer"] = trainer
        chain = objgraph.find_backref_chain(leak.leaked(model, trainer), objgraph.is_proper_module)
        for owner, held in zip(chain, [*chain[1:], None], strict=True):
            yield from names(owner, held)


def names(owner: Any, held: Any) -> Iterator[str]:
    """Yield the name of an object and those of its reference."""
    if isinstance(owner, ModuleType):
        yield owner.__name__
    elif isinstance(owner, dict):
        yield from (str(key) for key, value in owner.items() if value is held)
    elif isinstance(owner, FunctionType):
        yield from (owner.__qualname__, *owner.__code__.co_freevars)
    else:
        yield owner.__qualname__ if isinstance(owner, type) else type(owner).__qualname__


def judged(name: str, directory: Path) -> Row:
    """Train in a process, and compare its page with what is expected."""
    output = directory / OUTPUT
    if not output.exists():
        directory.mkdir(parents=True)
        command = [sys.executable, __file__, "--train", name, "--directory", str(directory)]
        # One thread: where others use the cores, threads that wait for each other take minutes.
        started = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=started, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name}: exit code {done.returncode}\n{done.stderr[-3000:]}")
        output.write_text(done.stdout, encoding="utf-8")
    (place,) = directory.rglob("memprofiler")
    run = load_run(place)
    document = run.document()
    found = next((finding for finding in run.findings() if finding.rule in GROWTH), None)
    sentence = found.title if found is not None else ""
    # A title has no room for the line of a long chain.
    words = f"{found.title} {found.why} {found.next}" if found is not None else ""
    growth = found.numbers.get("bytes") if found is not None else None
    if name in HEALTHY:
        is_silent = found is None and document.section("holders") is None
        return Row(name, is_silent, is_silent, document.rule not in GROWTH, growth, None, sentence)
    leak = LEAKS[name]
    line = f"{PLACE.parent.name}/{PLACE.name}:{marked(name)}" if name != CPP else ""
    wanted = [word for word in re.findall(r"\w+", leak.holder) if word not in WORDS]
    lines = output.read_text(encoding="utf-8").splitlines()
    said = next((text.removeprefix(ORACLE) for text in lines if text.startswith(ORACLE)), "")
    agrees = set(wanted) <= set(re.findall(r"\w+", said)) if said else None
    return Row(
        name, leak.holder in words, line in words, document.rule in GROWTH, growth, agrees, sentence
    )  # fmt: skip


def marked(name: str) -> int:
    """Return the number of the line with the mark of a leak."""
    (number,) = (number for number, line in enumerate(SOURCE, 1) if line.endswith(f"# leak: {name}"))
    return number


def fragment(rows: Sequence[Row]) -> str:
    """Return the tables of all trainings."""
    leaks, healthy = ([row for row in rows if row.name in group] for group in (LEAKS, HEALTHY))
    asked = [row for row in leaks if row.oracle is not None]
    words = {True: "yes", False: "**no**", None: "-"}
    right, silent = sum(row.right for row in leaks), sum(row.right for row in healthy)
    counts = [
        ["leaks whose holder and line are named", f"{right} of {len(leaks)}", f"11 of {len(LEAKS)}"],
        ["of these the verdict of the page", f"{sum(row.right and row.first for row in leaks)} of {right}", ""],
        ["leaks of which objgraph, or torch's graph of the garbage, names the same holder",
         f"{sum(bool(row.oracle) for row in asked)} of {len(asked)}", ""],
        ["healthy trainings without a report", f"{silent} of {len(healthy)}", f"{len(HEALTHY)} of {len(HEALTHY)}"],
    ]  # fmt: skip
    found = [
        [row.name, LEAKS[row.name].model.__name__, words[row.chain], words[row.line] if row.name != CPP else "-",
         words[row.oracle], format_bytes(row.growth) if row.growth else "-", row.title]
        for row in leaks
    ]  # fmt: skip
    heading = ["leak", "model", "holder", "line", "oracle", "growth", "sentence of the page"]
    return "\n\n".join(
        [
            table(["", "measured", "target"], counts),
            table(heading, found),
            table(["healthy training", "reported"], [[row.name, row.title or "nothing"] for row in healthy]),
        ]
    )


def main() -> int:
    """Run the trainings and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="nothing is written")
    parser.add_argument("--directory", type=Path, help="for the recordings; those in it are not made again")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no further training after these")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.directory)
        return 0
    rows: list[Row] = []
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="leaks-") as made, ThreadPoolExecutor(options.parallel) as pool:

        def result(name: str) -> Row | None:
            directory = (options.directory or Path(made)) / re.sub(r"\W+", "-", name)
            return judged(name, directory) if time.monotonic() < end or (directory / OUTPUT).exists() else None

        for row in pool.map(result, options.only or [*LEAKS, *HEALTHY]):
            if row is None:
                continue
            rows.append(row)
            oracle = "" if row.oracle is None else f" (oracle: {row.oracle})"
            print(f"{'right' if row.right else 'WRONG'} {row.name}{oracle}: {row.title or 'no growth'}", flush=True)
    print(f"{sum(row.right for row in rows)} of {len(rows)} right")
    if not options.only:
        write_fragment("leaks", f"python {os.path.relpath(__file__)}", fragment(rows), packages=(OBJGRAPH,))
    return int(not all(row.right for row in rows))


if __name__ == "__main__":
    sys.exit(main())
