"""Rows over time: one row class for each collector's series (JSON lines), and the pulse (CSV)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

import msgspec

from lightning_memprof.artifacts.rows import Int64, Row

# Actions of the pulse that Lightning does not have: time outside all actions, GC pauses, the collectors' work at marks.
UNTRACKED, GC_PAUSE, PROFILER = "untracked", "gc_pause", "[MemProfiler]"
COMPILATION: Final = "torch.compile"

# Digits of Unix time in nanoseconds until the year 2286: what is longer is damage, and at last too much for a float.
MAX_DIGITS: Final = 19


class PulseRow(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """A step of the run: counts, nanoseconds by phase on both clocks, and bytes; ``row["step"]`` is ``row.step``.

    The order of the fields is that of the columns. A new column is the last one: pulses without it stay readable.
    ``core_wait_ns`` is how long the training thread was ready to run but waited for a core, since the previous row that
    has it. ``other_profiler`` is the key in ``PROFILERS`` of another profiler that recorded at the end of the step,
    outside windows.
    """

    step: int | None
    global_step: int | None
    epoch: int | None
    window: int | None
    start_ns: int | None
    duration_ns: int | None
    data_wait_ns: int | None
    forward_ns: int | None
    backward_ns: int | None
    optimizer_ns: int | None
    callbacks_ns: int | None
    other_ns: int | None
    rss_bytes: int | None
    device_peak_bytes: int | None
    device_duration_ns: int | None
    device_data_wait_ns: int | None
    device_forward_ns: int | None
    device_backward_ns: int | None
    device_optimizer_ns: int | None
    device_callbacks_ns: int | None
    device_other_ns: int | None
    core_wait_ns: int | None
    other_profiler: int | None

    def __getitem__(self, column: str) -> int | None:
        value: int | None = getattr(self, column)
        return value


PULSE_COLUMNS: Final = PulseRow.__struct_fields__
# Each has a column on both clocks, in this order.
PHASES: Final = ("data_wait", "forward", "backward", "optimizer", "callbacks", "other")
TORCH_PROFILER: Final = 1
PYTHON_PROFILER: Final = 2
# Why a trace is missing or ends early: of a profiler that the pulse does not see, as ours had Kineto until it started.
STARTED_PROFILER: Final = "the program started its own torch profiler; the trace ends there"
LIGHTNING_PROFILER: Final = "Lightning's PyTorchProfiler owns torch.profiler in this run"
# In the column ``other_profiler``.
PROFILERS: Final = {TORCH_PROFILER: "torch.profiler", PYTHON_PROFILER: "a Python profiler, such as cProfile,"}


class SeriesRow(Row, omit_defaults=True):
    """A row of a collector's series, written and read; ``recorded`` is False in warmup.

    ``series`` is the series' name. Columns that have their default are not written, except by the classes that say
    ``omit_defaults=False``.
    """

    series: ClassVar[str]

    step: Int64 | None = None
    global_step: Int64 | None = None
    point: str | None = None
    recorded: bool | None = None
    time_ns: Int64 | None = None


class HookRow(SeriesRow, gc=False):
    """One of Lightning's profiler actions: when it started (Unix time), how long it took, and how deep it is nested."""

    series = "hooks"

    action: str | None = None
    start_ns: Int64 | None = None
    duration_ns: Int64 | None = None
    depth: Int64 | None = None


# The action of a peak that the process reached before the run.
BEFORE_STEPS: Final = "before_steps"
# In the functions of a line: a module is called.
MODULE_CALL: Final = "()"


class LineRow(SeriesRow):
    """How long the training thread is in a line of the program in a window's steps, by looks at it.

    ``functions`` of the program are outermost first, with a ``()`` where one calls a module; ``place`` and ``source``
    are the innermost one's. The line calls the library's function ``called``; ``inside`` is the innermost of these.
    """

    series = "lines"

    functions: list[str] = msgspec.field(default_factory=list)
    place: str | None = None
    source: str | None = None
    called: str | None = None
    inside: str | None = None
    looks: Int64 | None = None
    ns: Int64 | None = None
    asleep_ns: Int64 | None = None


class HostRow(SeriesRow, gc=False, omit_defaults=False):
    """The memory of the process at a mark, in bytes."""

    series = "host"

    rss_bytes: Int64 | None = None
    vms_bytes: Int64 | None = None
    peak_rss_bytes: Int64 | None = None
    uss_bytes: Int64 | None = None


class ActionMemoryRow(SeriesRow, gc=False):
    """What one action of the program adds in a recorded step, a hook of a callback or of the module or a fetch.

    The bytes that the C allocator has handed out are exact where it has them; RSS does not rise where freed memory is
    used again.
    """

    series = "action_memory"

    action: str | None = None
    rss_change_bytes: Int64 | None = None
    heap_change_bytes: Int64 | None = None


class WorkerBatchRow(SeriesRow, gc=False):
    """A batch that a DataLoader worker made during a window: when it began (Unix time) and how long it took."""

    series = "worker_batches"

    pid: Int64 | None = None
    worker: Int64 | None = None
    dataset: str | None = None
    start_ns: Int64 | None = None
    duration_ns: Int64 | None = None


class LoaderCallRow(SeriesRow, gc=False):
    """What a function took of a worker's fetches in a window of earlier recordings; without a name, whole fetches."""

    series = "loader_calls"

    pid: Int64 | None = None
    worker: Int64 | None = None
    dataset: str | None = None
    function: str | None = None
    count: Int64 | None = None
    self_ns: Int64 | None = None
    total_ns: Int64 | None = None


class LoaderQueueRow(SeriesRow, gc=False):
    """Batches that are ready when the loop asks for one, of those ordered; in the last row, how many were pinned."""

    series = "loader_queue"

    dataset: str | None = None
    ready: Int64 | None = None
    ordered: Int64 | None = None
    pinned: Int64 | None = None
    pinning_ns: Int64 | None = None


class ProcessRow(SeriesRow, gc=False):
    """Memory outside the training steps of this process, over the whole run, and times of other processes and threads.

    ``kind`` is ``workers``, the DataLoader workers (``workers`` of them): their proportional set size and the bytes
    that only they have; ``worker``, one of them; ``validation``, one inside fit: ``rss_bytes`` at its batches, at most
    32 of ``batches``, and the bytes that the C allocator has handed out, empty where these are unknown; or ``peak``, an
    ``action`` outside the training steps in which the peak RSS rose: before it and after it.
    With the action ``before_steps`` it is the RSS when the recording began, and the peak until then.

    A worker has its number in its loader and the loader's data set, the bytes that it shares with other processes, and
    since its start: processor time, time ready to run without a core, time waiting for block devices and bytes read;
    batches, the time and the processor time in which it made them, the part of ``collate_fn``, and the time in which it
    had nothing to do. ``lock_waits`` of the ``looks`` at its first fetches saw it wait for a lock of several processes,
    mostly at the line ``lock``; ``functions`` has self and total nanoseconds of each function in them. ``exit_code`` is
    of one that died, a signal's number with a minus sign.
    A ``thread`` of Python has its processor time in ``elapsed_ns``, of which the training thread slept ``asleep_ns``.
    """

    series = "processes"

    kind: str | None = None
    action: str | None = None
    workers: Int64 | None = None
    pss_bytes: Int64 | None = None
    private_bytes: Int64 | None = None
    batches: Int64 | None = None
    rss_bytes: list[Int64] = msgspec.field(default_factory=list)
    heap_bytes: list[Int64] = msgspec.field(default_factory=list)
    pid: Int64 | None = None
    worker: Int64 | None = None
    dataset: str | None = None
    shared_bytes: Int64 | None = None
    cpu_ns: Int64 | None = None
    core_wait_ns: Int64 | None = None
    io_wait_ns: Int64 | None = None
    read_bytes: Int64 | None = None
    fetch_ns: Int64 | None = None
    fetch_cpu_ns: Int64 | None = None
    collate_ns: Int64 | None = None
    queue_wait_ns: Int64 | None = None
    looks: Int64 | None = None
    lock_waits: Int64 | None = None
    lock: str | None = None
    functions: dict[str, list[Int64]] = msgspec.field(default_factory=dict)
    exit_code: Int64 | None = None
    thread: str | None = None
    elapsed_ns: Int64 | None = None
    asleep_ns: Int64 | None = None


class AllocatorRow(SeriesRow, gc=False):
    """The counters of a device's allocator at a mark; written with all of torch's statistics under torch's names."""

    series = "allocator"

    device: str | None = None
    allocated_bytes: Int64 | None = msgspec.field(name="allocated_bytes.all.current", default=None)
    peak_allocated_bytes: Int64 | None = msgspec.field(name="allocated_bytes.all.peak", default=None)
    reserved_bytes: Int64 | None = msgspec.field(name="reserved_bytes.all.current", default=None)
    peak_reserved_bytes: Int64 | None = msgspec.field(name="reserved_bytes.all.peak", default=None)
    num_alloc_retries: Int64 | None = None


class GarbageRow(SeriesRow):
    """One collection of Python's garbage collector."""

    series = "garbage"

    duration_ns: Int64 | None = None
    generation: Int64 | None = None
    collected: Int64 | None = None
    uncollectable: Int64 | None = None


class ThroughputRow(SeriesRow, gc=False, omit_defaults=False):
    """The size of a step's batch, its duration, its FLOP, and the device's peak in FLOP/s.

    ``elements`` are those of all tensors of the batch. Of a batch of sequences also the positions, those that are
    padding, and of these the ones beyond its longest sample.
    """

    series = "throughput"

    samples: Int64 | None = None
    tokens: Int64 | None = None
    duration_ns: Int64 | None = None
    flops: Int64 | None = None
    peak_flops: float | None = None
    positions: Int64 | None = None
    padded: Int64 | None = None
    beyond_longest: Int64 | None = None
    elements: Int64 | None = None


class SavedTensorsRow(SeriesRow):
    """Saved activations at the start of a backward, or bytes by category at the end of a step (``held``).

    By module: ``modules`` has the bytes saved in it and with its submodules, the count of forwards, their ns, and the
    bytes of their inputs; ``parameters`` the bytes of parameters and gradients. ``detects_anomaly`` is whether a
    module's forward ran under autograd's anomaly detection, ``doubles`` the modules that returned float64.
    """

    series = "saved_tensors"

    activation_bytes: Int64 | None = None
    unattributed_bytes: Int64 | None = None
    storages: Int64 | None = None
    uncounted: Int64 | None = None
    dtypes: dict[str, Int64] = msgspec.field(default_factory=dict)
    modules: dict[str, list[Int64 | None]] = msgspec.field(default_factory=dict)
    attribution: str | None = None
    held: dict[str, Int64 | None] | None = None
    parameters: dict[str, list[Int64 | None]] = msgspec.field(default_factory=dict)
    note: str | None = None
    detects_anomaly: bool | None = None
    doubles: list[str] = msgspec.field(default_factory=list)


class PeakRow(SeriesRow):
    """Memory by category at a tracked moment; ``kind`` is ``peak``, ``end``, or ``module`` for a module's own row."""

    kind: str | None = None
    module: str | None = None
    state: str | None = None
    call: Int64 | None = None
    device: str | None = None
    total_bytes: Int64 | None = None
    categories: dict[str, Int64] | None = None


class FunctionRow(SeriesRow):
    """The start or end (``point``) of a call of a named function, with the sizes at that moment.

    Written with all of torch's statistics under torch's names.
    """

    series = "functions"

    function: str | None = None
    number: Int64 | None = None
    depth: Int64 | None = None
    thread: str | None = None
    raised: str | None = None
    rss: Int64 | None = None
    vms: Int64 | None = None
    rss_diff: Int64 | None = None
    npp_diff: Int64 | None = None
    allocated_bytes: Int64 | None = msgspec.field(name="allocated_bytes.all.current", default=None)
    reserved_bytes: Int64 | None = msgspec.field(name="reserved_bytes.all.current", default=None)
    peak_allocated_bytes: Int64 | None = msgspec.field(name="allocated_bytes.all.peak", default=None)


class RegionRow(SeriesRow, gc=False, omit_defaults=False):
    """Memory at a named point: ``point`` is ``snapshot``, or ``start`` or ``end`` of a region."""

    series = "snapshots"

    name: str | None = None
    rss_bytes: Int64 | None = None
    peak_rss_bytes: Int64 | None = None


class HangRow(SeriesRow, gc=False):
    """Where a rank is; ``waited_ns`` since the start of its step.

    ``kind`` is ``hang`` for a step that has not ended after ``limit_ns``, ``asked`` if another rank has such a step,
    ``end`` when the step has ended after all, ``exception`` with its ``error``, ``heartbeat``, and ``other`` for the
    last one of ``peer``, a rank on the same machine, with the ``state`` of its process. ``function`` is the innermost
    one of the training thread, or of the ``worker`` that it waits for; ``place`` the program's innermost line, if any.
    """

    series = "hangs"

    kind: str | None = None
    phase: str | None = None
    waited_ns: Int64 | None = None
    limit_ns: Int64 | None = None
    function: str | None = None
    place: str | None = None
    source: str | None = None
    error: str | None = None
    peer: Int64 | None = None
    state: str | None = None
    pid: Int64 | None = None
    host: str | None = None
    worker: Int64 | None = None


class CollectiveRow(SeriesRow, gc=False):
    """One of the last collectives of a rank, the ``number``-th of its ``group``; ``waiting`` or ``completed``."""

    series = "collectives"

    group: str | None = None
    number: Int64 | None = None
    operation: str | None = None
    tensors: str | None = None
    state: str | None = None


WITH_GRAPH: Final = " with its graph"
"""In the content of a holder: its tensors keep the graphs, and the activations, that computed them."""


OF_LARGER: Final = " of a larger tensor"
"""In the content of a holder: each of its tensors is a part of another one, which it keeps whole."""


class HolderRow(SeriesRow, gc=False):
    """A holder of memory that grew between ``since_step`` and ``step``, as the search at ``step`` found it.

    ``place`` is the chain from a variable to it, ``LitGPT.history[...]``, ``line`` and ``source`` the assignment of the
    variable; ``content`` describes an entry, ``count`` is their number, ``added`` the new ones, ``added_bytes`` their
    estimated size, and ``bound`` the number that the container is limited to. ``grown_bytes`` is the growth of RSS, or
    of the device's allocated bytes. ``kind`` is ``remainder`` for the part that no object explains, ``free memory`` if
    the C allocator keeps it, ``mapped file`` and ``first touch`` for pages that existed before, and ``nothing`` if the
    search found nothing that has grown; ``asked`` is whether a request caused the search.
    """

    series = "holders"

    kind: str | None = None
    place: str | None = None
    content: str | None = None
    line: str | None = None
    source: str | None = None
    bound: Int64 | None = None
    count: Int64 | None = None
    added: Int64 | None = None
    added_bytes: Int64 | None = None
    grown_bytes: Int64 | None = None
    since_step: Int64 | None = None
    asked: bool | None = None

    @property
    def keeps_graphs(self) -> bool:
        """Whether tensors keep their graphs."""
        return WITH_GRAPH in (self.content or "")

    @property
    def keeps_whole(self) -> bool:
        """Whether tensors keep the larger ones that they are parts of."""
        return OF_LARGER in (self.content or "")


class ActionTotalRow(SeriesRow, gc=False):
    """Self time of an action over the steps of a run, without its first step; ``kind`` is ``total``.

    An action that runs in several phases has a row for each. The rows of steps ``in_window``, and those of the steps
    outside windows, sum to the durations of their ``steps``. ``count`` is the number of calls, ``max_ns`` the most in
    one step, ``max_step``.
    """

    series = "actions"

    kind: str | None = None
    action: str | None = None
    phase: str | None = None
    in_window: bool | None = None
    steps: Int64 | None = None
    count: Int64 | None = None
    total_ns: Int64 | None = None
    max_ns: Int64 | None = None
    max_step: Int64 | None = None


class StallRow(SeriesRow, gc=False):
    """A step outside windows that took more than twice the running median; ``kind`` is ``stall``.

    ``action`` is the action whose self time exceeded its mean so far the most, ``action_ns`` its self time in the step.
    """

    series = "actions"

    kind: str | None = None
    duration_ns: Int64 | None = None
    median_ns: Int64 | None = None
    action: str | None = None
    phase: str | None = None
    action_ns: Int64 | None = None


def columns_of(row: SeriesRow) -> dict[str, Any]:
    """Return the columns of a row that are written, in the order of the file."""
    columns: dict[str, Any] = msgspec.to_builtins(row, enc_hook=str)
    return columns


def encode_rows(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as JSON lines; values that JSON does not have are written as their ``str``."""
    return "".join(json.dumps(row, default=str) + "\n" for row in rows)
