"""Modules that replace ``pytorch_lightning`` by ``lightning.pytorch``, the same code, which estimate and try patch.

They take effect where this folder precedes the installed packages on ``sys.path``; ``PYTHONPATH`` puts it there for
processes that the program starts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Final

FOLDER: Final = __path__[0]
"""The folder of these modules."""

_REPLACED: Final = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


def replace_package(name: str) -> None:
    """Make ``name``, which is being imported, and its submodules those of the package ``lightning``."""
    if not any(isinstance(finder, _Modules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Modules())
        # Its distribution has lightning_fabric, too.
        installed, used = metadata.version("pytorch_lightning"), metadata.version("lightning")
        if installed != used:
            sys.stderr.write(f"memprof: pytorch_lightning {installed} runs as lightning.pytorch {used}\n")
    sys.modules[name] = import_module(_REPLACED[name])


@contextmanager
def replaced_packages() -> Iterator[None]:
    """Make imports find these modules; at the end, restore ``sys.path`` and the modules that were imported before."""
    path, installed = list(sys.path), _imported()
    _forget(installed)
    sys.path.insert(0, FOLDER)
    try:
        yield
    finally:
        sys.path[:] = path
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Modules)]
        _forget(_imported())
        sys.modules.update(installed)


def _imported() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in _REPLACED}


def _forget(modules: Iterable[str]) -> None:
    for name in modules:
        del sys.modules[name]


class _Modules(MetaPathFinder, Loader):
    """Finds the modules of a replaced package."""

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        package, rest = fullname.partition(".")[::2]
        used = f"{_REPLACED.get(package)}.{rest}"
        return ModuleSpec(fullname, self, origin=used) if package in _REPLACED and rest and find_spec(used) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(str(spec.origin))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has given the module the spec of the other name.
        module.__spec__ = module.__spec__.loader_state if module.__spec__ is not None else None
