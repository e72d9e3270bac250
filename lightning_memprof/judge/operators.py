"""Remedies that fit what a module or a line of the program computes."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from lightning_memprof.account.ledger.modules import EXPLAINS, Heaviest, compiled_paths, path_parts
from lightning_memprof.account.steps.lines import Spot
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.read.run.model import Rank


class Family(NamedTuple):
    """Work that has a remedy: the innermost operators that do it, or the functions of libraries."""

    remedy: Remedy
    operators: str = ""
    functions: tuple[str, ...] = ()

    def matches(self, operator: str | None) -> bool:
        """Return whether an operator, or work of a usual name, is of this family."""
        return bool(self.operators) and re.match(self.operators, operator or "") is not None


DECOMPOSES: Final = Family(
    do.DECOMPOSE_LESS,
    r"aten::\w*(?:linalg(?!_vector_norm)|svd|eigh?\b|cholesky|inverse|geqrf|orgqr|qr\b|lu_|triangular_solve|matrix_exp)",
)
FAMILIES: Final = (
    DECOMPOSES,
    Family(do.SORT_LESS, r"aten::_?(?:sort|argsort|msort|topk|kthvalue|median|nanmedian|mode|unique\w*|quantile)\b"),
    Family(
        do.COPY_LESS,
        r"aten::(?:copy_|cat|_cat|stack|clone|_to_copy|index_select|repeat|repeat_interleave|roll|flip)\Z",
        functions=("deepcopy", "state_dict"),
    ),
    Family(do.FUSED_ATTENTION, "attention without"),
    Family(
        do.KEEP_ITERATOR,
        functions=(
            "DataLoader.__iter__",
            "_BaseDataLoaderIter.__init__",
            "_BaseDataLoaderIter.__next__",
            "RandomSampler.__iter__",
        ),
    ),
    Family(
        do.WRITE_LESS,
        functions=("dump", "dumps", "save", "savez", "savetxt", "savefig", "to_csv", "to_json", "to_parquet"),
    ),
)
# channels_last is a layout of images.
SIGNALS: Final = "aten::conv1d"
IMAGES: Final = frozenset({"aten::conv2d", "aten::conv3d"})
# Fusing leaves its arithmetic as it is, and its kernels are those of a library.
ARITHMETIC: Final = frozenset({"matrix multiplication", "convolution", "attention", "recurrent layers"})
# What torch runs on a CPU where no library has the operator: a loop over the samples, with a copy of each.
FALLBACK: Final = re.compile(r"aten::_?(?:slow_conv|thnn_conv)")


def spot_remedies(spot: Spot) -> tuple[Remedy, ...]:
    """Return the remedy that fits a wait, or the function of a library that a line calls; empty where none does."""
    if spot.waits:
        return (do.WAIT_OUTSIDE.filled(owner=spot.function),)
    names = {name for each in (spot.called, spot.inside) if each for name in (each, each.rpartition(".")[2])}
    found = (family.remedy for family in FAMILIES if names & {*family.functions})
    return tuple(remedy.filled(owner=spot.function) for remedy in found)[:1]


def fitting(operator: str, spot: Spot | None) -> tuple[Remedy, ...]:
    """Return the remedies that fit an operator, and the line of the program with most of the time."""
    family = [family.remedy for family in FAMILIES if family.matches(operator)][:1]
    found = tuple(dict.fromkeys((*(spot_remedies(spot) if spot else ()), *family)))
    return found or ((do.WORK_LESS.filled(owner=spot.function),) if spot and spot.is_helper else ())


def faster(heaviest: Heaviest, rank: Rank) -> tuple[Remedy, ...]:
    """Return what makes the operators of a module faster on this run's device."""
    precision = (rank.training.precision if rank.training else None) or "32-true"
    found = path_parts(heaviest.module)
    overlaps = any(all(a == b for a, b in zip(found, place, strict=False)) for place in compiled_paths(rank))
    compiled = () if overlaps else (do.COMPILE.filled(module=heaviest.module),)
    lower = (do.BFLOAT16,) if precision == "32-true" else ()
    return faster_by(heaviest, lower, compiled, is_cpu=rank.facts.is_cpu)


def faster_by(
    heaviest: Heaviest, lower: tuple[Remedy, ...], compiled: tuple[Remedy, ...], *, is_cpu: bool
) -> tuple[Remedy, ...]:
    """Return what makes the operators of a module faster, the best first.

    On a CPU, bfloat16 is slower without units for it.

    Args:
        heaviest: the module.
        lower: how to compute in fewer bits, where that is possible.
        compiled: how to compile it, where it is not compiled.
        is_cpu: whether it runs on a CPU.
    """
    less = (do.LESS_WORK.filled(module=heaviest.module, family=heaviest.family),) if is_cpu else ()
    lower = () if is_cpu else lower
    if heaviest.family == "convolution" and not (SIGNALS in heaviest.operators and not IMAGES & heaviest.operators):
        library = (do.WITH_LIBRARY,) if is_cpu and any(map(FALLBACK.match, heaviest.operators)) else ()
        return (*library, *less, *lower, do.CHANNELS_LAST)
    if heaviest.family in ARITHMETIC and heaviest.family_ns >= EXPLAINS * heaviest.ns:
        return (*less, *lower, *compiled)
    return (*compiled, *lower)
