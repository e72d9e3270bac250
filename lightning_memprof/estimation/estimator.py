"""Estimates of a program's training, or of a model in Python: the device, the changes, the largest batch."""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from lightning_memprof.analysis import estimate as model
from lightning_memprof.analysis.estimate import Alternative, Device, device_named, device_of, parse_bytes
from lightning_memprof.capture.observe import Link, wrapped
from lightning_memprof.errors import ConfigError, MemprofError
from lightning_memprof.estimation.allocator_settings import environment_settings
from lightning_memprof.estimation.changes import Change, combined, parse_change
from lightning_memprof.estimation.construction import LargeOnMeta
from lightning_memprof.estimation.ranks import ranks_of
from lightning_memprof.estimation.simulation import Variation, failure_line, simulate
from lightning_memprof.estimation.trainer import Fit
from lightning_memprof.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_memprof.report.document import Document

__all__ = ["Estimate", "Wanted", "estimate", "estimate_program"]

_USUAL: Final = ("precision=bf16-mixed", "checkpointing", "accumulate=2", "optimizer=adamw8bit")
_FULL: Final = (None, "32", "32-true")
# torch's message about a tensor of LargeOnMeta.
_NO_DATA: Final = "Cannot copy out of meta tensor"
_MOST_SAMPLES: Final = 1 << 20
_CLI: Final = ("fit",)
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


@dataclass(frozen=True, kw_only=True)
class Estimate(model.Estimate):
    """The memory of a training on one device, and its document.

    In a notebook it is displayed as the HTML page.
    """

    def document(self) -> Document:
        """Return the estimate as data: sections, tables and figures, whose values have units."""
        from lightning_memprof.report.sections.estimate import estimate_document

        return estimate_document(self)

    def _repr_html_(self) -> str:
        from lightning_memprof.report.printers.html import estimate_to_html, framed

        return framed(estimate_to_html(self))


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is asked, in the words of the command line.

    Attributes:
        device: name of the device; None takes this machine's GPU, and otherwise gives no limit.
        device_memory: its memory, as in ``24GiB``.
        batch_size: samples in a batch, ``max`` for as many as fit; None keeps the program's.
        seq_len: tokens in a sample, several as in ``512,1024``; None keeps the program's.
        batch_shape: shapes of the batch's tensors, as in ``8x3x64x64,8``; None keeps the program's.
        devices: GPUs of a machine that train together; None keeps the program's.
        strategy: ``ddp``, ``fsdp``, ``fsdp2``, or another name of Lightning's; None keeps the program's.
        what_if: changes; empty for the usual ones, ``none`` alone for none.
        progress: gets, before each simulation, its name, how many are done, and how many there are; 0 is unknown.

    Raises:
        ConfigError: a value is invalid.

    """

    device: str | None = None
    device_memory: str | None = None
    batch_size: str | int | None = None
    seq_len: str | int | None = None
    batch_shape: str | None = None
    devices: str | int | None = None
    strategy: str | None = None
    what_if: str | Sequence[str] = ()
    progress: Callable[[str, int, int], None] = lambda _name, _done, _total: None

    def __post_init__(self) -> None:
        """Validate the values before the program runs."""
        self.target()
        for arguments in ({}, *(change.trainer for change in self.changes())):
            ranks_of({**self.trainer(), **arguments})
        environment_settings(os.environ)
        if self.batch_size == "max" and self.target().usable_bytes is None:
            raise ConfigError("--batch-size max: needs --device or --device-memory")
        self.samples()
        self.lengths()
        self.shapes()

    def target(self) -> Device:
        """Return the device."""
        if self.device_memory is None:
            return device_named(self.device) if self.device is not None else _here()
        total = parse_bytes("--device-memory", self.device_memory)
        name = self.device or "GPU"
        if name.lower() == "cpu":
            return replace(device_named("cpu"), total_bytes=total, usable_bytes=total, source="--device-memory")
        return device_of(f"{name} with {format_bytes(total)}", total, "--device-memory")

    def changes(self, precision: str | None = None) -> list[Change]:
        """Return the changes; of the usual ones those that change a training of a precision."""
        given = (self.what_if,) if isinstance(self.what_if, str) else self.what_if
        names = given or (_USUAL if precision in _FULL else _USUAL[1:])
        return [] if tuple(names) == ("none",) else [parse_change(name) for name in names]

    def trainer(self) -> dict[str, Any]:
        """Return the arguments of the Trainer that replace the program's."""
        given = {"devices": self.devices, "strategy": self.strategy}
        return {name: value for name, value in given.items() if value is not None}

    def samples(self) -> int | None:
        """Return the samples in a batch; None for the program's, or as many as fit."""
        if self.batch_size is None or self.batch_size == "max":
            return None
        text = str(self.batch_size)
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(f"--batch-size {text}: must be a number of at least 1, or max")
        return int(text)

    def lengths(self) -> list[int]:
        """Return the tokens in a sample, for each estimate; empty for the program's."""
        texts = [] if self.seq_len is None else str(self.seq_len).split(",")
        if not all(text.isdecimal() and int(text) > 0 for text in texts):
            raise ConfigError(f"--seq-len {self.seq_len}: must be one or several numbers, as in 512,1024")
        return [int(text) for text in texts]

    def shapes(self) -> list[list[int]]:
        """Return the shapes of the batch's tensors; empty for the program's."""
        if self.batch_shape is None:
            return []
        found = [shape.split("x") for shape in self.batch_shape.split(",")]
        if not all(length.isdecimal() and int(length) > 0 for shape in found for length in shape):
            raise ConfigError(f"--batch-shape {self.batch_shape}: must be a shape for each tensor, as in 8x3x64x64,8")
        return [[int(length) for length in shape] for shape in found]


def _here() -> Device:
    """Return this machine's first GPU, or an unlimited one."""
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return device_of(properties.name, properties.total_memory, "this machine")
    return replace(device_of("a GPU", 0, "none was named"), total_bytes=None, usable_bytes=None)


def estimate_program(program: Sequence[str], wanted: Wanted) -> Estimate:
    """Run a program up to its first ``Trainer.fit``, and estimate that.

    Raises:
        MemprofError: the program has no fit, or its training cannot run without data.

    """
    found: list[Estimate] = []
    _run_to_fit(program, lambda fit: found.append(_estimate(fit, wanted)))
    return found[0]


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
    given = {"train_dataloaders": train_dataloaders, "datamodule": datamodule}
    data = {name: value for name, value in given.items() if value is not None}
    fit = Fit(trainer=_arguments(trainer), model=model, data=data, program=type(model).__name__)
    return _estimate(fit, Wanted(**wanted))


def _arguments(trainer: Trainer | None) -> dict[str, Any]:
    """Return the arguments of a Trainer that decide bytes."""
    if trainer is None:
        return {}
    return {
        "precision": trainer.precision,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
        "callbacks": list(getattr(trainer, "callbacks", ())),
        "max_epochs": trainer.max_epochs,
        "strategy": trainer.strategy,
        "devices": trainer.num_devices,
        "num_nodes": trainer.num_nodes,
    }


def _estimate(fit: Fit, wanted: Wanted) -> Estimate:
    device, lengths = wanted.target(), wanted.lengths()
    fit = replace(fit, trainer={**fit.trainer, **wanted.trainer()})
    precision = fit.trainer.get("precision")
    changes = wanted.changes(None if precision is None else str(precision))
    if ranks_of(fit.trainer).kind == "ddp" and not wanted.what_if:
        changes.append(parse_change("strategy=fsdp2"))
    count = 1 + max(len(lengths) - 1, 0) + len(changes)
    variation = Variation(
        batch_size=wanted.samples(), sequence_length=lengths[0] if lengths else None, shapes=wanted.shapes()
    )
    wanted.progress("the training as it is", 0, count)
    found = simulate(fit, device, variation)
    if wanted.batch_size == "max":
        found = _largest(found, lambda samples: _tried(fit, wanted, replace(variation, batch_size=samples)))
        variation = replace(variation, batch_size=found.batch_size)
    others = [Change(name=f"seq-len={length}", costs="") for length in lengths[1:]]
    varied = [replace(variation, sequence_length=length) for length in lengths[1:]]
    varied += [replace(variation, change=change) for change in changes]
    alternatives = []
    for done, (change, other) in enumerate(zip([*others, *changes], varied, strict=True), start=1):
        wanted.progress(change.name, done, count)
        alternatives.append(_alternative(fit, change, other, found))
    working = [change for change, other in zip(changes, alternatives[len(others) :], strict=True) if not other.problem]
    if len(working) > 1 and not wanted.what_if and not _any_fits(found, alternatives):
        change = combined(working)
        wanted.progress(change.name, count, count + 1)
        alternatives.append(_alternative(fit, change, replace(variation, change=change), found))
    values = {field.name: getattr(found, field.name) for field in fields(found)}
    return Estimate(**{**values, "alternatives": alternatives, "is_largest": wanted.batch_size == "max"})


def _any_fits(found: model.Estimate, alternatives: Sequence[Alternative]) -> bool:
    return any(fit in {"fits", "no limit"} for fit in (found.fit, *(other.fit for other in alternatives)))


def _alternative(fit: Fit, change: Change, variation: Variation, base: model.Estimate) -> Alternative:
    if change.batch_divisor > 1:
        if base.batch_size is None or base.batch_size < change.batch_divisor:
            return Alternative(change=change.name, problem=f"cannot divide a batch of {base.batch_size or 0}")
        variation = replace(variation, batch_size=base.batch_size // change.batch_divisor)
    try:
        found = simulate(fit, base.device, variation)
    except MemprofError as error:
        return Alternative(change=change.name, problem=str(error).removeprefix("estimate: "))
    return Alternative(
        change=change.name,
        allocated_bytes=found.allocated_bytes,
        reserved=found.reserved,
        fit=found.fit,
        costs=change.costs,
    )


def _tried(fit: Fit, wanted: Wanted, variation: Variation) -> model.Estimate:
    wanted.progress(f"batches of {variation.batch_size}", 0, 0)
    return simulate(fit, wanted.target(), variation)


def _largest(first: model.Estimate, tried: Callable[[int], model.Estimate]) -> model.Estimate:
    """Return the estimate with the largest batch that fits.

    Doubled while it fits, then halved between a size that fits and one that does not.

    Raises:
        MemprofError: not even one sample fits.

    """
    best: model.Estimate | None = None
    smallest = first
    fitting, failing = 0, _MOST_SAMPLES
    samples = first.batch_size or 1
    while failing - fitting > 1:
        found = tried(samples)
        if found.fit == "fits":
            best, fitting = found, samples
        else:
            smallest, failing = found, samples
        samples = fitting * 2 if failing == _MOST_SAMPLES else (fitting + failing) // 2
        samples = min(max(samples, 1), _MOST_SAMPLES - 1)
    if best is None:
        needed, usable = format_bytes(smallest.reserved.likely_bytes), format_bytes(first.device.usable_bytes or 0)
        alone = f"parameters, gradients and optimizer state alone take {format_bytes(smallest.batchless_bytes)}"
        words = f"not even one sample fits into {first.device.name}, which has {usable} usable"
        raise MemprofError(f"estimate: {words}: it needs {needed}, and {alone}")
    return best


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
    except _FailedEarlyError:
        # Code that reads values of a large tensor fails without them: it gets them.
        _to_fit(program, use, LargeOnMeta(is_active=False))


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
        try:
            _run(program)
        except _Reached as ended:
            if ended.error is not None:
                raise ended.error from ended.error.__cause__
            return
        except SystemExit as stop:
            if stop.code not in {None, 0}:
                raise MemprofError(f"estimate: {name} ended with exit code {stop.code} before Trainer.fit") from stop
        except MemprofError:
            raise
        except Exception as error:
            raise _FailedEarlyError(failure_line(error, f"{name} failed before Trainer.fit")) from error
    raise MemprofError(f"estimate: {name} ended without Trainer.fit of lightning.pytorch: nothing to estimate")


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
            use(Fit(trainer=arguments[id(trainer)], model=model, data=data, program=name))

        return reached

    def skipped(_: Link) -> Callable[..., list[Any]]:
        return lambda *_args, **_named: []

    with ExitStack() as undo:
        undo.enter_context(wrapped(Trainer, "__init__", init))
        undo.enter_context(wrapped(Trainer, "fit", fit))
        for other in ("validate", "test", "predict"):
            undo.enter_context(wrapped(Trainer, other, skipped))
        yield


def _run(program: Sequence[str]) -> None:
    argv, path = sys.argv, list(sys.path)
    first, rest = program[0], list(program[1:])
    try:
        if first.startswith("-m"):
            module, rest = (first[2:], rest) if first[2:] else (rest[0] if rest else "", rest[1:])
            if not module:
                raise MemprofError("estimate: -m needs the name of a module")
            sys.argv = [module, *rest]
            sys.path.insert(0, os.getcwd())  # noqa: PTH109 what python -m inserts
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        elif not Path(first).is_file() and first in _CLI:
            from lightning.pytorch.cli import LightningCLI

            sys.argv = ["lightning", first, *rest]
            sys.path.insert(0, os.getcwd())  # noqa: PTH109 configurations name the user's own modules
            LightningCLI(save_config_callback=None)
        elif not Path(first).is_file():
            raise MemprofError(f"estimate: {first}: no such file")
        else:
            sys.argv = [first, *rest]
            sys.path.insert(0, str(Path(first).resolve().parent))
            runpy.run_path(first, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, path
