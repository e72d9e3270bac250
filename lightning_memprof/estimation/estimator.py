"""Estimates of a program's training, or of a model in Python: the device, the changes, the largest batch."""

from __future__ import annotations

import functools
import io
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from msgspec.structs import replace

from lightning_memprof.account import estimate as model
from lightning_memprof.account.estimate import Alternative
from lightning_memprof.capture.observe import Link, wrapped
from lightning_memprof.compare.batches import largest_fitting
from lightning_memprof.errors import MemprofError
from lightning_memprof.estimation.changes import Change, combined, parse_change
from lightning_memprof.estimation.construction import LargeOnMeta
from lightning_memprof.estimation.program import require_program, run_program
from lightning_memprof.estimation.program_lines import failure_line, user_line
from lightning_memprof.estimation.ranks import ranks_of
from lightning_memprof.estimation.simulation import Variation, simulate
from lightning_memprof.estimation.trainer import Fit
from lightning_memprof.estimation.wanted import Wanted
from lightning_memprof.packages import lightning_class
from lightning_memprof.report.document import Document
from lightning_memprof.units import format_bytes

# torch's message about a tensor of LargeOnMeta.
_NO_DATA: Final = "Cannot copy out of meta tensor"
_MOST_SAMPLES: Final = 1 << 20
# The exit code of a program that refuses its arguments.
_USAGE: Final = 2
_DATA: Final = ("train_dataloaders", "val_dataloaders", "datamodule")
# The program gets a Trainer that needs no device; the simulation makes its own from the same arguments.
_HARMLESS: Final = {
    "accelerator": "cpu",
    "devices": 1,
    "num_nodes": 1,
    "strategy": "auto",
    "precision": None,
    "plugins": None,
    "profiler": None,
}


class Estimate(model.Estimate, frozen=True, kw_only=True):
    """The memory of a training run on one device, and its document.

    In a notebook it is displayed as the HTML page.
    """

    def document(self) -> Document:
        """Return the estimate as data: sections, tables and figures, whose values have units."""
        from lightning_memprof.report.sections.estimate import estimate_document

        return estimate_document(self)

    def __str__(self) -> str:
        from lightning_memprof.report.printers.terminal import print_document

        page = io.StringIO()
        print_document(self.document(), page)
        return page.getvalue()

    def __repr__(self) -> str:
        return f"Estimate({self.program!r}: {self.fit}, {format_bytes(self.reserved.likely_bytes)} reserved)"

    def _repr_html_(self) -> str:
        from lightning_memprof.report.charts.steps import live_chart
        from lightning_memprof.report.printers.html import framed, render_document

        return framed(render_document(self.document(), [live_chart(self.live)]))


def estimate_program(program: Sequence[str], wanted: Wanted) -> Estimate:
    """Run a program up to its first ``Trainer.fit``, and estimate that.

    Raises:
        MemprofError: the program has no fit, or its training cannot run without data.
    """
    require_program(program)
    found: list[Estimate] = []
    wanted.progress("the program, up to its Trainer.fit", 0, 0)
    _run_to_fit(program, lambda fit: found.append(replace(_estimate(fit, wanted), called_at=fit.called_at)))
    return replace(found[0], is_program=True)


def estimate(
    model: LightningModule,
    train_dataloaders: Any = None,
    datamodule: LightningDataModule | None = None,
    *,
    trainer: Trainer | None = None,
    **wanted: Any,
) -> Estimate:
    """Estimate the memory of ``trainer.fit(model, ...)`` without running it; the objects stay as they are.

    Args:
        model: what is trained; its tensors may be on ``meta``.
        train_dataloaders: as for ``Trainer.fit``, also a datamodule; one real batch is read for its shapes. None takes
            the model's own.
        datamodule: as for ``Trainer.fit``.
        trainer: precision, accumulation, clipping and callbacks are its own; None is Lightning's default.
        **wanted: ``device``, ``device_memory``, ``batch_size``, ``seq_len``, ``batch_shape``, ``devices``, ``strategy``
            and ``what_if``: see :class:`Wanted`.

    Raises:
        ConfigError: a value is invalid.
        MemprofError: the training cannot run without data.
    """
    if lightning_class(model, "LightningModule") not in {LightningModule, None}:
        raise MemprofError(
            f"estimate: {type(model).__name__} derives from pytorch_lightning, but the simulation runs "
            "lightning.pytorch: derive it from lightning.pytorch.LightningModule, or run lightning-memprof estimate, "
            "which accepts both"
        )
    given = {"train_dataloaders": train_dataloaders, "datamodule": datamodule}
    data = {name: value for name, value in given.items() if value is not None}
    fit = Fit(trainer=_arguments(trainer), model=model, data=data, program=type(model).__name__)
    return _estimate(fit, Wanted(**wanted))


def _arguments(trainer: Trainer | None) -> dict[str, Any]:
    """Return the arguments of a Trainer that decide bytes."""
    if trainer is None:
        return {}
    same = (
        "precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "max_epochs",
        "strategy", "num_nodes",
    )  # fmt: skip
    named = {name: getattr(trainer, name) for name in same}
    return {**named, "callbacks": list(getattr(trainer, "callbacks", ())), "devices": trainer.num_devices}


def _estimate(fit: Fit, wanted: Wanted) -> Estimate:
    lengths = wanted.lengths()
    fit = replace(fit, trainer={**fit.trainer, **wanted.trainer()})
    precision = fit.trainer.get("precision")
    changes = wanted.changes(None if precision is None else str(precision))
    ranks = ranks_of(fit.trainer)
    if ranks.kind and not wanted.what_if:
        changes.append(parse_change("strategy=fsdp2" if ranks.kind == "ddp" else "offload"))
    count = 1 + max(len(lengths) - 1, 0) + len(changes)
    variation = Variation(
        batch_size=wanted.samples(), sequence_length=lengths[0] if lengths else None, shapes=wanted.shapes()
    )
    wanted.progress("the training as it is", 0, count)
    found, variation, alternatives = _worst(fit, wanted, ranks.count, variation)
    if "parameter" in found.host.categories and not wanted.what_if:
        changes = [change for change in changes if not change.offloaded]
    if wanted.batch_size == "max":
        found = _largest(found, lambda samples: _tried(fit, wanted, replace(variation, batch_size=samples)))
        variation = replace(variation, batch_size=found.batch_size)
    others = [Change(name=f"seq-len={length}", costs="") for length in lengths[1:]]
    varied = [replace(variation, sequence_length=length) for length in lengths[1:]]
    varied += [replace(variation, change=change) for change in changes]
    for done, (change, other) in enumerate(zip([*others, *changes], varied, strict=True), start=1):
        wanted.progress(change.name, done, count)
        alternative = _alternative(fit, change, other, found)
        # Nobody has asked for the usual changes.
        if wanted.what_if or change in others or _saves(alternative, found):
            alternatives.append(alternative)
    helpful = {alternative.change for alternative in alternatives}
    working = [change for change in changes if change.name in helpful]
    if len(working) > 1 and not wanted.what_if and not _any_fits(found, alternatives):
        change = replace(combined(working), name="all of these")
        wanted.progress(change.name, count, count + 1)
        alternatives.append(_alternative(fit, change, replace(variation, change=change), found))
    values = msgspec.structs.asdict(found)
    return Estimate(**{**values, "alternatives": alternatives, "is_largest": wanted.batch_size == "max"})


def _worst(
    fit: Fit, wanted: Wanted, count: int, variation: Variation
) -> tuple[model.Estimate, Variation, list[Alternative]]:
    """Return the estimate of the rank that needs most, its variation, and a row for each of several ranks."""
    numbers = range(count) if wanted.rank == "all" else [int(wanted.rank)]
    varied = [replace(variation, rank=number) for number in numbers]
    found = [simulate(fit, wanted.target(), each) for each in varied]
    worst = max(range(len(found)), key=lambda index: found[index].reserved.likely_bytes)
    if len(found) == 1:
        return found[0], varied[0], []
    rows = [replace(_with_change(each, f"rank={number}"), is_rank=True) for number, each in enumerate(found)]
    assumptions = [f"rank {worst} of {count} needs most, and its figures are shown", *found[worst].assumptions]
    return replace(found[worst], assumptions=assumptions), varied[worst], rows


def _saves(alternative: Alternative, base: model.Estimate) -> bool:
    return alternative.reserved is not None and alternative.reserved.likely_bytes < base.reserved.likely_bytes


def _any_fits(found: model.Estimate, alternatives: Sequence[Alternative]) -> bool:
    others = (other.fit for other in alternatives if not other.is_rank)
    return any(fit in {"fits", "no limit"} for fit in (found.fit, *others))


def _alternative(fit: Fit, change: Change, variation: Variation, base: model.Estimate) -> Alternative:
    if change.batch_divisor > 1:
        if base.batch_size is None or base.batch_size < change.batch_divisor:
            return Alternative(change=change.name, problem=f"cannot divide a batch of {base.batch_size or 0}")
        variation = replace(variation, batch_size=base.batch_size // change.batch_divisor)
    try:
        found = simulate(fit, base.device, variation)
    except MemprofError as error:
        return Alternative(change=change.name, problem=str(error).removeprefix("estimate: "))
    costs = ", ".join(filter(None, (change.costs, found.host.words() if change.offloaded else "")))
    return _with_change(found, change.name, costs)


def _with_change(found: model.Estimate, change: str, costs: str = "") -> Alternative:
    return Alternative(
        change=change, allocated_bytes=found.allocated_bytes, reserved=found.reserved, fit=found.fit, costs=costs
    )


def _tried(fit: Fit, wanted: Wanted, variation: Variation) -> model.Estimate:
    wanted.progress(f"batches of {variation.batch_size}", 0, 0)
    return simulate(fit, wanted.target(), variation, is_checked=True)


def _largest(first: model.Estimate, tried: Callable[[int], model.Estimate]) -> model.Estimate:
    """Return the estimate with the largest batch whose whole band fits: one at the limit may not, or slowly.

    Raises:
        MemprofError: not even one sample fits.
    """
    found: dict[int, model.Estimate] = {}

    def fits(samples: int) -> bool:
        found[samples] = tried(samples)
        # Where the allocator has to release its cache, the band ends at the limit.
        return found[samples].fit == "fits" and found[samples].reserved.high_bytes < (first.device.usable_bytes or 0)

    largest = largest_fitting(fits, first.batch_size or 1, _MOST_SAMPLES)
    if not largest:
        smallest = found[min(found)]
        needed, usable = format_bytes(smallest.reserved.likely_bytes), format_bytes(first.device.usable_bytes or 0)
        alone = f"parameters, gradients and optimizer state alone take {format_bytes(smallest.batchless_bytes)}"
        words = f"not even one sample fits into {first.device.name}, which has {usable} usable"
        raise MemprofError(f"estimate: {words}: it needs {needed}, and {alone}")
    return found[largest]


class _Reached(BaseException):
    """The program called ``fit``, and was used; a BaseException, so that its handlers of errors pass it on.

    Attributes:
        error: what using it raised.
    """

    def __init__(self, error: BaseException | None) -> None:
        super().__init__()
        self.error = error


class _FailedEarlyError(MemprofError):
    """The program raised an exception before ``fit``."""


def _run_to_fit(program: Sequence[str], use: Callable[[Fit], None]) -> None:
    """Run a program; at its first ``Trainer.fit`` call ``use`` instead, and end it.

    Args:
        program: ``[SCRIPT, *ARGS]``, ``["-m", MODULE, *ARGS]``, or ``["fit", *ARGS]`` for a bare ``LightningCLI``.
        use: gets the fit.

    Raises:
        MemprofError: the program is missing, fails, or ends without ``Trainer.fit``.
    """
    try:
        _to_fit(program, use, LargeOnMeta())
    except _FailedEarlyError as failed:
        if not _needs_values(failed):
            raise
        _to_fit(program, use, LargeOnMeta(is_active=False))


def _needs_values(failed: _FailedEarlyError) -> bool:
    """Return whether a program failed because a large tensor has no values: torch's messages name its device."""
    # Within the simulation it is torch's message.
    if _NO_DATA in str(failed):
        return True
    error = failed.__cause__
    while error is not None:
        # Names of files and keys are the program's.
        if not isinstance(error, (OSError, LookupError)) and re.search(r"\bmeta\b", str(error), re.IGNORECASE):
            return True
        error = error.__cause__ or error.__context__
    return False


def _to_fit(program: Sequence[str], use: Callable[[Fit], None], construction: LargeOnMeta) -> None:
    name = " ".join(program)
    with ExitStack() as undo, construction:

        def reached(fit: Fit) -> None:
            # Within the program: its workers send objects of classes that only its own __main__ has.
            undo.close()
            had_values, construction.is_active = not construction.is_active, False
            error: BaseException | None = None
            try:
                use(fit)
            except BaseException as raised:  # noqa: BLE001 the program must not see it
                error = raised
            if isinstance(error, MemprofError) and _NO_DATA in str(error) and not had_values:
                error = _FailedEarlyError(str(error))
            raise _Reached(error)

        undo.enter_context(_watched(name, reached))
        # The Hugging Face hub announces each retry of a download.
        retries = logging.getLogger("huggingface_hub.utils._http")
        undo.callback(retries.setLevel, retries.level)
        retries.setLevel(logging.ERROR)
        try:
            run_program(program)
        except _Reached as ended:
            if ended.error is not None:
                raise ended.error from ended.error.__cause__
            return
        except SystemExit as stop:
            if stop.code not in {None, 0}:
                advice = "; options of estimate come before the program" if stop.code == _USAGE else ""
                raise MemprofError(
                    f"estimate: {name} ended with exit code {stop.code} before Trainer.fit{advice}"
                ) from stop
        except MemprofError:
            raise
        except Exception as error:
            raise _FailedEarlyError(failure_line(error, f"{name} failed before Trainer.fit")) from error
    raise MemprofError(f"estimate: {name} ended without Trainer.fit: nothing to estimate")


@contextmanager
def _watched(name: str, use: Callable[[Fit], None]) -> Iterator[None]:
    """Give the program Trainers that need no device, and use its call of ``fit``; it runs no other stage."""
    arguments: dict[int, dict[str, Any]] = {}

    def init(link: Link) -> Callable[..., None]:
        # LightningCLI reads the signature.
        @functools.wraps(link.call)
        def construct(trainer: Trainer, **given: Any) -> None:
            arguments[id(trainer)] = given
            link.call(trainer, **{**given, **_HARMLESS})

        return construct

    def fit(_: Link) -> Callable[..., None]:
        def reached(trainer: Trainer, model: LightningModule, *given: Any, **named: Any) -> None:
            data = {**dict(zip(_DATA, given, strict=False)), **named}
            data = {key: value for key, value in data.items() if key in _DATA}
            called_at = Path(user_line().partition(" (in ")[0]).name
            use(Fit(trainer=arguments[id(trainer)], model=model, data=data, program=name, called_at=called_at))

        return reached

    def skipped(_: Link) -> Callable[..., list[Any]]:
        # A program may print a metric, whatever its name.
        return lambda *_args, **_named: [defaultdict(float)]

    with ExitStack() as undo:
        undo.enter_context(wrapped(Trainer, "__init__", init))
        undo.enter_context(wrapped(Trainer, "fit", fit))
        for other in ("validate", "test", "predict"):
            undo.enter_context(wrapped(Trainer, other, skipped))
        yield
