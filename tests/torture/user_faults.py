"""What the user's own program does: exceptions at every place of a fit, and what other programs do not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Literal

import data
import fault
import torch
from torch import nn

from lightning_memprof import OutputOptions

DEEP: Final = 180
OVER: Final = {"teardown": "no step runs when the fit is torn down"}


def _raise(cell: fault.Cell) -> None:
    raise data.StrikeError(f"struck at {cell.moment.name}")


def _exception(name: str, says: str, place: fault.Place, **absent: str) -> fault.Fault:
    return fault.Fault(name=f"exception in {name}", says=says, place=place, strike=_raise, absent=absent)


@contextmanager
def _without_handlers(cell: fault.Cell) -> Iterator[None]:
    """Remove the signal handlers that Lightning leaves where a second exception skips its teardown."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ending(then: Literal["on_exception", "finalize", "teardown"], says: str) -> fault.Fault:
    return fault.Fault(
        name=f"exception, and another in {then}",
        says=f"`on_train_batch_end` of a callback raises, and as the run ends {says}",
        place="callback",
        strike=_raise,
        then=then,
        prepare=_without_handlers,
        worlds=(1,),
    )


def _remove_ours(cell: fault.Cell) -> None:
    trainer = cell.notes["trainer"]
    trainer.callbacks = trainer.callbacks[:1]


def _test_too(cell: fault.Cell) -> None:
    cell.notes["trainer"].validate(cell.notes["model"], torch.randn(2, 4, 8), verbose=False)


def _change_directory(cell: fault.Cell) -> None:
    elsewhere = cell.directory / "elsewhere"
    elsewhere.mkdir()
    os.chdir(elsewhere)


@contextmanager
def _back_again(cell: fault.Cell) -> Iterator[None]:
    before = os.getcwd()  # noqa: PTH109 as the program does it
    os.chdir(cell.directory)
    try:
        yield
    finally:
        os.chdir(before)


def _relative(cell: fault.Cell) -> Mapping[str, Any]:
    return {"output": OutputOptions(summary=False, report=False, dirpath=cell.log_dir.name)}


def _refuse(*_: object) -> bool:
    raise data.StrikeError("compared")


def _compare_no_more(cell: fault.Cell) -> None:
    # Not the LightningModule: Lightning itself tests it.
    for kind in (nn.Linear, nn.Sequential):
        kind.__eq__ = _refuse  # type: ignore[method-assign]
        kind.__bool__ = _refuse  # type: ignore[union-attr]


@contextmanager
def _comparing_again(cell: fault.Cell) -> Iterator[None]:
    try:
        yield
    finally:
        for kind in (nn.Linear, nn.Sequential):
            for name in ("__eq__", "__bool__"):
                if vars(kind).get(name) is _refuse:
                    delattr(kind, name)


class _Nested(nn.Module):
    def forward(self, left: int) -> int:
        return left if left == 0 else self(left - 1)


def _dive(cell: fault.Cell) -> None:
    model = cell.notes["model"]
    model.nested = _Nested()
    model.nested(DEEP)
    del model.nested


FAULTS: Final = (
    _exception("training_step", "the model's `training_step` raises", "training_step", **OVER),
    _exception("backward", "the model's `backward` raises, the gradients are there", "backward", **OVER),
    _exception("the optimizer's step", "`optimizer_step` raises after the weights were changed", "optimizer", **OVER),
    _exception("validation", "`validation_step` raises, in the validation after the step", "validation", **OVER),
    _exception("a callback", "`on_train_batch_end` of a callback in front of ours raises; at the end `on_train_end`",
               "callback"),
    _exception("a callback's teardown", "`teardown` of a callback in front of ours raises", "teardown",
               **dict.fromkeys(("before", "warmup", "active", "save"), "`teardown` runs once, at the end")),
    *(
        fault.Fault(
            name=f"exception in a data loader worker ({method})",
            says=f"the worker process, started by {method}, raises for the step's batch",
            place="loader",
            strike=_raise,
            absent=OVER,
            workers=method,
        )
        for method in ("fork", "spawn")
    ),
    _ending("on_exception", "`on_exception` of a callback in front of ours raises"),
    _ending("finalize", "`finalize` of its logger raises"),
    _ending("teardown", "`teardown` of its strategy raises"),
    fault.Fault(
        name="the callback is removed",
        says="the program takes all callbacks but the first one from the Trainer",
        place="callback",
        strike=_remove_ours,
        worlds=(1,),
    ),
    fault.Fault(
        name="another stage inside fit",
        says="`on_train_end` of a callback in front of ours calls `trainer.validate`",
        place="callback",
        strike=_test_too,
        absent=dict.fromkeys(("before", "warmup", "active", "save"), "Lightning itself fails there"),
        worlds=(1,),
    ),
    fault.Fault(
        name="another working directory",
        says="the directory of the results is relative, and the program changes its working directory",
        place="callback",
        strike=_change_directory,
        prepare=_back_again,
        arguments=_relative,
        worlds=(1,),
    ),
    fault.Fault(
        name="modules that cannot be compared",
        says="from now on `__eq__` and `__bool__` of the model's modules raise",
        place="callback",
        strike=_compare_no_more,
        prepare=_comparing_again,
        worlds=(1,),
    ),
    fault.Fault(
        name="deep recursion",
        says=f"`training_step` calls a module inside a module, {DEEP} deep",
        place="training_step",
        strike=_dive,
        absent=OVER,
        worlds=(1,),
    ),
)  # fmt: skip
