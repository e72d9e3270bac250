"""The optimizers of torch, by the implementations that they have."""

from __future__ import annotations

from typing import Final

FUSED: Final = frozenset({"Adagrad", "Adam", "AdamW", "SGD"})
FOREACH: Final = FUSED | {"ASGD", "Adadelta", "Adafactor", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"}
OF_TORCH: Final = FOREACH | {"LBFGS", "Muon", "SparseAdam"}
