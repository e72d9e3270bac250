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
        few_tensors: tensors of an optimizer below which a loop over them costs nothing, unless they are large.
        per_tensor: operators that an optimizer of the program calls for each tensor if it updates them one by one.
        large_bytes: of them: each operator reads all of a large tensor again.
        few_samples: in a batch; more are a choice of the optimization, not an oversight, and so are more positions in a
            batch of sequences.
        call_ns: Python, autograd and the dispatcher take this for each operator that a program calls, on CPUs of 2020
            and later.
        sent_bytes: less is sent within the wait for the last rank, which no option removes.
        passes: backward passes per optimizer step from which on they accumulate; fewer are two optimizers that share a
            pass, or an epoch whose last batches are too few for a step.
        ample: of the peak: what the memory can hold is four times as much, so that activations fit that checkpointing
            does not save.
        loop: calls of an operator or a module in one forward, or in one call of a hook, from which on they are a loop:
            fewer are its layers, or a few values.
        parallel_ns: a shorter call of an operator does not use several cores: its parts cost more to hand out and to
            wait for than they save.
        long_ns: a longer call computes for much longer than its dispatch takes, and has work for all cores.
        reads: values of tensors that a step reads one by one from which on it loops over them.
        oversubscribed: threads per core from which on each parallel region waits for threads that do not run.
        thread_ns: in a shorter time, a thread may work for once.
        all_gradients: of the gradients that all passes of a step could compute: parameters that a pass does not need
            are missing.
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
    few_tensors: int = 20
    per_tensor: int = 2
    large_bytes: int = 16 * MIB
    few_samples: int = 8
    call_ns: int = 10_000
    sent_bytes: int = MIB
    passes: float = 1.75
    ample: float = 0.25
    loop: int = 8
    parallel_ns: int = 100_000
    long_ns: int = 300_000
    reads: int = 256
    oversubscribed: float = 2.0
    thread_ns: int = 300_000_000
    all_gradients: float = 0.95
    collectives: int = 4
    uneven_device: float = 0.15
    uneven_host: float = 0.25
    uneven_bytes: int = 256 * MIB


POLICY: Final = Policy()
