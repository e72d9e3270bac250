"""Runs a program up to its ``Trainer.fit``."""

from __future__ import annotations

import os
import runpy
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning.pytorch import LightningModule, Trainer

from lightning_memprof.capture.observe import Link, wrapped
from lightning_memprof.errors import MemprofError
from lightning_memprof.estimation.construction import LargeOnMeta
from lightning_memprof.estimation.simulation import Fit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

__all__ = ["run_to_fit"]

_CLI: Final = ("fit",)
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


class _Reached(BaseException):  # noqa: N818 it ends the program, and is no error
    """The program called ``fit``; a BaseException, so that its handlers of errors pass it on."""

    def __init__(self, fit: Fit) -> None:
        super().__init__()
        self.fit = fit


class _FailedEarlyError(MemprofError):
    """The program raised an exception before ``fit``."""


def run_to_fit(program: Sequence[str], use: Callable[[Fit], None]) -> None:
    """Run a program; at its first ``Trainer.fit`` call ``use`` instead, and end it.

    Args:
        program: ``[SCRIPT, *ARGS]``, ``["-m", MODULE, *ARGS]``, or ``["fit", *ARGS]`` for a bare ``LightningCLI``.
        use: gets the fit.

    Raises:
        MemprofError: the program is missing, fails, or ends without ``Trainer.fit``.

    """
    arguments: dict[int, dict[str, Any]] = {}
    try:
        _to_fit(program, use, LargeOnMeta())
    except _FailedEarlyError:
        # A constructor that reads values of a large tensor fails without them: it gets them.
        _to_fit(program, use, nullcontext())


def _to_fit(program: Sequence[str], use: Callable[[Fit], None], construction: AbstractContextManager[object]) -> None:
    name = " ".join(program)
    arguments: dict[int, dict[str, Any]] = {}

    def init(link: Link) -> Callable[..., None]:
        def construct(trainer: Trainer, **given: Any) -> None:
            arguments[id(trainer)] = given
            link.call(trainer, **{**given, **_HARMLESS})

        return construct

    def fit(_: Link) -> Callable[..., None]:
        def reached(trainer: Trainer, model: LightningModule, *given: Any, **named: Any) -> None:
            names = ("train_dataloaders", "val_dataloaders", "datamodule")
            data = {key: value for key, value in (*zip(names, given, strict=False), *named.items()) if key in names}
            raise _Reached(Fit(trainer=arguments[id(trainer)], model=model, data=data, program=name))

        return reached

    def skipped(_: Link) -> Callable[..., list[Any]]:
        return lambda *_args, **_named: []

    with ExitStack() as undo:
        undo.enter_context(wrapped(Trainer, "__init__", init))
        undo.enter_context(wrapped(Trainer, "fit", fit))
        for other in ("validate", "test", "predict"):
            undo.enter_context(wrapped(Trainer, other, skipped))
        undo.enter_context(construction)
        try:
            _run(program)
        except _Reached as reached:
            found = reached.fit
        except SystemExit as stop:
            if stop.code not in {None, 0}:
                raise MemprofError(f"estimate: {name} ended with exit code {stop.code} before Trainer.fit") from stop
            found = None
        except MemprofError:
            raise
        except Exception as error:
            words = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise _FailedEarlyError(f"estimate: {name} failed before Trainer.fit: {words}") from error
        else:
            found = None
    if found is None:
        raise MemprofError(f"estimate: {name} ended without Trainer.fit of lightning.pytorch, which is what is estimated")
    use(found)


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
