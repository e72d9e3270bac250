"""Stand-ins for packages that a peer imports when it is imported, and does not use in what is measured."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

# By peer: what its profiler never calls.
OF_FINETUNING_SCHEDULER: Final = ("transformers",)
OF_COMPOSER: Final = (
    "mcli",
    "torchvision",
    "torchvision.datasets",
    "torchvision.models",
    "torchvision.models.resnet",
    "torchvision.ops",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.utils",
)


class Absent(ModuleType):
    """A module in which every name is an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def stand_in(names: tuple[str, ...]) -> None:
    """Put stand-ins where nothing of that name is installed; call it after torch and Lightning were imported."""
    for name in names:
        sys.modules.setdefault(name, Absent(name))
