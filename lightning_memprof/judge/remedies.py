"""The remedies: what to do, to which programs it applies, and how ``lightning-memprof try`` applies it."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec.structs import replace


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """A next step.

    Attributes:
        id: stable, unlike the text.
        text: one action that a person can type or paste; with the fields of :meth:`filled`.
        needs: what has to hold of the program.
        change: the argument of ``try --remedy`` that applies it (``workers={workers}``), empty where nothing can.
    """

    id: str
    text: str
    needs: frozenset[str] = frozenset()
    change: str = ""

    def filled(self, **values: Any) -> Remedy:
        """Return the remedy with values in its text and its change."""
        return replace(self, text=self.text.format(**values), change=self.change.format(**values))


# Loading

# Callbacks, hooks, validation, checkpoints, logging

LESS_OFTEN: Final = Remedy(
    id="less_often",
    text="Do the work of {owner} every N batches, in on_train_epoch_end, or in a thread.",
    change="rare_callback={object}",
)
IN_WORKERS: Final = Remedy(
    id="in_workers", text="Do the work of {owner} in worker processes: in collate_fn or the data set."
)
REMOVE_HOOK: Final = Remedy(
    id="remove_hook",
    text="Remove the hook {owner}: call remove() of the handle that its registration returned.",
)
SKIP_HOOK: Final = Remedy(id="skip_hook", text="Do the work of {owner} every N batches: return at once in the others.")
DYNAMIC_SHAPES: Final = Remedy(
    id="dynamic_shapes",
    text="Compile for all shapes: dynamic=True in torch.compile, or torch._dynamo.mark_dynamic(tensor, dimension).",
)
FEW_SHAPES: Final = Remedy(
    id="few_shapes", text="Let few shapes occur: pad to a multiple of 64, or group samples of similar length."
)
LOG_RECOMPILES: Final = Remedy(
    id="log_recompiles", text="See what changes: set TORCH_LOGS=recompiles in the environment."
)
METRIC_PER_EPOCH: Final = Remedy(
    id="metric_per_epoch",
    text="Compute metrics once per epoch: call update() in the steps and {object}.compute() in on_train_epoch_end.",
)
METRIC_OF_SUMS: Final = Remedy(
    id="metric_of_sums",
    text="Choose a metric that keeps sums instead of all predictions, such as thresholds=100 for curves.",
)
VALIDATE_LESS_OFTEN: Final = Remedy(
    id="validate_less_often",
    text="Validate once per epoch, Trainer(val_check_interval=1.0), or less often, with check_val_every_n_epoch=5.",
)
VALIDATE_ON_LESS: Final = Remedy(id="validate_on_less", text="Validate on less data: Trainer(limit_val_batches=50).")
SAVE_LESS_OFTEN: Final = Remedy(
    id="save_less_often",
    text="Save less often: ModelCheckpoint(every_n_train_steps=1000) or (train_time_interval=timedelta(minutes=30)).",
)
SAVE_LESS: Final = Remedy(
    id="save_less", text="Save less: ModelCheckpoint(save_weights_only=True, save_top_k=1, save_last=False)."
)
SAVE_ASYNC: Final = Remedy(
    id="save_async",
    text="Save in the background: Trainer(plugins=[AsyncCheckpointIO()]) from lightning.pytorch.plugins.io.",
)
LOG_LESS_OFTEN: Final = Remedy(
    id="log_less_often",
    text="Log less often: Trainer(log_every_n_steps=50), self.log(name, value, on_step=False, on_epoch=True).",
    change="log_every=50",
)
LOG_AT_ONCE: Final = Remedy(
    id="log_at_once",
    text="Log several values at once, as epoch means: self.log_dict(values, on_step=False, on_epoch=True).",
)
LOG_CHEAPLY: Final = Remedy(
    id="log_cheaply",
    text="Let {owner} append to its file, or write in a thread, and log no images, histograms or gradients.",
)
CODE_AROUND_BATCHES: Final = Remedy(
    id="code_around_batches",
    text="Look at the code around the batches: a loop of your own, metrics, self.log with many values.",
)
LOG_FEWER: Final = Remedy(id="log_fewer", text="Log fewer values per step: self.log(name, value, on_step=False).")
FIND_COLLECT: Final = Remedy(
    id="find_collect",
    text="Find the gc.collect() call in the program or a callback: it runs a full collection every step.",
)
FREEZE_OBJECTS: Final = Remedy(
    id="freeze_objects",
    text="Exempt permanent objects from collections: gc.collect(); gc.freeze() in on_train_start.",
    change="gc_freeze",
)
CHOOSE_COLLECTIONS: Final = Remedy(
    id="choose_collections",
    text="Choose when to collect: gc.disable() in on_train_start, gc.collect() every 100 batches.",
)
BREAK_CYCLES: Final = Remedy(
    id="break_cycles",
    text="Break the cycles that hold tensors: store no tensor on an object that refers to itself or its owner.",
)

# Python, lines of the program, loops, passes

# Operators, modules, optimizers, cores

# Ranks

# Memory

# Traces and devices

# Snapshots

# Recording
