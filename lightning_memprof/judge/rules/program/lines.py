"""Lines of the program that take much of a step, and the remedies that fit what they call."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import msgspec

from lightning_memprof.account.ledger.model import TimeLedger, total
from lightning_memprof.account.parts import Part
from lightning_memprof.account.steps.events import FORWARD
from lightning_memprof.account.steps.lines import MIN_LOOKS, MOSTLY, Spot, lines, source_of, spots
from lightning_memprof.artifacts.series import MODULE_CALL, LineRow
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Finding, Recovery, titled
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import (
    ACCUMULATE_ONCE,
    COPY_LESS,
    DECOMPOSE_LESS,
    DRAW_FEWER,
    FUSED_ATTENTION,
    FUSED_MODULE,
    KEEP_ITERATOR,
    LOAD_BOTH,
    MOVE_LESS,
    SORT_LESS,
    WAIT_OUTSIDE,
    WORK_LESS,
    WRITE_LESS,
    Remedy,
)
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_ns, percent

# By the innermost operators of a ledger.
OPERATORS: Final = (
    (DECOMPOSE_LESS, r"\w*(?:linalg|svd|eigh?\b|cholesky|inverse|geqrf|orgqr|qr\b|lu_|triangular_solve|matrix_exp)"),
    (SORT_LESS, r"_?(?:sort|argsort|msort|topk|kthvalue|median|nanmedian|mode|unique\w*|quantile)\b"),
    (DRAW_FEWER, r"(?:normal|uniform|bernoulli|random|exponential|log_normal|geometric|multinomial|randperm)_?\Z"),
    (ACCUMULATE_ONCE, r"_?(?:cumsum|cumprod|cummax|cummin|logcumsumexp)\w*\Z"),
    (MOVE_LESS, r"(?:copy_|cat|_cat|stack|clone|_to_copy|index_select|repeat|repeat_interleave|roll|flip)\Z"),
)
ATTENTION: Final = "attention without"
# By the functions of libraries that a line calls.
CALLED: Final = (
    (KEEP_ITERATOR, ("DataLoader.__iter__", "_BaseDataLoaderIter.__init__", "RandomSampler.__iter__")),
    (LOAD_BOTH, ("_BaseDataLoaderIter.__next__",)),
    (COPY_LESS, ("deepcopy", "state_dict")),
    (WRITE_LESS, ("dump", "dumps", "save", "savez", "savetxt", "savefig", "to_csv", "to_json", "to_parquet")),
)
BACKWARD: Final = ("backward", "manual_backward")
# Modules of torch that compute with one operator, and that programs write themselves under the same name.
FUSED: Final = (
    *("LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "GELU", "SiLU", "Mish"),
)
# Functions that the Trainer and data loaders call by their names.
NAMED: Final = re.compile(
    r"(?:^|\.)(?:on_\w+|\w+_step|configure_\w+|optimizer_\w+|lr_\w+|transfer_\w+|\w*loader\w*|"
    r"backward|forward|setup|__(?:getitem|getitems|iter|next|len)__|step|log\w*)$"
)
# What is done less often or in another way leaves some of its time; of other work nobody knows.
SAVED: Final = (0.5, 0.95)
SAVED_UNKNOWN: Final = (0.0, 0.5)
TRAINING_STEP: Final = (Part.FORWARD, Part.FORWARD_HOOK, Part.SELF_LOG)


class _Cost(msgspec.Struct, frozen=True, kw_only=True):
    """A function of the training step: its longest line, its time per step, and its remedy.

    ``saves`` are the shares of the time that the remedy recovers, ``least`` is the share of the step below which
    nothing is reported, ``asleep`` that of the time in which the thread sleeps.
    """

    line: LineRow
    ns: float
    remedy: Remedy
    saves: tuple[float, float]
    least: float
    asleep: float

    @property
    def function(self) -> str:
        """The function."""
        return self.line.functions[-1]


def costly_line(facts: Facts) -> Finding | None:
    """Find a function of the training step that waits, whose work has a cheaper form, or that only the program knows.

    Recovers 50% to 95% of the time of its lines that call this; of work of which nothing is known, up to half.
    """
    worst = facts.heaviest(lambda ledger: ledger.ns(*TRAINING_STEP))
    if worst is None or not worst[0].facts.is_cpu:
        return None
    rank, ledger = worst
    costs = [cost for cost in _costs(rank, ledger) if cost.ns >= cost.least * ledger.step_ns]
    if not costs:
        return None
    cost = max(costs, key=lambda cost: sum(cost.saves) * cost.ns)
    least, most = cost.saves
    worth = Recovery(unit="ns", min=cost.ns * least, max=cost.ns * most, whole=ledger.step_ns)
    calls = f"; it calls {cost.line.called}" if cost.line.called else ""
    sleeps = f", of which the training thread sleeps {percent(cost.asleep)}" if cost.asleep else ""
    return Finding(
        rule="costly_line",
        owner=cost.function,
        title=titled(
            "{owner} ({place}) {takes} {share}{rank}.",
            owner=cost.function,
            place=cost.line.place,
            takes="waits" if cost.remedy.id == WAIT_OUTSIDE.id else "takes",
            share=ledger.share_text(cost.ns),
            rank=facts.on_rank(rank),
        ),
        why=f"{format_ns(cost.ns)} of {ledger.length_text}{sleeps}. The longest line: `{source_of(cost.line)}`{calls}.",
        remedies=tuple(dict.fromkeys(each.filled(owner=cost.function) for each in (cost.remedy, WORK_LESS))),
        evidence=facts.pulse_and_trace(rank),
        numbers={
            "rank": rank.rank,
            "function": cost.function,
            "place": cost.line.place,
            "line_ns": round(cost.ns),
            "asleep_share": cost.asleep,
            "duration_ns": round(ledger.step_ns),
        },
        **worth.parts,
    )


def _costs(rank: Rank, ledger: TimeLedger) -> Iterable[_Cost]:
    """Yield the functions of the training step that have a remedy; backward in it is a pass of its own."""
    rows = [row for row in lines(rank, FORWARD["fit"]) if not is_backward(row)]
    scale = ledger.ns(*TRAINING_STEP) / max(sum(row.ns or 0 for row in rows), 1)
    # Inside an operator the thread sleeps until those that compute its other parts are done.
    outside_operators = total(line for line in ledger.of(*TRAINING_STEP) if not line.operator)
    found: dict[tuple[str, str], list[tuple[LineRow, Remedy]]] = {}
    for row in rows:
        if row.functions[-1] != MODULE_CALL and (remedy := _remedy(row)) is not None:
            found.setdefault((row.functions[-1], remedy.id), []).append((row, remedy))
    for alike in found.values():
        times = [row.ns or 0 for row, _ in alike]
        line, remedy = max(alike, key=lambda pair: pair[0].ns or 0)
        ns = scale * sum(times)
        ns = min(ns, outside_operators) if remedy.id == WAIT_OUTSIDE.id else ns
        if sum(row.looks or 0 for row, _ in alike) < MIN_LOOKS:
            continue
        family = _family(ledger, ns) if remedy.id == WORK_LESS.id else remedy
        yield _Cost(
            line=line,
            ns=ns,
            remedy=family or remedy,
            saves=SAVED if family else SAVED_UNKNOWN,
            least=POLICY.verdict if family else POLICY.severe,
            asleep=sum(row.asleep_ns or 0 for row, _ in alike) / max(sum(times), 1),
        )


def _remedy(row: LineRow) -> Remedy | None:
    """Return the remedy of a line: of a wait, of what it calls, or that of a function that only the program calls."""
    if (row.asleep_ns or 0) >= MOSTLY * (row.ns or 1):
        return WAIT_OUTSIDE
    is_helper = len(row.functions) > 1 and MODULE_CALL not in row.functions
    return _called(row.called, row.inside) or (WORK_LESS if is_helper else None)


def _family(ledger: TimeLedger, ns: float) -> Remedy | None:
    """Return the remedy of the family of operators that explains most of a time in the forward, if one does."""
    spent = [
        (sum(line.ns for line in ledger.of(Part.FORWARD) if _is_of(line.operator, matches)), remedy)
        for remedy, matches in OPERATORS
    ]
    most, remedy = max(spent, key=lambda pair: pair[0])
    return remedy if most >= MOSTLY * ns else None


def _is_of(operator: str | None, matches: str) -> bool:
    return operator is not None and re.match(f"aten::{matches}", operator) is not None


def _called(called: str | None, inside: str | None) -> Remedy | None:
    """Return the remedy of the function of a library that a line calls, or of the innermost one."""
    names = {name for each in (called, inside) if each for name in (each, each.rpartition(".")[2])}
    return next((remedy for remedy, functions in CALLED if names & {*functions}), None)


def is_backward(row: LineRow) -> bool:
    """Return whether a line of training_step runs the backward pass, with automatic optimization off."""
    return (row.called or "").rpartition(".")[2] in BACKWARD


def fitting(operator: str, spot: Spot | None) -> tuple[Remedy, ...]:
    """Return the remedies that fit an operator, and the line of the program with most of the time."""
    family = [remedy for remedy, matches in OPERATORS if _is_of(operator, matches)][:1]
    family += [FUSED_ATTENTION] if operator.startswith(ATTENTION) else []
    found = tuple(dict.fromkeys((*((*_by_hand(spot), *of_spot(spot)) if spot else ()), *family)))
    return found or ((WORK_LESS.filled(owner=spot.function),) if spot and spot.is_helper else ())


def _by_hand(spot: Spot) -> tuple[Remedy, ...]:
    """Return the remedy for a module of the program that has the name of one of torch's."""
    name, _, method = spot.function.rpartition(".")
    usual = name.rpartition(".")[2].lower().replace("_", "")
    names = [fused for fused in FUSED if fused.lower() == usual and method == "forward"]
    return tuple(FUSED_MODULE.filled(fused=fused, owner=name) for fused in names)


def of_spot(spot: Spot) -> tuple[Remedy, ...]:
    """Return the remedy that fits a wait, or what a line calls; empty where none does."""
    remedy = WAIT_OUTSIDE if spot.waits else _called(spot.called, spot.inside)
    return () if remedy is None else (remedy.filled(owner=spot.function),)


def of_action(rank: Rank, action: str) -> Spot | None:
    """Return where an action has most of its time, ``Histograms.on_train_batch_end``, in recorded windows."""
    found = lines(rank, action.rpartition(".")[2])
    return next(iter(spots([row for row in found if row.functions[0] == action] or found)), None)


def of_collate(rank: Rank) -> Spot | None:
    """Return where the program makes batches of samples: a function that no hook and no method of a data set is."""
    found = [row for window in rank.windows for row in window.read(LineRow).rows if row.functions]
    return next(iter(spots([row for row in found if not NAMED.search(row.functions[0])])), None)


def of_forward(rank: Rank) -> Spot | None:
    """Return where the forward has most of its time, without the lines that only call modules."""
    found = [row for row in lines(rank, FORWARD.get(rank.facts.stage, "")) if not is_backward(row)]
    return next(iter(spots(found)), None)


def has(spot: Spot, whole: str, around: str = "") -> str:
    """Return the share of a function in a time, to end a sentence.

    Args:
        spot: the function.
        whole: the time, for people: ``the forward``.
        around: a function that the sentence names already.
    """
    if spot.function != around:
        return f"; {spot.text} has {percent(spot.share)} of {whole}{spot.at}"
    return f"; mostly {spot.place}{spot.at}" if spot.place else ""
