"""Was the training's outcome its own, is every closed window whole, and is what is torn named?"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_memprof import ArtifactError, load_run
from lightning_memprof.cli.main import main as command
from recorded_rows import read_events, read_series

if TYPE_CHECKING:
    import fault
    import moments

    from lightning_memprof.read.run.model import ArtifactFile, Rank, Run


KILLED = -9
PIDS = re.compile(r"0x[0-9a-f]+|\d+")


@dataclass
class Lived:
    """What the ranks of a cell left: exit codes (None: hung), what they wrote of themselves, and who still ran."""

    directory: Path
    codes: list[int | None]
    outcomes: list[dict[str, Any] | None]
    orphans: list[str]

    @property
    def run_directory(self) -> Path:
        """Where the recording is to be."""
        return self.directory / "log/memprofiler"

    def trail(self, rank: int) -> list[str]:
        """Give the state of the weights after each step, as far as the rank came."""
        path = self.directory / f"trail.rank{rank}"
        return path.read_text().splitlines() if path.exists() else []


@dataclass(frozen=True)
class Healthy:
    """What the first window of each rank has in a fit without a fault: collectors with their kinds of file."""

    files: tuple[frozenset[tuple[str, str]], ...]

    @classmethod
    def of(cls, lived: Lived) -> Healthy:
        """Read it from a fit.

        Raises:
            RuntimeError: that fit did not end well, so that nothing can be judged by it.

        """
        run = load_run(lived.run_directory)
        if set(lived.codes) != {0} or run.problems or run.errors or run.status != "finished":
            found = f"{run.status}, {lived.codes} {run.problems} {run.errors}"
            msg = f"the fit without a fault is not healthy: {lived.directory}: {found}"
            raise RuntimeError(msg)
        return cls(tuple(_files(run, rank.rank, 0) for rank in run.ranks))


@dataclass
class Verdict:
    """What is wrong with a cell, and what was counted in it.

    Attributes:
        red: what broke a promise; empty for a green cell.
        named: what is torn or missing, and is said to be.
        windows: number of closed windows that were read.
        lost: of these, those of which something is gone that cannot be read.
        files: number of files that were read.

    """

    red: list[str] = field(default_factory=list)
    named: list[str] = field(default_factory=list)
    windows: int = 0
    lost: int = 0
    files: int = 0

    def told(self) -> dict[str, Any]:
        """Give it as JSON."""
        return vars(self)


def judge(struck: fault.Fault, moment: moments.Moment, bare: Lived, ours: Lived, healthy: Healthy) -> Verdict:
    """Judge a cell by its bare twin and by what is on the disk."""
    verdict = Verdict()
    excuse = struck.excuse(ours.directory, moment) if struck.excuse else None
    verdict.red += _did_not_strike(struck, bare, ours)
    for rank in range(len(bare.codes)):
        verdict.red += [f"rank {rank}: {text}" for text in _outcome(struck, rank, bare, ours)]
    verdict.red += [f"still running: {text}" for text in set(ours.orphans) - set(bare.orphans)]
    try:
        run = load_run(ours.run_directory)
    except ArtifactError as error:
        (verdict.named if excuse else verdict.red).append(f"no run can be read: {error}")
        return verdict
    errors = [
        f"rank {error.rank}: collector {error.collector} failed on {error.where}: {error.message}"
        for error in run.errors
    ]
    (verdict.named if struck.harms or struck.only_ours or excuse else verdict.red).extend(errors)
    _windows(verdict, run, moment, healthy, excuse)
    page, code = _page(ours.run_directory)
    full, _ = _page(ours.run_directory, "--all")
    if code != 0:
        verdict.red.append(f"`show` ended with {code}: {page[-200:]}")
    _torn(verdict, run, ours, page, full, silences=struck.silences)
    return verdict


def _did_not_strike(struck: fault.Fault, bare: Lived, ours: Lived) -> list[str]:
    red = []
    for lived in (ours,) if struck.only_ours else (bare, ours):
        told = [outcome["error"] for outcome in lived.outcomes if outcome is not None and outcome["error"]]
        if not any(lived.directory.glob("struck.*")) and not told:
            red.append(f"the fault did not strike in {lived.directory.name}")
    return red


def _outcome(struck: fault.Fault, rank: int, bare: Lived, ours: Lived) -> list[str]:
    right, is_ = bare.outcomes[rank], ours.outcomes[rank]
    red = []
    if ours.codes[rank] is None or bare.codes[rank] != ours.codes[rank]:
        red.append(f"exit code {ours.codes[rank]}, bare {bare.codes[rank]}")
    steps, bare_steps = ours.trail(rank), bare.trail(rank)
    # A rank that another one's strike killed may have come a step further, or not.
    if right is None and is_ is None:
        length = min(len(steps), len(bare_steps))
        steps, bare_steps = steps[:length], bare_steps[:length]
    if steps != bare_steps:
        red.append(f"the weights after the steps differ ({len(steps)} steps, bare {len(bare_steps)})")
    if right is None or is_ is None:
        return red if right is is_ else [*red, "lived" if right is None else "died, its bare twin lived"]
    red += [
        f"{key} is {is_[key]!r}, bare {right[key]!r}" for key in ("error", "weights", "after") if is_[key] != right[key]
    ]
    if right["after"] is not None and "ended with" in right["after"]:
        red.append(f"bare: {right['after']}")
    allowed = [PIDS.sub("0", text) for text in right["leaks"]]
    # What cannot be removed stays; the page has to name it.
    ours_left = [leak for leak in is_["leaks"] if not (struck.harms and leak.startswith("file still there:"))]
    return red + [f"left behind: {text}" for text in ours_left if PIDS.sub("0", text) not in allowed]


def _windows(verdict: Verdict, run: Run, moment: moments.Moment, healthy: Healthy, excuse: str | None) -> None:
    if len(run.ranks) < len(healthy.files):
        verdict.red.append(f"{len(run.ranks)} ranks of {len(healthy.files)} can be read")
    for rank in run.ranks:
        closed = [window for window in rank.windows if window.closed]
        if len(closed) < moment.closed:
            verdict.red.append(f"rank {rank.rank}: {len(closed)} windows are closed, {moment.closed} were")
        for window in closed:
            before = window.index < moment.closed
            lost = _lost(verdict, run, rank, window.index, healthy.files[rank.rank] if before else frozenset())
            verdict.windows += 1
            verdict.lost += bool(lost)
            (verdict.named if excuse else verdict.red).extend(lost)


def _lost(verdict: Verdict, run: Run, rank: Rank, window: int, expected: frozenset[tuple[str, str]]) -> list[str]:
    """Return what of a closed window is missing or cannot be read."""
    where = f"rank {rank.rank}, window {window}"
    missing = expected - _files(run, rank.rank, window)
    lost = [f"{where}: no {kind} of {collector}" for collector, kind in sorted(missing)]
    for artifact in run.artifacts:
        if (artifact.rank, artifact.window) == (rank.rank, window):
            verdict.files += 1
            if text := _damage(artifact):
                lost.append(f"{where}: {artifact.path}: {text}")
    return lost


def _files(run: Run, rank: int, window: int) -> frozenset[tuple[str, str]]:
    return frozenset(
        (artifact.collector, artifact.type)
        for artifact in run.artifacts
        if (artifact.rank, artifact.window) == (rank, window)
    )


def _damage(artifact: ArtifactFile) -> str | None:
    if artifact.state != "present":
        return artifact.state
    if hashlib.sha256(artifact.file.read_bytes()).hexdigest() != artifact.sha256:
        return "has other bytes than were listed"
    if artifact.type == "series":
        try:
            return None if read_series(artifact.file) else "has no rows"
        except ArtifactError as error:
            return str(error)
    if artifact.type == "trace":
        try:
            events = sum(1 for _ in read_events(artifact.file))
        except ArtifactError as error:
            return str(error)
        return None if events else "has no events"
    return None


def _page(directory: Path, *options: str) -> tuple[str, int]:
    page = io.StringIO()
    with contextlib.redirect_stdout(page), contextlib.redirect_stderr(page):
        code = command(["show", str(directory), *options])
    return re.sub(r"\s+", " ", page.getvalue()), code


def _torn(verdict: Verdict, run: Run, ours: Lived, page: str, full: str, *, silences: bool) -> None:
    """Each file that is not whole has to be on the full page, their number and each rank's end on the short one."""
    verdict.named += [f"{problem.piece}: {problem.message}" for problem in run.problems]
    said = {problem.piece for problem in run.problems}
    for path in sorted(ours.directory.joinpath("log").rglob("*")):
        unfinished = path.name.endswith((".partial", ".tmp"))
        if unfinished and not any(path.name in piece for piece in said):
            verdict.red.append(f"{path.relative_to(ours.directory)} is unfinished, and `show` does not say so")
    for piece in said:
        if piece.rpartition("/")[2] not in full.replace(" ", "") and piece not in full:
            verdict.red.append(f"`show --all` does not name {piece}")
    count = f"1 of {len(run.problems)}: " if len(run.problems) > 1 else ""
    if run.problems and f"damaged {count}" not in page:
        verdict.red.append(f"`show` does not say that {len(run.problems)} pieces are damaged")
    for rank in run.ranks:
        dead = ours.codes[rank.rank] in (KILLED, None)
        if dead and rank.status != "running or killed":
            verdict.red.append(f"rank {rank.rank} was killed and is called {rank.status}")
        if not dead and rank.status == "running or killed":
            (verdict.named if silences else verdict.red).append(
                f"rank {rank.rank} ended by itself and is called {rank.status}"
            )
        verdict.named += [
            f"rank {rank.rank}: window {window.index} is not closed" for window in rank.windows if not window.closed
        ]
        if rank.status == "running or killed" and not _names_unended(page, rank.rank, run):
            verdict.red.append(f"`show` does not say that rank {rank.rank} was killed")


def _names_unended(page: str, rank: int, run: Run) -> bool:
    """Say whether a page names a rank without an end; where no rank has one, the status of the run says it of all."""
    if re.search(rf"\branks? (\d+, )*{rank}(, \d+)* had not (ended \(running or killed\)|started)", page):
        return True
    alike = all(rank.status == "running or killed" for rank in run.ranks)
    return alike and re.search(r"(?<!\()\b(running or killed|did not start)\b", page) is not None
