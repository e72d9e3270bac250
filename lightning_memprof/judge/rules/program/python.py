"""The program outside of its modules: Python in the training step and in other threads, callbacks, hooks, transfers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

import msgspec

from lightning_memprof.account.ledger.model import TimeLedger, TimeLine, grouped, total
from lightning_memprof.account.steps.events import FORWARD
from lightning_memprof.account.steps.lines import Spot, lines, spots
from lightning_memprof.artifacts.series import MODULE_CALL, ProcessRow
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Finding, Recovery
from lightning_memprof.judge.measures import MOST, OF_VALUES, READS, VIEWS
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.rules.program.lines import COPY_LESS, has, of_action, of_spot
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_bytes, format_ns, percent

# Calls of operators and modules take some Python everywhere.
NOTABLE_PYTHON: Final = 0.10
# In a forward of fewer operators, a recording explains the remaining time only by a line of the program.
MIN_CALLED: Final = 10
SAVED_PYTHON: Final = (0.5, 0.9)
SAVED_READS: Final = (0.8, 1.0)
# A loop over values reads at least this many.
MIN_READS: Final = 256
# Python collects young objects after this many new ones; a value that is read makes one or two.
COLLECTED_AFTER: Final = 700
# What torch calls to write a tensor as text, beside the reads of its values.
FORMATS: Final = frozenset({"aten::masked_select", "aten::resolve_conj"})
NO_TEXT: Final = 'Write tensors as text once in many steps, and in messages that are read: logger.debug("%s", tensor).'
AT_ONCE: Final = (
    "Do the work of {name} for all values at once, on tensors or NumPy arrays, not in Python loops; or in the "
    "DataLoader's workers; or outside the step."
)
NO_LOOPS: Final = "Compute on whole tensors, and read values back (.item(), .tolist()) once in many steps."


class _Python(msgspec.Struct, frozen=True, kw_only=True):
    """Time outside operators in the forward of a module, or in the training step (an empty path).

    ``reads`` is the number of values that it reads one by one; then ``ns`` has the operators that read them, and the GC
    pauses of the objects that these make. ``formats``: torch reads them to write tensors as text. ``is_most``:
    operators have less of the forward.
    """

    module: str
    ns: float
    reads: float
    formats: bool = False
    is_most: bool = False


def python_time(facts: Facts) -> Finding | None:
    """Find a forward, or the training step around it, that computes in Python and not in operators.

    Recovers 50% to 90% of the time outside operators. Where values are read one by one, the time includes the reads and
    the GC pauses of their objects, one collection for 700 of them: recovers 80% to 100%.
    """
    if (worst := facts.heaviest(lambda ledger: _python(ledger).ns)) is None:
        return None
    rank, ledger = worst
    python = _python(ledger)
    called = sum(line.called for line in ledger.of("forward"))
    at = _line(rank, python) if python.is_most else None
    if python.ns < (POLICY.note if python.reads else NOTABLE_PYTHON) * ledger.step_ns:
        return None
    if not called or (called < MIN_CALLED and (at is None or at.place is None)):
        return None
    ns, share = python.ns, ledger.share_text(python.ns)
    where = f"the forward of {python.module}" if python.module else "training_step, outside of its submodules,"
    outside = f"Python code in {where} takes {share}"
    if python.reads:
        where, count = where.partition(",")[0], f"{python.reads:,.0f}"
        outside = f"Scalar loop: {where} reads {count} tensor values one by one (.item()): {share}"
        if python.formats:
            outside = f"Tensors as text: {where} formats tensors (print, f-string, repr), {count} values: {share}"
    saved = SAVED_READS if python.reads else SAVED_PYTHON
    worth = Recovery(unit="ns", min=ns * saved[0], max=ns * saved[1], whole=ledger.step_ns)
    return Finding(
        rule="python_time",
        title=f"{outside}{facts.on_rank(rank)}{has(at, 'this time') if at else ''}.",
        why=(
            f"{format_ns(ns)} of {ledger.length_text}: each .item(), float() or bool() of a tensor "
            "is an operator and an object, which the GC collects."
            if python.reads
            else f"{format_ns(ns)} of {ledger.length_text} are outside operators: self.log, metrics, "
            "NumPy, or loops over values."
        ),
        remedies=(
            *((NO_TEXT,) if python.formats else ()),
            *((NO_LOOPS,) if python.reads else ()),
            *((of_spot(at) or (AT_ONCE.format(name=at.function),)) if at else ()),
            "Log less per step: one self.log_dict(values, on_step=False, on_epoch=True), not many self.log calls.",
            *(() if python.reads else (NO_LOOPS,)),
            "See the functions: ExtendedPyTorchProfiler(with_stack=True).",
        ),
        evidence=facts.pulse_and_trace(rank),
        numbers={
            "rank": rank.rank,
            "module": python.module or None,
            "python_ns": ns,
            "reads": python.reads,
            "duration_ns": ledger.step_ns,
        },
        **worth.parts,
    )


def _line(rank: Rank, python: _Python) -> Spot | None:
    """Return the program's longest line, in the training step itself or in the forward of modules."""
    rows = lines(rank, FORWARD["fit"])
    return next(iter(spots([row for row in rows if (MODULE_CALL in row.functions) == bool(python.module)])), None)


def _python(ledger: TimeLedger) -> _Python:
    """Return the module, or the training step, with the most time outside operators."""
    found: dict[str, list[TimeLine]] = defaultdict(list)
    for line in grouped(ledger.of("forward")):
        found[line.module or ""].append(line)
    return max((_in_python(ledger, *of) for of in found.items()), key=lambda found: found.ns, default=NO_PYTHON)


NO_PYTHON: Final = _Python(module="", ns=0.0, reads=0.0)


def _in_python(ledger: TimeLedger, module: str, of_module: Sequence[TimeLine]) -> _Python:
    of_values = [line for line in of_module if line.operator in OF_VALUES]
    reads = sum(line.called for line in of_values if line.operator in READS)
    if reads < MIN_READS:
        # Collectives of the strategy around the forward of the model run outside operators, too.
        waits = 0.0 if module else ledger.communicates("collective")
        ns = max(total(line for line in of_values if not line.operator) - waits, 0.0)
        return _Python(module=module, ns=ns, reads=0.0, is_most=2 * ns >= total(of_module))
    pauses = ledger.of("gc_pauses")
    collections = sum(line.count for line in pauses)
    collected = min(reads / (COLLECTED_AFTER * collections), 1.0) if collections else 0.0
    ns = total(of_values) + total(pauses) * collected
    called = {line.operator for line in of_module if line.called}
    return _Python(module=module, ns=ns, reads=reads, formats=called >= FORMATS)


ADVICE: Final = {
    "RichProgressBar": "Draw less often: RichProgressBar(refresh_rate=20).",
    "TQDMProgressBar": "Draw less often: TQDMProgressBar(refresh_rate=20).",
}
# Hooks that look at gradients, which are as many tensors as the model has parameters.
GRADIENTS: Final = (
    "Handle all gradients in one call in {name}, or every N batches: Trainer(gradient_clip_val=1.0), "
    "torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0), torch._foreach_norm."
)
BUILD_ONCE: Final = (
    "Build it once: read the data in setup(), and leave Trainer(reload_dataloaders_every_n_epochs=0) as it is."
)
# Of these hooks the remedy leaves the first call.
ONCE: Final = frozenset({"train_dataloader", "val_dataloader"})
SCHEDULE: Final = (
    'Compute the factors of the learning rate once, into a list, or update it once per epoch: {{"interval": "epoch"}}.'
)
OF_HOOKS: Final = {
    **dict.fromkeys(("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"), GRADIENTS),
    **dict.fromkeys(ONCE, BUILD_ONCE),
    "lr_scheduler_step": SCHEDULE,
}
TRANSFER: Final = ".batch_to_device"
BEFORE_TRANSFER: Final = "on_before_batch_transfer"
ON_GPU: Final = (
    "Do the work of {name} on the GPU, in on_after_batch_transfer, or in workers: in collate_fn or the data set."
)
TENSORS: Final = "Return tensors from collate_fn, not lists of numbers: the transfer visits each object of a batch."
PIN: Final = "Copy from pinned memory, which does not block: DataLoader(pin_memory=True)."
# What a hook does, as its recorded operators show.
WHOLE: Final = "Handle the whole batch at once in {name}: it calls {often}, for one sample or part each."
REUSE: Final = (
    "Use the outputs of the step in {name} instead of the forward of {module} (return them from training_step); for "
    "other data, run it every N batches."
)
ONE_READ: Final = (
    "Read one value in {name}: stack the tensors, reduce them on the GPU, then .item(). Every N batches is enough "
    "where nothing depends on it."
)
SYNCED: Final = (
    "Log without sync_dist=True in the steps, or average one stacked tensor over ranks: each of these values is a "
    "collective of its own."
)
# Parts whose modules and operators are those of an action.
LOOKS_INSIDE: Final = frozenset({"callback", "module_hook", "transfer"})
# copy.deepcopy calls set_ for each tensor.
COPIES: Final = frozenset({"aten::copy_", "aten::clone", "aten::set_"})
# Fewer calls of an operator in a hook are not a loop over samples, parameters or values.
OFTEN: Final = 32
# Fewer copies may be of some tensors, not of the model.
LEAST_COPIED: Final = 8
# Fewer collectives in a step are a few values.
MANY_SYNCED: Final = 4


NO_BUFFERS: Final = (
    "Leave fixed tensors out of checkpoints: self.register_buffer(name, tensor, persistent=False); make them again in "
    "__init__."
)


def work_of(facts: Facts, rank: Rank, action: TimeLine) -> tuple[str, tuple[str, ...]]:
    """Return what an action does, to end a sentence, and the next steps that fit this.

    Recorded operators show a loop over an operator, the forward of a module, and collectives of ``self.log``.
    """
    if action.part == "checkpoint":
        return _of_checkpoint(facts, rank)
    owner, _, hook = action.name.rpartition(".")
    special = OF_HOOKS.get(hook) or ADVICE.get(owner)
    steps = (special.format(name=action.name),) if special else ()
    if hook == BEFORE_TRANSFER and not rank.facts.is_cpu:
        steps = (ON_GPU.format(name=action.name), *steps)
    if action.name.endswith(TRANSFER):
        # Without a device there is nothing to copy.
        return (": it visits each object of a batch", (TENSORS,)) if rank.facts.is_cpu else ("", (PIN, TENSORS))
    recorded, calls = facts.host_ledger(rank), max(action.count, 1.0)
    lines = [line for line in recorded.lines if line.name == action.name] if recorded and action.name else []
    synced = sum(line.count for line in lines if line.part == "rank_wait")
    if action.part == "self_log" and synced >= MANY_SYNCED:
        return f", {synced:,.0f} collectives per step", (SYNCED,)
    lines = [line for line in lines if line.part == action.part in LOOKS_INSIDE]
    reads = max((line.called for line in lines if line.operator in READS), default=0.0) / calls
    if reads >= OFTEN and not rank.facts.is_cpu:
        return f": it reads {reads:,.0f} values from the GPU, one by one", (ONE_READ.format(name=action.name), *steps)
    is_transfer = action.part == "transfer"
    modules = Counter[str]()
    for line in lines:
        modules[(line.module or "").partition(".")[0]] += round(line.ns)
    module, ns = modules.most_common(1)[0] if modules else ("", 0)
    if module and ns >= MOST * max(total(lines), action.ns) and not is_transfer:
        return f": it runs {module}", (REUSE.format(name=action.name, module=module), *steps)
    loops = [line for line in lines if line.operator and line.operator not in VIEWS and line.called >= OFTEN * calls]
    at = of_action(rank, action.name)
    fit = of_spot(at) if at is not None and hook not in ONCE else ()
    steps = (*fit, *steps)
    loop = max(loops, key=lambda line: line.ns, default=None)
    often = f"calls {loop.operator} {loop.called / calls:,.0f} times" if loop else ""
    makes_copies = loop is not None and loop.operator in COPIES
    copied = _copied(rank, lines, calls) or ("tensors" if makes_copies else "")
    if copied and not is_transfer:
        steps = tuple(dict.fromkeys((COPY_LESS.format(name=action.name), *steps)))
        often = f"{often}, copies of {copied}" if makes_copies else f"{often}{' and ' if often else ''}copies {copied}"
    does = has(at, "it", action.name) if at is not None and at.place else ""
    # Other hooks need not run for each batch.
    whole = (WHOLE.format(name=action.name, often=often.removeprefix("calls ")),) if loop and is_transfer else ()
    return f"{f': it {often}' if often else ''}{does}", (*whole, *steps)


def _of_checkpoint(facts: Facts, rank: Rank) -> tuple[str, tuple[str, ...]]:
    ledger = facts.byte_ledgers.get(rank.rank)
    held = ledger.bytes("buffer") if ledger is not None else 0
    trained = ledger.bytes("parameter") + ledger.bytes("optimizer_state") if ledger is not None else 0
    if held <= trained:
        return "", ()
    sizes = f"{format_bytes(held)} of buffers, {format_bytes(trained)} of parameters and optimizer state"
    return f": the model has {sizes}", (NO_BUFFERS,)


def _copied(rank: Rank, lines: Sequence[TimeLine], calls: float) -> str:
    """Return ``the model`` if lines copy as many tensors as the optimizers update, as ``copy.deepcopy`` does."""
    optimizers = rank.training.optimizers if rank.training else []
    least = max(sum(optimizer.parameters or 0 for optimizer in optimizers), LEAST_COPIED)
    copies = Counter[str]()
    for line in lines:
        copies[line.operator or ""] += round(line.called / calls)
    return "the model" if max(copies["aten::clone"], copies["aten::set_"]) >= least else ""


# A thread that takes less of a core delays the training by little; in a shorter time it may work for once.
MIN_BUSY: Final = 0.1
MIN_ELAPSED_NS: Final = 300_000_000
# The training thread may sleep for another reason: a disk, a lock of a library.
OF_SLEEP: Final = (0.25, 1.0)
# Parts in which it has no reason to sleep.
AWAKE: Final = (
    "forward", "backward", "optimizer", "callback", "module_hook", "forward_hook", "backward_hook", "self_log",
    "metric", "logging", "transfer", "data_wait", "untracked",
)  # fmt: skip


def busy_thread(facts: Facts) -> list[Finding]:
    """Find another thread of Python that computes while the training thread sleeps: they take turns at Python's lock.

    Recovers a quarter to all of the thread's processor time, at most the sleep of the training thread without its waits
    for workers and for other ranks.
    """
    found = [finding for rank in facts.run.ranks if (finding := _busiest(facts, rank)) is not None]
    return sorted(found, key=lambda finding: -finding.weight)[:1]


def _busiest(facts: Facts, rank: Rank) -> Finding | None:
    ledger = facts.ledgers.get(rank.rank)
    rows = [row for row in rank.read(ProcessRow).rows if row.kind == "thread" and row.elapsed_ns]
    if ledger is None or not rows:
        return None
    elapsed = rows[-1].elapsed_ns or 1
    # With an accelerator the training thread sleeps for that, too.
    if elapsed < MIN_ELAPSED_NS or not rank.facts.is_cpu:
        return None
    row = max((row for row in rows if row.elapsed_ns == elapsed), key=lambda row: row.cpu_ns or 0)
    busy, asleep = (row.cpu_ns or 0) / elapsed, (row.asleep_ns or 0) / elapsed
    workers = any(loader.num_workers for loader in rank.training.dataloaders) if rank.training else False
    asleep -= ledger.share("rank_wait", "data_wait") if workers else ledger.share("rank_wait")
    ns = max(min(min(busy, asleep) * ledger.step_ns, ledger.ns(*AWAKE)), 0.0)
    worth = Recovery(unit="ns", min=ns * OF_SLEEP[0], max=ns * OF_SLEEP[1], whole=ledger.step_ns)
    if busy < MIN_BUSY or worth.share < POLICY.note:
        return None
    return Finding(
        rule="busy_thread",
        title=(
            f"Busy thread: {row.thread} uses {percent(busy)} of a core; the training thread sleeps "
            f"{percent(asleep)} of each step{facts.on_rank(rank)}."
        ),
        why=(
            f"It ran for {format_ns(row.cpu_ns or 0)} of {format_ns(elapsed)}. One of Python's "
            "threads runs at a time (GIL): the training thread sleeps, apart from its waits for workers and ranks."
        ),
        remedies=(
            f"Let {row.thread} do less, or sleep longer between its turns.",
            "Run it in a separate process: multiprocessing.get_context('spawn').Process(target=...).",
        ),
        evidence=(facts.pulse(rank),),
        numbers={
            "rank": rank.rank,
            "thread": row.thread,
            "cores": busy,
            "asleep_share": asleep,
            "duration_ns": ledger.step_ns,
        },
        **worth.parts,
    )
