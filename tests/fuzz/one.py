"""Fuzz one target in this process: with atheris by coverage, or without it by changing what is there.

python tests/fuzz/one.py TARGET SECONDS CORPUS CRASHES [--without-atheris]

Its last line says how many inputs were read. It ends with another code than 0 at the first crash, whose input lies in
CRASHES.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

# Of one input of at most 1 MiB; the machines that run this are slow and busy.
MOST_SECONDS: Final = 30
MOST_MIB: Final = 3_000
MOST_BYTES: Final = 1 << 20


def main() -> None:
    """Fuzz."""
    name, seconds, corpus, crashes = sys.argv[1:5]
    if "--without-atheris" in sys.argv:
        by_chance(name, float(seconds), Path(corpus), Path(crashes))
    else:
        by_coverage(name, int(float(seconds)), Path(corpus), Path(crashes))


def by_coverage(name: str, seconds: int, corpus: Path, crashes: Path) -> None:
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


def by_chance(name: str, seconds: float, corpus: Path, crashes: Path) -> None:
    """Change seeds, and what was made of them, without knowing which lines are reached."""
    import fuzz_targets
    from fuzz_mutations import mutated

    chance = random.Random(int(time.time()))
    pool = [path.read_bytes() for path in sorted((fuzz_targets.SEEDS / name).iterdir())]
    pool += [path.read_bytes() for path in sorted(corpus.iterdir())]
    directory = fuzz_targets.scratch()
    try:
        read = fuzz_targets.target(name, directory)
        said: set[str] = set()
        count, start = 0, time.monotonic()
        while time.monotonic() < start + seconds:
            content = mutated(name, chance.choice(pool), chance)
            answer = _read(read, content, crashes / f"{name}-crash")
            count += 1
            # Another refusal is another way through the reader.
            if (kind := "".join(filter(str.isalpha, answer))[:200]) not in said:
                said.add(kind)
                (corpus / hashlib.sha1(content, usedforsecurity=False).hexdigest()).write_bytes(content)
                pool.append(content)
            if count % 50 == 0:
                print(f"#{count} corp: {len(pool)}", file=sys.stderr, flush=True)
        # As libFuzzer says it.
        print(f"Done {count} runs in {time.monotonic() - start:.0f} second(s)", file=sys.stderr)
        print(f"stat::number_of_executed_units: {count}", file=sys.stderr)
    finally:
        fuzz_targets.remove(directory)


def _read(read: Callable[[bytes], str], content: bytes, place: Path) -> Any:
    start = time.monotonic()
    try:
        answer = read(content)
    except BaseException:
        traceback.print_exc()
        _keep(content, place)
        raise
    if time.monotonic() - start > MOST_SECONDS:
        _keep(content, place)
        sys.exit(f"one input took {time.monotonic() - start:.0f} s")
    return answer


def _keep(content: bytes, place: Path) -> None:
    name = hashlib.sha1(content, usedforsecurity=False).hexdigest()
    place.with_name(f"{place.name}-{name}").write_bytes(content)


if __name__ == "__main__":
    main()
