"""One estimate: a fit on the simulated device, in a child process that leaves the program as it was."""

from __future__ import annotations

import contextlib
import io
import logging
import multiprocessing
import os
import pickle  # nosec B403
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, cast

import msgspec
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from msgspec.structs import replace
from torch import nn

from lightning_memprof.account.estimate import Conclusion, Device, Estimate, Host, Reserved
from lightning_memprof.artifacts.own_program import end_with_parent
from lightning_memprof.capture.observe import wrapped
from lightning_memprof.capture.sources.batches import batch_samples
from lightning_memprof.capture.sources.compiled import is_compiled
from lightning_memprof.errors import ConfigError, MemprofError
from lightning_memprof.estimation.allocator_settings import environment_settings
from lightning_memprof.estimation.changes import Change
from lightning_memprof.estimation.construction import batch_tensors, with_tensors
from lightning_memprof.estimation.program_lines import LOOPS, failure_line
from lightning_memprof.estimation.ranks import Ranks, ranks_of
from lightning_memprof.estimation.requests import Band, Demand, Part, StorageLog, demand
from lightning_memprof.estimation.simulated_device import Target
from lightning_memprof.estimation.storages import Assumed, StorageTracer, Values
from lightning_memprof.estimation.trainer import (
    STEPS,
    Ended,
    Fit,
    SimulatedStrategy,
    held_by_callbacks,
    later_needs,
    trainer_options,
)
from lightning_memprof.units import format_count

_POINTS: Final = 300
_PATIENCE_S: Final = 5.0
# A loop that does not end before its bound is the same for every number from 1 on.
_OTHERS: Final = (2, 0)


class _Found(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a simulation in a child process.

    Attributes:
        estimate: the estimate.
        assumed: the places where the program reads values of tensors.
        requests: how many storages were made, and their bytes.
    """

    estimate: Estimate
    assumed: Sequence[Assumed]
    requests: tuple[int, int]


class Variation(msgspec.Struct, frozen=True, kw_only=True):
    """What is changed about the fit.

    Attributes:
        change: what else is changed.
        batch_size: samples in a batch; None keeps the loader's.
        sequence_length: tokens in a sample; None keeps the loader's.
        shapes: of the batch's tensors, in their order; empty keeps the loader's.
        validates: whether validation runs too, where the program has one.
        rank: the rank to simulate.
    """

    change: Change = Change(name="", costs="")
    batch_size: int | None = None
    sequence_length: int | None = None
    shapes: Sequence[Sequence[int]] = ()
    validates: bool = True
    rank: int = 0


def simulate(fit: Fit, device: Device, variation: Variation | None = None, *, is_checked: bool = False) -> Estimate:
    """Return the estimate of a fit; the program's objects stay as they are.

    Args:
        fit: the call.
        device: whose memory limits it.
        variation: what is changed about it.
        is_checked: whether another batch of the fit was estimated: what depends on values is refused there.

    Raises:
        MemprofError: the training cannot run without data, or the platform cannot fork.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        raise MemprofError("estimate: needs a platform that can fork a process, such as Linux")
    variation = variation or Variation()
    # Here, where this machine's GPUs can be counted.
    ranks = _ranks(fit, variation)
    if not is_overridden("validation_step", fit.model, LightningModule):
        variation = replace(variation, validates=False)
    try:
        return _checked(fit, ranks, device, variation, is_checked=is_checked)
    except MemprofError as error:
        if not variation.validates:
            raise
        # Code of a validation may read values, which that of a training run does not need.
        found = _checked(fit, ranks, device, replace(variation, validates=False), is_checked=is_checked)
        reason = str(error).removeprefix("estimate: ")
        return replace(found, assumptions=[*found.assumptions, f"validation is not included: {reason}"])


def _checked(fit: Fit, ranks: Ranks, device: Device, variation: Variation, *, is_checked: bool) -> Estimate:
    def run(values: Values) -> _Found:
        return _in_child(lambda: _simulated(fit, ranks, device, variation, values))

    found = run(Values())
    if found.assumed and not (variation.change.name or is_checked):
        _refuse_dependence(found, run)
    return found.estimate


def _ranks(fit: Fit, variation: Variation) -> Ranks:
    ranks = replace(ranks_of(variation.change.arguments(fit.trainer)), rank=variation.rank)
    if ranks.rank >= ranks.count:
        raise ConfigError(f"--rank {ranks.rank}: the training has {format_count(ranks.count, 'rank')}")
    if "parameters" not in variation.change.offloaded:
        return ranks
    if not ranks.is_sharded:
        raise ConfigError("estimate: offload needs FSDP, as in strategy=fsdp2+offload; offload=activations does not")
    return replace(ranks, is_offloaded=True)


def _refuse_dependence(found: _Found, other: Callable[[Values], _Found]) -> None:
    """Refuse an estimate that another assumed number would change, or of a program that loops until a condition.

    Raises:
        MemprofError: it is.
    """
    numbers = [place for place, is_condition in found.assumed if not is_condition]
    if any(is_condition for _, is_condition in found.assumed):
        _requests(other, Values(condition=True))
    same = {None, found.requests}
    if numbers and any(_requests(other, Values(number=number)) not in same for number in _OTHERS):
        places = " or ".join(numbers)
        words = f"a loop or a shape depends on a value that is read at {places}, which is unknown without data"
        raise MemprofError(f"estimate: {words}; give it a fixed upper bound")


def _requests(run: Callable[[Values], _Found], values: Values) -> tuple[int, int] | None:
    """Return the requests of a simulation; None where the program refuses the values.

    Raises:
        MemprofError: it loops until a value changes.
    """
    try:
        return run(values).requests
    except MemprofError as error:
        if LOOPS in str(error):
            raise
        return None


def _in_child(work: Callable[[], _Found]) -> _Found:
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)

    def run() -> None:
        end_with_parent()
        found, message, trace = None, "", ""
        try:
            # The parent's threads of OpenMP are not here, and work that is split among them would wait forever.
            torch.set_num_threads(1)
            # After a backward of the parent torch has no thread for the device: this thread runs backward itself.
            with _quiet(), _no_gpu(), torch.autograd.set_multithreading_enabled(False):
                found = work()
        except MemprofError as error:
            message = str(error)
        except BaseException as error:  # noqa: BLE001 any failure of the program's code becomes one line
            message, trace = failure_line(error), "".join(traceback.format_exception(error))
        theirs.send_bytes(pickle.dumps((found, message, trace)))
        theirs.close()
        # The program's exit handlers are the parent's.
        os._exit(0)

    child = context.Process(target=run)
    with warnings.catch_warnings():
        # Python 3.12 warns of threads: the child computes nothing, and takes no lock of theirs.
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    theirs.close()
    try:
        result, problem, cause = pickle.loads(mine.recv_bytes())  # noqa: S301 from our own child  # nosec B301
    except EOFError:
        child.join(_PATIENCE_S)
        raise MemprofError(f"estimate: the simulation ended with exit code {child.exitcode}") from None
    finally:
        mine.close()
        # Nothing is waited for: after its answer the child ends at once, and an interrupted one is not needed.
        child.kill()
        child.join()
    if problem:
        raise MemprofError(problem) from (RuntimeError(f"in a child process\n{cause}") if cause else None)
    return cast("_Found", result)


@contextlib.contextmanager
def _quiet() -> Any:
    """Drop what the program prints: it runs again for each estimate."""
    logging.disable(logging.CRITICAL)
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _no_gpu() -> Iterator[None]:
    """Hide this machine's GPUs, which a forked process cannot use, and which nothing without data needs."""
    places = [(torch.cuda, "is_available"), (torch.cuda, "device_count")]
    if hasattr(torch, "accelerator"):
        places.append((torch.accelerator, "is_available"))
    with contextlib.ExitStack() as undo:
        for place, name in places:
            undo.enter_context(wrapped(place, name, lambda _: lambda: 0))
        yield


def _simulated(fit: Fit, ranks: Ranks, device: Device, variation: Variation, values: Values) -> _Found:
    began = time.monotonic()
    target = Target(
        is_gpu=device.name != "CPU",
        workspace_bytes=device.workspace_bytes,
        resident_threads=device.resident_threads,
    )
    change = variation.change
    arguments = change.arguments(fit.trainer)
    strategy = SimulatedStrategy(
        target, ranks, partial(_resized, variation), change.optimizers, values, prepare=change.prepare
    )
    options = trainer_options(arguments, strategy, target, validates=variation.validates)
    try:
        trainer = Trainer(**options)
        callbacks: Sequence[Any] = ()
        try:
            trainer.fit(fit.model, **fit.data)
        except Ended as ended:
            callbacks = ended.callbacks
        log, assumed = strategy.tracer.log, strategy.tracer.assumed
        sentences = ranks.assumptions(units=strategy.units, offloads=strategy.offloads)
        held = list(held_by_callbacks(callbacks, fit.model, target.kind))
    finally:
        strategy.teardown()
    if not any(part.step == STEPS - 1 for part in log.parts):
        raise MemprofError(f"estimate: the training ended before {STEPS} steps")
    estimate = replace(
        _estimate(log, fit, device),
        batch=_shapes(strategy.batch),
        batch_size=_samples(strategy.batch),
        ranks=ranks.count,
        strategy=ranks.name,
        host=_host(strategy.tracer),
        assumptions=[*sentences, *held, *later_needs(arguments), *_assumptions(fit.model, strategy.tracer)],
        seconds=time.monotonic() - began,
    )
    return _Found(estimate=estimate, assumed=list(assumed), requests=(len(log.sizes), sum(log.sizes)))


def _host(tracer: StorageTracer) -> Host:
    categories = tracer.host.by(tracer.host.peak(), "category").most_common()
    # Each step's batch is copied before the step begins, so that the last step lacks one.
    moved = (tracer.moved[STEPS - 2, to_device] for to_device in (True, False))
    return Host({name: count for (name,), count in categories}, *moved)


def _estimate(log: StorageLog, fit: Fit, device: Device) -> Estimate:
    peak = log.peak()
    begun = [part for part in log.parts if part.position <= peak.position]
    part = begun[-1] if begun else Part(0, 0, "setup")
    module_bytes = log.by(peak, "module", "category")
    needed = _demand(log, device)
    return Estimate(
        program=fit.program,
        device=device,
        allocated_bytes=peak.live_bytes,
        reserved=Reserved(*needed.reserved),
        fit=_conclusion(needed, device),
        retries=needed.retries,
        step=part.step,
        part=part.name,
        operator=log.label(peak.numbers[-1], "operator", peak.position) if peak.numbers else "",
        categories={name: count for (name,), count in log.by(peak, "category").most_common()},
        modules=[(module, category, count) for (module, category), count in module_bytes.most_common()],
        dtypes={name.removeprefix("torch."): count for (name,), count in log.by(peak, "dtype").most_common()},
        live=log.curve(next(part.position for part in log.parts if part.step == STEPS - 1), _POINTS),
        parameters=sum(parameter.numel() for parameter in fit.model.parameters()),
        steps=STEPS,
    )


def _assumptions(model: nn.Module, tracer: StorageTracer) -> Iterator[str]:
    if is_compiled(model):
        yield "torch.compile is ignored; a compiled model often needs less memory"
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        yield "cuDNN's buffers for RNNs are not included"
    for place in tracer.metrics:
        yield f"{place}: shapes in a metric depend on values; all rows, or the number of classes, were assumed"
    for place, is_condition in tracer.assumed:
        value = "False" if is_condition else "1"
        kind = "a condition" if is_condition else "a number"
        yield f"{place}: {kind} is read from a tensor; {value} was assumed"


def _demand(log: StorageLog, device: Device) -> Demand:
    if device.name == "CPU":
        peak, limit = log.peak().live_bytes, device.usable_bytes
        return Demand(Band(peak, peak, peak), retries=0, fits=limit is None or peak <= limit)
    settings = environment_settings(os.environ)
    return demand(log.requests, settings, workspaces=log.optional, capacities=device.capacities)


def _conclusion(found: Demand, device: Device) -> Conclusion:
    if device.usable_bytes is None:
        return "no limit"
    return "too close to call" if found.fits is None else "fits" if found.fits else "does not fit"


def _shapes(batch: Any) -> list[str]:
    return [
        f"{'x'.join(map(str, tensor.shape)) or 'scalar'} {str(tensor.dtype).removeprefix('torch.')}"
        for tensor in batch_tensors(batch)
    ]


def _samples(batch: Any) -> int | None:
    """Return the samples in a batch; None where its tensors do not say."""
    return batch_samples(batch) or batch_samples(batch_tensors(batch))


def _resized(variation: Variation, trained: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Return the batches with other shapes, without their values.

    Args:
        variation: has the number of samples of the first batch; that of the others keeps its ratio to it.
        trained: the batches of the training, one of each loader.
        others: those of the validation.

    Raises:
        ConfigError: the batches have other tensors than the variation has shapes, or no samples or tokens to change.
    """
    if variation.shapes:
        return [*_reshaped(list(trained), variation.shapes), *others]
    samples, tokens = _samples(trained[0]), _tokens(trained[0])
    if variation.batch_size is not None and samples is None:
        raise ConfigError(f"--batch-size {variation.batch_size}: the batch has no tensor with a dimension")
    if variation.sequence_length is not None and tokens is None:
        raise ConfigError(
            f"--seq-len {variation.sequence_length}: the batch has no tensor of integers, samples x tokens"
        )
    lengths = {} if variation.sequence_length is None else {tokens: variation.sequence_length}
    ratio = 1.0 if variation.batch_size is None or samples is None else variation.batch_size / samples

    def resized(tensor: torch.Tensor, samples: int | None) -> torch.Tensor:
        shape = list(tensor.shape)
        if samples is not None and shape and shape[0] == samples:
            shape[0] = max(round(samples * ratio), 1)
        # Masks have tokens twice; vectors may have as many features as there are tokens.
        last = 2 if tensor.is_floating_point() else len(shape)
        shape[1:last] = [lengths.get(length, length) for length in shape[1:last]]
        return torch.empty(shape, dtype=tensor.dtype, device="meta") if shape != list(tensor.shape) else tensor

    return [with_tensors(batch, partial(resized, samples=_samples(batch))) for batch in (*trained, *others)]


def _tokens(batch: Any) -> int | None:
    """Return the second dimension of the first tensor of integers that has one."""
    found = (tensor for tensor in batch_tensors(batch) if tensor.ndim > 1 and not tensor.is_floating_point())
    return next((tensor.shape[1] for tensor in found), None)


def _reshaped(batch: Any, shapes: Sequence[Sequence[int]]) -> Any:
    count = len(batch_tensors(batch))
    if count != len(shapes):
        given = f"{format_count(len(shapes), 'shape')} for a batch of {format_count(count, 'tensor')}"
        raise ConfigError(f"--batch-shape: {given}: {', '.join(_shapes(batch))}")
    remaining = iter(shapes)
    return with_tensors(batch, lambda tensor: torch.empty(tuple(next(remaining)), dtype=tensor.dtype, device="meta"))
