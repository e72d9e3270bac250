"""The thresholds of the verdict, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_memprof.units import MIB


@dataclass(frozen=True, kw_only=True)
class Policy:
    """From which figures on a finding is made, a verdict is given, and a word is used.

    Attributes:
        note: share of the step, or of the peak, below which nothing is reported: less than a speed-up of 1.05.
        verdict: share from which on a finding may be the verdict, if its remedy may recover as much: a speed-up of 1.1.
        severe: share from which on it is severe: a speed-up of 1.4.
        bound: share of the step from which on it is bound by a part.
        steps: a verdict on step time needs this many: the first ones start workers and select kernels, and one
            validation or checkpoint is most of a short run.
        short_step_ns: the Trainer itself takes 1 to 4 ms per step; in shorter steps its share hides the model's.
        title: characters of a title.
        trainer_ns: the Trainer's own work between phases takes less per step.
        action_ns: time per step of an action below which nothing is reported: the Trainer's own hooks and its progress
            bar take a millisecond.
        action_short_ns: the same in short steps.
        calls: an action that runs less often in the whole run starts or ends it.
        repeated: what returns in several steps takes this many times its longest step: Python collects everything, and
            a model is compiled, once in a while.
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
        times_larger: the batch that is proposed instead of one of few samples.
        few_samples: in a batch; more are a choice of the optimization, not an oversight, and so are more positions in a
            batch of sequences.
        call_ns: Python, autograd and the dispatcher take this for each operator that a program calls, on CPUs of 2020
            and later.
        ample: of the peak: what the memory can hold is four times as much, so that activations fit that checkpointing
            does not save.
        loop: calls of an operator or a module in one forward, or in one call of a hook, from which on they are a loop:
            fewer are its layers, or a few values.
        parallel_ns: a shorter call of an operator does not use several cores: its parts cost more to hand out and to
            wait for than they save.
        long_ns: a longer call computes for much longer than its dispatch takes, and has work for all cores.
        reads: values of tensors that a step reads one by one from which on it loops over them.
        collected_after: new objects after which Python collects young ones; a value that is read makes one or two.
        thread_ns: in a shorter time, a thread may work for once.
        all_gradients: of the gradients that all passes of a step could compute: parameters that a pass does not need
            are missing.
        threads_per_core: threads per core: from this on, each parallel operator waits for threads that do not run.
        stall_ns: a busy machine delays a step by less.
        apart: the factor by which slow steps exceed the 90th percentile of the others: lengths of batches make a spread
            without a gap.
        few: share of the steps from which on they are not few: the phase is slow in general.
        stands_out: the factor by which a step exceeds the median of a phase to stand out.
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
        uneven_host: share of a rank's peak RSS that the other ranks do not need: rank 0 also writes logs and
            checkpoints, and touched memory stays.
        bytes: fewer of an allocator, or of one rank only, do not decide whether a larger batch fits.
        alike: two measurements of the same bytes differ by less: one counts pages, the other tensors.
        segments: the largest ones that are checked for pieces that would have sufficed: each sorts the live blocks.
        event_ns: torch's profiler takes 0.6 µs on the host for a Python function and 2 µs or more for an operator,
            measured on a CPU.
        brief_ns: a recording of less is a sample: the first launch alone takes milliseconds.
        queued_ns: a device waits no longer than this for a kernel that is queued behind another one.
        launch_gap_ns: nothing in a program that launches takes as long, however slow its Python is.
        call_gap_ns: an operator or place without launches does not take as long between two of them.
        multiple: the same work takes the same time; what takes this many times as long waits, or is other work.
        requests: without torch's cache each tensor is a call to the driver; with it, a step that empties the cache
            requests fewer segments.
        requests_per_kernel: the same per kernel.
        same_size: sizes that differ by less are of the same tensors.
        near_peak: share of a device's peak from which on there is little to gain with the same arithmetic.
    """

    note: float = 0.05
    verdict: float = 0.10
    severe: float = 0.30
    bound: float = 0.50
    steps: int = 10
    short_step_ns: int = 10_000_000
    title: int = 100
    trainer_ns: int = 5_000_000
    action_ns: int = 1_000_000
    action_short_ns: int = 2_000_000
    calls: float = 2.5
    repeated: int = 4
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
    times_larger: int = 8
    few_samples: int = 8
    call_ns: int = 10_000
    ample: float = 0.25
    loop: int = 8
    parallel_ns: int = 100_000
    long_ns: int = 300_000
    reads: int = 256
    collected_after: int = 700
    thread_ns: int = 300_000_000
    all_gradients: float = 0.95
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
    uneven_host: float = 0.20
    bytes: int = 256 * MIB
    alike: float = 1.25
    segments: int = 8
    event_ns: int = 1_000
    brief_ns: int = 1_000_000
    queued_ns: int = 20_000
    launch_gap_ns: int = 1_000_000
    call_gap_ns: int = 200_000
    multiple: int = 3
    requests: int = 50
    requests_per_kernel: float = 0.25
    same_size: float = 0.10
    near_peak: float = 0.60


POLICY: Final = Policy()
