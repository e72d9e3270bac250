"""Estimates of Llama 3 under FSDP2: beside torchtitan's measurements, and what large estimates cost.

python tests/benchmarks/estimate_devices.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from part import Target, judged, publish, targets

from lightning_memprof.units import GIB, MIB
from measured import table

LLAMA: Final = Path(__file__).with_name("llama.py")
# Source: benchmarks/llama3_h100_202412_torchtitan.md of pytorch/torchtitan, tables 1 and 3, eager; GiB reserved.
TITAN: Final = {8: 82.4, 128: 67.0}
LAYERS: Final = (8, 16, 32)


@dataclass(frozen=True, kw_only=True)
class Estimated:
    """An estimate by the command line, and its cost; the processes' memory is the largest one's."""

    found: dict[str, Any]
    wall_s: float
    cpu_s: float
    peak_rss_bytes: int

    @property
    def reserved_gib(self) -> float:
        return float(self.found["reserved"]["likely_bytes"] / GIB)

    def row(self, name: str) -> list[str]:
        return [name, f"{self.cpu_s:.1f}", f"{self.wall_s:.1f}", f"{self.peak_rss_bytes / MIB:,.0f}"]


def estimated(size: str, checkpointing: str, samples: int, *, devices: int = 1, layers: int | None = None) -> Estimated:
    """Estimate Llama 3 in a process of its own."""
    options = ["--device", "H100", "--device-memory", "96GiB", "--what-if", "none", "--format", "json"]
    if devices > 1:
        options += ["--devices", str(devices), "--strategy", "fsdp2"]
    program = [str(LLAMA), size, checkpointing, str(samples), *([] if layers is None else [str(layers)])]
    runner = "import resource, subprocess, sys; code = subprocess.run(sys.argv[1:]).returncode; "
    runner += "used = resource.getrusage(resource.RUSAGE_CHILDREN); "
    runner += "print('\\n', used.ru_utime + used.ru_stime, used.ru_maxrss * 1024); sys.exit(code)"
    command = [sys.executable, "-m", "lightning_memprof", "estimate", *options, *program]
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", runner, *command], check=True, capture_output=True, text=True)
    text, _, used = done.stdout.rstrip().rpartition("\n")
    cpu, rss = used.split()
    return Estimated(found=json.loads(text), wall_s=time.monotonic() - begun, cpu_s=float(cpu), peak_rss_bytes=int(rss))


def sections(*, trial: bool) -> Iterator[str]:
    """Yield Markdown: targets, memory beside the measured one, cost."""
    titan = {devices: estimated("8b", "op", 2, devices=devices) for devices in TITAN}
    one, large = estimated("1b", "none", 1), None if trial else estimated("70b", "full", 1, devices=8)
    by_layers = {layers: estimated("1b", "none", 1, layers=layers) for layers in LAYERS}
    few, some, many = (by_layers[layers].cpu_s for layers in LAYERS)
    found = []
    for devices, truth in TITAN.items():
        deviation = titan[devices].reserved_gib / truth - 1
        found.append(Target(f"8B on {devices} GPUs: within 10%", f"{deviation:+.1%}", abs(deviation) <= 0.1))
    difference = (titan[8].reserved_gib - titan[128].reserved_gib) / (TITAN[8] - TITAN[128]) - 1
    found.append(Target("their difference: within 10%", f"{difference:+.1%}", abs(difference) <= 0.1))
    costs = [("1B: 10 s of CPU time and 1 GiB at most", one, 10, GIB)]
    costs += [] if large is None else [("70B, 8 ranks: 120 s of CPU time and 4 GiB at most", large, 120, 4 * GIB)]
    for name, each, seconds, limit in costs:
        measured = f"{each.cpu_s:.1f} s, {each.peak_rss_bytes / MIB:,.0f} MiB"
        found.append(Target(name, measured, each.cpu_s <= seconds and each.peak_rss_bytes <= limit))
    growth = (many - some) / (some - few)
    found.append(Target("16 more layers cost at most 2.5 times as much as 8 more", f"{growth:.2f}", growth <= 2.5))
    yield targets(judged(found, trial=trial))
    yield (
        "Llama 3 8B, 2 samples of 8,192 tokens, FSDP2 with selective checkpointing, as torchtitan measured it in 2024;"
        " reserved GiB:"
    )
    rows = [
        [
            str(devices), f"{truth}", f"{each.reserved_gib:.1f}",
            "-".join(f"{each.found['reserved'][end] / GIB:.1f}" for end in ("low_bytes", "high_bytes")),
            f"{each.found['allocated_bytes'] / GIB:.1f}",
        ]
        for (devices, truth), each in zip(TITAN.items(), titan.values(), strict=True)
    ]  # fmt: skip
    yield table(["GPUs", "measured", "estimated", "band", "allocated, estimated"], rows)
    yield (
        "What an estimate costs, start of Python included; one thread computes, so an idle machine takes the CPU time:"
    )
    rows = [one.row("1.1B, 1 device"), *(each.row(f"8B, {devices} ranks") for devices, each in titan.items())]
    rows += [] if large is None else [large.row("70B, 8 ranks")]
    rows += [each.row(f"1.1B with {layers} layers, 1 device") for layers, each in by_layers.items()]
    yield table(["training", "CPU s", "elapsed s", "peak RSS, MiB"], rows)


def publish_devices(*, trial: bool) -> None:
    """Print the figures, and write them unless this is a trial."""
    publish({"estimate-devices": "\n\n".join(sections(trial=trial))}, trial=trial)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without the largest; nothing is judged, nothing written")
    publish_devices(trial=parser.parse_args().quick)
