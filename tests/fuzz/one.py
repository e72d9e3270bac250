"""Fuzz one target in this process with atheris: ``python tests/fuzz/one.py TARGET SECONDS CORPUS CRASHES``.

It ends with another code than 0 at the first crash, whose input lies in CRASHES.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

# Of one input of at most 1 MiB; the machines that run this are slow and busy.
MOST_SECONDS: Final = 30
MOST_MIB: Final = 3_000
MOST_BYTES: Final = 1 << 20


def fuzz(name: str, seconds: int, corpus: Path, crashes: Path) -> None:
    """Let libFuzzer choose; it ends the process."""
    import atheris

    # Only what is imported here is watched.
    with atheris.instrument_imports(include=["lightning_memprof"], enable_loader_override=False):
        import fuzz_targets
    from fuzz_mutations import mutated

    directory = fuzz_targets.scratch()
    read = fuzz_targets.target(name, directory)

    def mutate(content: bytes, most: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if chance.random() < 0.5:
            return mutated(name, content, chance)[:most]
        made: bytes = atheris.Mutate(content, len(content))[:most]
        return made

    options = [
        f"-max_total_time={seconds}", f"-timeout={MOST_SECONDS}", f"-rss_limit_mb={MOST_MIB}", f"-max_len={MOST_BYTES}",
        f"-artifact_prefix={crashes}/{name}-", "-print_final_stats=1", "-len_control=0",
    ]  # fmt: skip
    places = [str(corpus), str(fuzz_targets.SEEDS / name)]
    atheris.Setup([sys.argv[0], *options, *places], _quiet(read), custom_mutator=mutate)
    atheris.Fuzz()


def _quiet(read: Callable[[bytes], str]) -> Callable[[bytes], None]:
    def read_quietly(content: bytes) -> None:
        read(content)

    return read_quietly


if __name__ == "__main__":
    fuzz(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
