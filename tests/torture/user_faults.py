"""What the user's own program does: exceptions at every place of a fit."""

from __future__ import annotations

from typing import Final

import data
import fault

OVER: Final = {"teardown": "no step runs when the fit is torn down"}


def _raise(cell: fault.Cell) -> None:
    raise data.StrikeError(f"struck at {cell.moment.name}")


def _exception(name: str, says: str, place: fault.Place, **absent: str) -> fault.Fault:
    return fault.Fault(name=f"exception in {name}", says=says, place=place, strike=_raise, absent=absent)


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
)  # fmt: skip
