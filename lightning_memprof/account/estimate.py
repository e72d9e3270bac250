"""The estimate of a training run's memory, and the memory of known devices."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

import msgspec

from lightning_memprof.errors import ConfigError
from lightning_memprof.units import GIB, KIB, MIB, format_bytes

# What CUDA's context and the driver keep beside torch's allocator: in the measured runs, most of them on GeForce cards,
# between 120 and 280 MiB of the total; nvidia-smi shows up to 550 MiB for an empty context on data-center cards.
_MIN_CONTEXT_BYTES: Final = 120 * MIB
_CONTEXT_BYTES: Final = 280 * MIB
_LARGE_CONTEXT_BYTES: Final = 550 * MIB
# Source: torch's default of CUBLAS_WORKSPACE_CONFIG, :4096:2:16:8, and :4096:8 on compute capability 9.
_WORKSPACE: Final = 8_320 * KIB
_WORKSPACE_HOPPER: Final = 32 * MIB


class _Model(NamedTuple):
    """A GPU: threads that all its multiprocessors run at once, its workspace, and the MiB of its variants by name."""

    threads: int
    workspace_bytes: int
    mib: Mapping[str, int]


# A device has the first model whose key its name contains. Multiprocessors times threads are those of the vendors' data
# sheets. MiB are those of torch.cuda.get_device_properties() on Linux: measured, else the smallest total in users'
# out-of-memory messages. Drivers hide a varying part of the memory in the data sheets.
_MODELS: Final = MappingProxyType(
    {
        "B200": _Model(148 * 2048, _WORKSPACE_HOPPER, {"NVIDIA B200": 182_642}),
        "H200": _Model(132 * 2048, _WORKSPACE_HOPPER, {"NVIDIA H200": 143_156}),
        "H100": _Model(132 * 2048, _WORKSPACE_HOPPER, {"NVIDIA H100 80GB": 81_079}),
        "A100": _Model(108 * 2048, _WORKSPACE, {"NVIDIA A100 80GB": 81_038, "NVIDIA A100 40GB": 40_330}),
        "PRO 6000": _Model(188 * 1536, _WORKSPACE_HOPPER, {"NVIDIA RTX PRO 6000": 97_177}),
        "6000 Ada": _Model(142 * 1536, _WORKSPACE, {"NVIDIA RTX 6000 Ada": 48_537}),
        "A6000": _Model(84 * 1536, _WORKSPACE, {"NVIDIA RTX A6000": 48_537}),
        "A4000": _Model(48 * 1536, _WORKSPACE, {"NVIDIA RTX A4000": 15_974}),
        "L40": _Model(142 * 1536, _WORKSPACE, {"NVIDIA L40S": 45_480}),
        "A40": _Model(84 * 1536, _WORKSPACE, {"NVIDIA A40": 45_403}),
        "A10": _Model(72 * 1536, _WORKSPACE, {"NVIDIA A10": 22_502}),
        "L4": _Model(58 * 1536, _WORKSPACE, {"NVIDIA L4": 22_563}),
        "T4": _Model(40 * 1024, _WORKSPACE, {"NVIDIA T4": 14_912}),
        "V100": _Model(80 * 2048, _WORKSPACE, {"NVIDIA V100 32GB": 32_494, "NVIDIA V100 16GB": 16_144}),
        "5090": _Model(170 * 1536, _WORKSPACE_HOPPER, {"NVIDIA GeForce RTX 5090": 32_111}),
        "4090": _Model(128 * 1536, _WORKSPACE, {"NVIDIA GeForce RTX 4090": 24_110}),
        "4080": _Model(76 * 1536, _WORKSPACE, {"NVIDIA GeForce RTX 4080": 15_962}),
        "4070": _Model(46 * 1536, _WORKSPACE, {"NVIDIA GeForce RTX 4070": 11_837}),
        "4060": _Model(24 * 1536, _WORKSPACE, {"NVIDIA GeForce RTX 4060": 7_933}),
        "3090": _Model(82 * 1536, _WORKSPACE, {"NVIDIA GeForce RTX 3090": 24_246}),
        "3080": _Model(68 * 1536, _WORKSPACE, {"NVIDIA GeForce RTX 3080": 9_992}),
        "3070": _Model(46 * 1536, _WORKSPACE, {"NVIDIA GeForce RTX 3070": 7_843}),
        "3060": _Model(28 * 1536, _WORKSPACE, {"NVIDIA GeForce RTX 3060": 12_037}),
        "2080": _Model(68 * 1024, _WORKSPACE, {"NVIDIA GeForce RTX 2080 Ti": 11_008}),
    }
)
_UNKNOWN: Final = _Model(100 * 1536, _WORKSPACE, {})

_BATCHLESS: Final = ("parameter", "gradient", "optimizer_state")

Conclusion = Literal["fits", "does not fit", "too close to call", "no limit"]


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a kind of device.

    Attributes:
        name: as PyTorch names it, or ``CPU``.
        total_bytes: of its memory; None where it is not known.
        usable_bytes: what PyTorch's allocator can reserve of it at least: without the CUDA context and what the driver
            keeps.
        workspace_bytes: what cuBLAS keeps for each thread that multiplies matrices.
        resident_threads: how many threads all its multiprocessors run at once.
        source: of these figures.
    """

    name: str
    total_bytes: int | None = None
    usable_bytes: int | None = None
    workspace_bytes: int = 0
    resident_threads: int = 0
    source: str = ""

    @property
    def capacities(self) -> tuple[int, int] | None:
        """The bytes that the allocator can reserve at least and at most; None where they are not known."""
        if self.usable_bytes is None or self.total_bytes is None:
            return None
        return self.usable_bytes, max(self.usable_bytes, self.total_bytes - _MIN_CONTEXT_BYTES)


class Reserved(msgspec.Struct, frozen=True):
    """The peak of the memory that the allocator reserves, in bytes: its likely value and a band."""

    low_bytes: int
    likely_bytes: int
    high_bytes: int


class Host(msgspec.Struct, frozen=True):
    """What a training run on a GPU keeps in host memory for its tensors.

    Attributes:
        categories: bytes at the peak by category; a device's own, which each of several devices needs.
        to_device_bytes: copied to the device in a step.
        to_host_bytes: copied back in a step.
    """

    categories: Mapping[str, int] = msgspec.field(default_factory=dict)
    to_device_bytes: int = 0
    to_host_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes at the peak."""
        return sum(self.categories.values())

    def words(self) -> str:
        """Return the bytes in words."""
        moved = f"{format_bytes(self.to_device_bytes)} in and {format_bytes(self.to_host_bytes)} out"
        return f"{format_bytes(self.total_bytes)} of host memory, {moved} per step"


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """The same training with one change.

    Attributes:
        change: as on the command line.
        allocated_bytes: peak of the tensors' memory; None where it could not be estimated.
        reserved: peak of the allocator's memory.
        fit: whether it fits.
        costs: what is lost for it.
        problem: why there are no figures.
        is_rank: whether it is another rank of the same training instead of a change.
    """

    change: str
    allocated_bytes: int | None = None
    reserved: Reserved | None = None
    fit: Conclusion | None = None
    costs: str = ""
    problem: str = ""
    is_rank: bool = False


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a training run on one device.

    Attributes:
        program: what is estimated: words of a command line, or a class.
        is_program: whether it is a command line.
        called_at: file and line at which a program calls ``fit``, which is its first one; empty where Lightning does.
        device: the device.
        allocated_bytes: peak of the tensors' memory, in the allocator's steps of 512 bytes.
        reserved: peak of the memory that the allocator reserves for it.
        fit: whether the training fits into the device.
        is_largest: whether the batch is the largest one that fits.
        retries: how often the allocator releases its cached blocks to make it fit.
        step: number of the step with the peak, from 0.
        part: ``forward``, ``backward``, ``optimizer``, ``validation``, or ``setup`` before the first step.
        operator: the operator that reaches the peak.
        categories: bytes at the peak by category; they add up to ``allocated_bytes``.
        modules: bytes at the peak by module and category.
        dtypes: bytes at the peak by dtype.
        live: bytes by category during the last step, in the order of its requests.
        parameters: number of parameters.
        steps: how many steps were simulated.
        batch: shapes and dtypes of a batch.
        batch_size: samples in a batch; None where the batch does not say.
        ranks: how many devices train together; the figures are those of the one that needs most.
        strategy: ``ddp``, ``fsdp``, ``fsdp2``, or ``model parallel``; empty for one device.
        host: what is in host memory beside a GPU.
        assumptions: what the figures rest on, a sentence each.
        alternatives: the same training with changes.
        seconds: how long the simulation took.
    """

    program: str
    device: Device
    allocated_bytes: int
    reserved: Reserved
    fit: Conclusion
    retries: int
    step: int
    part: str
    operator: str
    categories: Mapping[str, int]
    modules: Sequence[tuple[str, str, int]]
    dtypes: Mapping[str, int]
    live: Mapping[str, Sequence[int]]
    parameters: int
    steps: int
    batch: Sequence[str] = ()
    batch_size: int | None = None
    ranks: int = 1
    strategy: str = ""
    is_program: bool = False
    called_at: str = ""
    is_largest: bool = False
    host: Host = msgspec.field(default_factory=Host)
    assumptions: Sequence[str] = ()
    alternatives: Sequence[Alternative] = ()
    seconds: float = 0.0

    @property
    def batchless_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer state, which no batch size changes."""
        return sum(max(self.live.get(name, ()), default=0) for name in _BATCHLESS)


def device_of(name: str, total_bytes: int, source: str) -> Device:
    """Return a GPU of a size."""
    model = next((model for part, model in _MODELS.items() if part in name), _UNKNOWN)
    return Device(
        name=name,
        total_bytes=total_bytes,
        usable_bytes=max(total_bytes - (_CONTEXT_BYTES if "GeForce" in name else _LARGE_CONTEXT_BYTES), 0),
        resident_threads=model.threads,
        workspace_bytes=model.workspace_bytes,
        source=source,
    )


KNOWN: Final = "table of devices"
"""The source of known devices."""

DEVICES: Final = MappingProxyType(
    {name: device_of(name, mib * MIB, KNOWN) for model in _MODELS.values() for name, mib in model.mib.items()}
)
"""Known GPUs by name."""


def device_named(name: str) -> Device:
    """Return the device whose name has all words of ``name``, or the CPU.

    Raises:
        ConfigError: no name has them, or several have.
    """
    if name.lower() == "cpu":
        return Device(name="CPU", source="no limit was given")
    wanted = set(_words(name))
    found = [device for known, device in DEVICES.items() if wanted <= set(_words(known))]
    exact = [device for device in found if set(_words(device.name)) - {"nvidia", "geforce", "rtx"} == wanted]
    if len(exact or found) == 1:
        return (exact or found)[0]
    if found:
        names = ", ".join(_short(device) for device in found)
        raise ConfigError(f"--device {name!r}: several devices have this name: {names}")
    known = {_short(device): device for device in DEVICES.values()}
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    names = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError(
        f"--device {name!r}: no such device is known{names or ';'} for any other give --device-memory, as in 24GiB"
    )


def default_workspace(name: str) -> int:
    """Return what cuBLAS keeps by default for each thread that multiplies matrices; 0 for an unknown device."""
    words = set(_words(name))
    return next((device.workspace_bytes for known, device in DEVICES.items() if set(_words(known)) <= words), 0)


def _short(device: Device) -> str:
    return device.name.removeprefix("NVIDIA ").removeprefix("GeForce ")


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z]+|[0-9]+", name.lower().replace("gib", "gb"))


def parse_bytes(option: str, text: str) -> int:
    """Return the bytes in a text such as ``24GiB`` or ``16 GB``.

    Raises:
        ConfigError: it is not a number with a unit.
    """
    units = {"kib": KIB, "mib": MIB, "gib": GIB, "kb": 10**3, "mb": 10**6, "gb": 10**9}
    found = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([a-z]+)\s*", text.lower())
    if found is None or found[2] not in units or float(found[1]) <= 0:
        raise ConfigError(f"{option} {text!r}: must be a positive number and a unit, as in 24GiB or 16GB")
    return round(float(found[1]) * units[found[2]])
