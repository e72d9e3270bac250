"""The thresholds of the verdict, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_memprof.units import MIB


@dataclass(frozen=True, kw_only=True)
class Policy:
    """From which figures on a finding is made, a verdict is given, and a word is used.

    Attributes:
        note: share of the step, or of the peak, below which nothing is reported: less than 1.05 times as fast.
        verdict: share from which on a finding may be the verdict: 1.1 times as fast.
        severe: share from which on it is severe: 1.4 times as fast.
        bound: share of the step from which on it is bound by a part.
        steps: a verdict on step time needs this many: the first ones start workers and select kernels, and one
            validation or checkpoint is most of a short run.
        short_step_ns: the Trainer itself takes 1 to 4 ms per step; in shorter steps its share hides the model's.
        title: characters of a title.
        action_ns: time per step of an action below which nothing is reported: the Trainer's own hooks and its progress
            bar take a millisecond.
        action_short_ns: the same in short steps.
        calls: an action that runs less often in the whole run starts or ends it.
        repeated: what returns in several steps takes this many times its longest step: Python collects everything, and
            a model is compiled, once in a while.
        save_ns: a checkpoint of small tensors takes less, on a busy machine, too.
        save_byte_ns: so does each byte: the slowest disks write 20 MB/s.
        owners: findings of a rule, one for each owner; of many slow callbacks the first ones show what to do.
        most: share from which on one cause explains a time.
        padding: share of padding in a batch; lengths vary in every data set, and batches of whole samples are never
            full.
        locked: share of a fetch in which a worker waits for a lock; from here on, more workers wait longer.
        many_per_core: workers per core from which on more of them do not help.
        workers: of a DataLoader that has none.
        row_ns: Python takes 10 to 20 µs to fetch a row of a tensor and to stack it with others; a busy machine takes
            longer.
        many_samples: smaller batches do not take long to fetch row by row.
        full: share of the machine's cores in use from which on none are free.
        threads_per_core: threads per core from which on each parallel operator waits for threads that do not run.
        stall_ns: a busy machine delays a step by less.
        apart: by how many times slow steps exceed the 90th percentile of the others: lengths of batches make a spread
            without a gap.
        few: share of the steps from which on they are not few: the phase is slow in general.
        stands_out: multiple of the median of a phase from which on a step stands out.
        regular: share of the distances between slow steps that are equal: a validation breaks the count.
        each: share of the places of a period that are slow; chance does not hit so many.
        one_step: share of the loading in one step that is a start of workers or of an epoch, not the usual step.
        hiccups_ns: what a run of a few seconds loses to the first epoch, checkpoint or validation.
        hiccup_ns: by how much other work on the machine delays single steps.
        long_hiccup_ns: the same for one or two of them.
        rhythm: steps at equal distances; three are so by chance in one run of twenty, four hardly ever.
        torch_profiler: share of forward and backward that torch's profiler costs: host time for each operator.
        python_profiler: share of the work that a Python profiler costs; the share of calls in it is unknown.
        collectives: in fewer of them, which rank comes last is chance.
        uneven_device: by how much a rank's peak on its device exceeds that of the others: ranks of one kind differ by
            the lengths of their batches and by rank 0's extra work.
        uneven_host: the same on the host, where rank 0 also writes logs and checkpoints, and touched memory stays.
        uneven_bytes: the same in bytes.
    """

    note: float = 0.05
    verdict: float = 0.10
    severe: float = 0.30
    bound: float = 0.50
    steps: int = 10
    short_step_ns: int = 10_000_000
    title: int = 100
    action_ns: int = 1_000_000
    action_short_ns: int = 2_000_000
    calls: float = 2.5
    repeated: int = 4
    save_ns: int = 200_000_000
    save_byte_ns: int = 50
    owners: int = 3
    most: float = 0.50
    padding: float = 0.20
    locked: float = 0.25
    many_per_core: int = 4
    workers: int = 4
    row_ns: int = 50_000
    many_samples: int = 256
    full: float = 0.80
    threads_per_core: int = 2
    stall_ns: int = 50_000_000
    apart: float = 1.5
    few: float = 1 / 3
    stands_out: int = 4
    regular: float = 0.6
    each: float = 0.8
    one_step: float = 0.75
    hiccups_ns: int = 500_000_000
    hiccup_ns: int = 100_000_000
    long_hiccup_ns: int = 1_000_000_000
    rhythm: int = 4
    torch_profiler: tuple[float, float] = (0.2, 0.5)
    python_profiler: tuple[float, float] = (0.02, 0.2)
    collectives: int = 4
    uneven_device: float = 0.15
    uneven_host: float = 0.25
    uneven_bytes: int = 256 * MIB


POLICY: Final = Policy()
