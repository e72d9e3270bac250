"""Settings of torch's native CUDA caching allocator, and the parser of their environment variables.

Source: `c10/core/AllocatorConfig.cpp` of torch 2.14.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

from lightning_memprof.errors import ConfigError
from lightning_memprof.estimation.allocator import INTERVALS, LARGE_SEGMENT, OWN_SEGMENT, AllocatorSettings
from lightning_memprof.units import MIB


def environment_settings(environment: Mapping[str, str]) -> AllocatorSettings:
    """Parse the variable that torch reads: the first of its three names that is set.

    Raises:
        ConfigError: a value is missing or out of range.
    """
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    return parse_settings(next((environment[name] for name in names if name in environment), ""))


def parse_settings(text: str) -> AllocatorSettings:
    """Parse the value of `PYTORCH_CUDA_ALLOC_CONF` or `PYTORCH_ALLOC_CONF` by torch's rules.

    Raises:
        ConfigError: a value is missing or out of range.
    """
    values = dict(_pairs(text))
    segment = _megabytes(values, "large_segment_size_mb", LARGE_SEGMENT, least=OWN_SEGMENT + MIB)
    expandable = values.pop("expandable_segments", "False")
    if expandable not in {"True", "False"}:
        raise _wrong("expandable_segments", expandable, "True or False")
    return AllocatorSettings(
        max_split_size=_megabytes(values, "max_split_size_mb", sys.maxsize, least=segment),
        max_non_split_rounding_size=_megabytes(values, "max_non_split_rounding_mb", segment, least=segment),
        roundup_power2_divisions=_divisions(values.pop("roundup_power2_divisions", "0")),
        expandable_segments=expandable == "True",
        garbage_collection_threshold=_share(values, "garbage_collection_threshold", 0.0),
        large_segment_size=segment,
        per_process_memory_fraction=_share(values, "per_process_memory_fraction", 1.0),
        ignored=tuple(f"{key}:{value}" for key, value in values.items()),
    )


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """Yield key and value of each setting; commas in brackets belong to the value."""
    depth, start = 0, 0
    text = "".join(text.split()) + ","
    for i, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if char == "," and depth <= 0:
            key, colon, value = text[start:i].partition(":")
            if key and not (colon and value):
                raise _wrong(key, value, f"a value, as in {key}:VALUE")
            start = i + 1
            if key:
                yield key, value
    if depth:
        raise _wrong("setting", text[start:-1], "balanced brackets")


def _wrong(key: str, value: str, wanted: str) -> ConfigError:
    return ConfigError(f"allocator settings: {key} is {value!r}; it must be {wanted}")


def _number(values: dict[str, str], key: str, kind: type[int | float]) -> float | None:
    """Take a number out of the settings that are not parsed yet."""
    value = values.pop(key, None)
    try:
        return None if value is None else kind(value)
    except ValueError:
        raise _wrong(key, str(value), "a number") from None


def _megabytes(values: dict[str, str], key: str, default: int, least: int) -> int:
    number = _number(values, key, int)
    if number is None:
        return default
    if number * MIB < least:
        raise _wrong(key, str(number), f"at least {least // MIB}")
    return min(int(number) * MIB, sys.maxsize)


def _share(values: dict[str, str], key: str, default: float) -> float:
    number = _number(values, key, float)
    if number is not None and not 0 < number < 1 and number != default:
        raise _wrong(key, str(number), "a number between 0 and 1")
    return default if number is None else number


def _divisions(text: str) -> tuple[int, ...]:
    """Parse `roundup_power2_divisions`: a number, or `[256:1,512:2,>:8]` with bounds in MiB."""
    wrong = _wrong("roundup_power2_divisions", text, "powers of 2, as in 8 or [256:1,512:2,>:8]")
    if text[:1] != "[":
        return (_power_of_two(text, wrong),) * INTERVALS
    table = [0] * INTERVALS
    last, is_first = 0, True
    for pair in text.strip("[]").split(","):
        bound, _, value = pair.partition(":")
        divisions = _power_of_two(value, wrong)
        if bound == ">":
            table[last + 1 :] = [divisions] * (INTERVALS - 1 - last)
            continue
        last = min(max(_power_of_two(bound, wrong), 1).bit_length(), INTERVALS) - 1
        table[0 if is_first else last : last + 1] = [divisions] * (last + 1 if is_first else 1)
        is_first = False
    return tuple(table)


def _power_of_two(text: str, wrong: ConfigError) -> int:
    if not text.isdecimal() or int(text).bit_count() > 1:
        raise wrong
    return int(text)
