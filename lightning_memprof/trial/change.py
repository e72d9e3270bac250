"""A change of a training run that can be tried: the base of all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from lightning_memprof.errors import ConfigError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader


class RefusedError(Exception):
    """The remedy cannot be applied to this training; the message is the reason."""


class Change:
    """A change of a training run that can be tried; its methods raise RefusedError where it does not apply.

    Attributes:
        name: on the command line.
        example: a value for messages; empty where the remedy takes none.
        paste: the code to paste, with ``{value}``, and ``{names}`` of what is changed in the training.
        names: that of any training, before the training is known.
        tolerance: the largest difference of a step's loss that it may cause, as a share of the mean loss.
        family: remedies of one family replace each other.
        is_per_epoch: whether it acts between epochs only.
        is_random: whether the training draws other random numbers: then the tolerance is of the mean loss.

    Args:
        value: the text after ``=``; empty without one.

    Raises:
        ConfigError: the value is invalid.
    """

    name: ClassVar[str]
    paste: ClassVar[str]
    example: ClassVar[str] = ""
    tolerance: ClassVar[float] = 0.0
    family: ClassVar[str] = ""
    is_per_epoch: ClassVar[bool] = False
    is_random: ClassVar[bool] = False
    names: str = ""

    def __init__(self, value: str = "") -> None:
        self.value = value
        if bool(value) != bool(self.example) or not self.is_valid(value):
            wanted = f"{self.name}={self.example}" if self.example else self.name
            raise ConfigError(f"--remedy {self.label}: must be as in {wanted}")

    @property
    def label(self) -> str:
        """The remedy on the command line."""
        return f"{self.name}={self.value}" if self.value else self.name

    @property
    def code(self) -> tuple[str, ...]:
        """The change, as lines to paste."""
        return tuple(self.paste.format(value=self.value, names=self.names).splitlines())

    @property
    def batches(self) -> int:
        """How many batches replace one of the unchanged program."""
        return 1

    def is_valid(self, value: str) -> bool:  # noqa: ARG002 any, where a subclass has no rule
        """Whether a value can be used."""
        return True

    def environment(self) -> Mapping[str, str]:
        """Return environment variables of the program's process."""
        return {}

    def make_comparable(self) -> None:
        """Let a compared run draw the random numbers of the unchanged program, where that costs time."""

    def on_fit(self, trainer: Trainer, model: LightningModule) -> None:
        """Change the Trainer before ``fit``."""

    def on_model(self, model: LightningModule) -> None:
        """Change the model when it has all its modules, before it is on its device."""

    def on_loader(self, loader: DataLoader[Any]) -> None:
        """Change a training DataLoader before its first batch."""

    def on_start(self, trainer: Trainer, model: LightningModule) -> None:
        """Change what exists when the first step begins, such as optimizers."""
