"""One row of the table: ``python features.py NAME DIRECTORY``, a program that trains bare and with us and compares.

It runs in a process of its own: what compiles, or sets a mode, does so for the whole process. The last line that it
prints is JSON: ``same`` (to the last bit), ``errors`` (rows of the manifests), ``unavailable`` (what was not recorded,
and why), ``windows`` (how many were recorded), ``pages`` (how many runs can be shown).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import lightning.pytorch as pl
import torch
from kept import add_run, nothing_found
from lightning.pytorch.tuner import Tuner

from models import MODELS, ODD, Mlp, Outcome, TracedModel, fit
from recorders import RECORDERS
from training import Perceptron, loader, trainer


class WholeCompiled(Mlp):
    """The model is compiled as one graph before the fit."""

    def build(self) -> None:
        super().build()
        # `Module.compile` of a module of torch's own has frames of torch alone, which fullgraph refuses.
        self.net: Any = torch.compile(self.net, backend="aot_eager", fullgraph=True)


Program = Callable[[Path, dict[str, Any]], Outcome]


def of_model(kind: type[TracedModel]) -> Program:
    """Give a fit of a model, with its losses, gradients, weights and random numbers."""
    return lambda directory, ours: fit(kind, directory, *ours.pop("callbacks", []), **ours)


def compiled(directory: Path, ours: dict[str, Any]) -> Outcome:
    """``torch.compile`` of the module itself, as Lightning's documentation has it."""
    torch._dynamo.reset()
    torch.manual_seed(11)
    model = Mlp()
    made: Any = torch.compile(model, backend="aot_eager")
    trainer(directory, *ours.pop("callbacks", []), **ours).fit(made, loader(6))
    return [*model.seen, *(value.clone() for value in model.state_dict().values()), torch.get_rng_state()]


def stages(directory: Path, ours: dict[str, Any]) -> Outcome:
    """Validate, fit with validation, test and predict, of one Trainer."""
    torch.manual_seed(11)
    model = Perceptron()
    made = trainer(directory, *ours.pop("callbacks", []), **ours)
    made.validate(model, loader(6), verbose=False)
    made.fit(model, loader(6), loader(6))
    made.test(model, loader(6), verbose=False)
    predicted: Any = made.predict(model, loader(6))
    return [*predicted, *(value.clone() for value in model.state_dict().values()), torch.get_rng_state()]


def tuner(directory: Path, ours: dict[str, Any]) -> Outcome:
    """Look for a learning rate, and train with it."""
    torch.manual_seed(11)

    class Rated(Perceptron):
        lr = 1e-2

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), self.lr)

    model = Rated()
    made = trainer(directory, *ours.pop("callbacks", []), **ours)
    found: Any = Tuner(made).lr_find(model, loader(12), num_training=6)
    made.fit(model, loader(6))
    return [torch.tensor(found.results["loss"]), torch.tensor(model.lr), *model.state_dict().values()]


def resumed(directory: Path, ours: dict[str, Any]) -> Outcome:
    """Train, save, and go on from the checkpoint in a second Trainer."""
    torch.manual_seed(11)
    model, callbacks = Perceptron(), ours.pop("callbacks", [])
    first = trainer(directory / "first", *callbacks, **ours)
    first.fit(model, loader(6))
    first.save_checkpoint(directory / "saved.ckpt")
    second = trainer(directory / "second", *callbacks, max_epochs=2, **ours)
    model = Perceptron()
    second.fit(model, loader(6), ckpt_path=directory / "saved.ckpt")
    return [*(value.clone() for value in model.state_dict().values()), torch.get_rng_state()]


FEATURES: Final[Mapping[str, tuple[str, Program]]] = MappingProxyType(
    {
        "plain": ("a plain fit", of_model(Mlp)),
        "compile": ("`torch.compile` of the LightningModule", compiled),
        "compile-part": ("`torch.compile` of its network, one graph", of_model(WholeCompiled)),
        "bf16": ("AMP: `precision='bf16-mixed'`", of_model(MODELS["AMP bf16"])),
        "bf16-true": ("`precision='bf16-true'`", of_model(ODD["TrulyHalf"])),
        "accumulate": ("`accumulate_grad_batches=3`", of_model(MODELS["accumulation"])),
        "clip": ("`gradient_clip_val=0.1`", of_model(MODELS["clipping"])),
        "manual": ("manual optimization, two optimizers", of_model(MODELS["manual optimization with two optimizers"])),
        "checkpoint": ("gradient checkpointing", of_model(MODELS["checkpoint"])),
        "checkpoint-reentrant": ("gradient checkpointing, reentrant", of_model(MODELS["reentrant checkpoint"])),
        "loaders": ("two training and two validation dataloaders", of_model(ODD["SeveralLoaders"])),
        "stages": ("validate, fit with validation, test, predict", stages),
        "tuner": ("`Tuner.lr_find`, then fit", tuner),
        "resume": ("fit, and a second from its checkpoint", resumed),
    }
)


def main(name: str, directory: Path, recorders: Iterable[str]) -> dict[str, Any]:
    """Run one feature bare and with each recorder; give what was found."""
    _, program = FEATURES[name]
    bare = program(directory / "bare", {})
    found = nothing_found()
    for recorder in recorders:
        ours = program(directory / recorder, RECORDERS[recorder]())
        same = len(ours) == len(bare) and all(
            torch.equal(expected, other) for expected, other in zip(bare, ours, strict=True)
        )
        found["same"] = found["same"] and same
        for run in sorted(path.parent for path in (directory / recorder).rglob("manifest.rank00000.jsonl")):
            add_run(run, found)
    return found


if __name__ == "__main__":
    pl.seed_everything(11, verbose=False)
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:] or RECORDERS)))
