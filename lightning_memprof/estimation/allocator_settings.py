"""Settings of torch's native CUDA caching allocator from their environment variables."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final

from lightning_memprof.errors import ConfigError
from lightning_memprof.estimation.allocator import LARGE_SEGMENT, AllocatorSettings
from lightning_memprof.units import MIB

# They change figures, and are not modeled.
_OTHERS: Final = ("roundup_power2_divisions", "max_non_split_rounding_mb", "large_segment_size_mb")


def environment_settings(environment: Mapping[str, str]) -> AllocatorSettings:
    """Parse the variable that torch reads: the first of its three names that is set.

    Raises:
        ConfigError: a value is out of range, or a setting is not modeled.
    """
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    return parse_settings(next((environment[name] for name in names if name in environment), ""))


def parse_settings(text: str) -> AllocatorSettings:
    """Parse the value of `PYTORCH_CUDA_ALLOC_CONF` or `PYTORCH_ALLOC_CONF`.

    Settings that change no figure of the model are ignored.

    Raises:
        ConfigError: a value is out of range, or a setting is not modeled.
    """
    pairs = (setting.partition(":") for setting in "".join(text.split()).split(","))
    values = {key: value for key, _, value in pairs}
    for name in _OTHERS:
        if name in values:
            raise ConfigError(f"allocator settings: {name} is not simulated: unset it for the estimate")
    expandable = values.get("expandable_segments", "False")
    if expandable not in {"True", "False"}:
        raise ConfigError(f"allocator settings: expandable_segments is {expandable!r}; it must be True or False")
    size = values.get("max_split_size_mb")
    if size is not None and not (size.isdecimal() and int(size) * MIB >= LARGE_SEGMENT):
        least = LARGE_SEGMENT // MIB
        raise ConfigError(f"allocator settings: max_split_size_mb is {size!r}; it must be a number of at least {least}")
    return AllocatorSettings(
        max_split_size=sys.maxsize if size is None else min(int(size) * MIB, sys.maxsize),
        expandable_segments=expandable == "True",
    )
