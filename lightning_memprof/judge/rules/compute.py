"""Time in the model: its precision, its threads, its optimizer, and a loss that broadcasts."""

from __future__ import annotations

from collections import Counter
from typing import Final

from lightning_memprof.account.ledger.model import TimeLedger, total
from lightning_memprof.artifacts.manifest import OptimizerFacts, ParameterFacts
from lightning_memprof.artifacts.series import SavedTensorsRow
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Finding, Recovery
from lightning_memprof.judge.measures import ranks_on_host, torch_threads
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import MIB, format_bytes, format_count, format_ns, percent

# Half as many numbers fit into a vector register and through memory: operators on float64 take about twice the time on
# a CPU, and up to 64 times on GPUs without float64 units.
DOUBLE: Final = (0.35, 0.5)
MIN_DOUBLE: Final = 0.25
PASSES: Final = ("forward", "backward", "optimizer")


def double_precision(facts: Facts) -> Finding | None:
    """Find a training run that computes in float64.

    Recovers 35% to 50% of forward, backward and optimizer, times the share of float64: in the saved activations, in the
    parameters where these were not recorded, or in the time of modules that return it where that is more.
    Lost: digits that training does not need.
    """
    if (heaviest := facts.heaviest(lambda ledger: ledger.ns("forward", "backward"))) is None:
        return None
    rank, ledger = heaviest
    source, share = _double_share(rank, ledger)
    if share < MIN_DOUBLE:
        return None
    spent = ledger.ns(*PASSES) * share
    worth = Recovery(unit="ns", min=spent * DOUBLE[0], max=spent * DOUBLE[1], whole=ledger.step_ns)
    return Finding(
        rule="double_precision",
        title=f"Double precision: {percent(share)} of the {source}{facts.on_rank(rank)}.",
        why=(
            f"Forward, backward and optimizer take {format_ns(spent)} of {ledger.length_text}; on "
            "float64, operators take about twice the time and memory."
        ),
        remedies=(
            (
                "Compute in float32: cast inputs with .float(), remove .double(), "
                "torch.set_default_dtype(torch.float64) and Trainer(precision='64-true'); NumPy makes float64."
            ),
        ),
        evidence=(facts.pulse(rank), *facts.recorded(rank, "saved_tensors")),
        numbers={"rank": rank.rank, "double_share": share, "duration_ns": round(ledger.step_ns)},
        **worth.parts,
    )


def _double_share(rank: Rank, ledger: TimeLedger) -> tuple[str, float]:
    """Return what is float64, and its share: of bytes of floating-point numbers, or of the model's time."""
    rows = [row for window in rank.windows for row in window.read(SavedTensorsRow).recorded if row.dtypes]
    parameters = rank.training.parameter_dtypes if rank.training else {}
    source, dtypes = ("saved activations", rows[-1].dtypes) if rows else ("parameters", parameters)
    total = sum(size for dtype, size in dtypes.items() if "float" in dtype)
    share = dtypes.get("float64", 0) / total if total else 0.0
    # Without gradients, as in a part that prepares inputs, no activation is saved.
    paths = {path for window in rank.windows for row in window.read(SavedTensorsRow).recorded for path in row.doubles}
    spent: Counter[str] = Counter()
    for line in ledger.of("forward", "backward"):
        if path := next((path for path in sorted(paths) if f"{line.module}.".startswith(f"{path}.")), None):
            spent[path] += round(line.ns)
    timed = spent.total() / max(ledger.ns(*PASSES), 1)
    if timed <= share:
        return f"{source} are float64", share
    return f"model's time is in modules that return float64, mostly {spent.most_common(1)[0][0]}", timed


# With twice as many threads as cores, each parallel region waits for threads that do not run.
OVERSUBSCRIBED: Final = 2.0
_COMPUTED: Final = ("forward", "backward", "optimizer", "core_wait")
LEAST_RECOVERED: Final = 0.1


def thread_oversubscription(facts: Facts) -> Finding | None:
    """Find operators that use many more threads than there are cores.

    Recovers at most the share of the threads that cannot run at the same time (1 - cores / threads) of forward,
    backward, optimizer and the wait for a core, at least 10% of them: a parallel region ends with its last thread.
    """
    if (heaviest := facts.heaviest(lambda ledger: ledger.ns(*_COMPUTED))) is None or not heaviest[0].facts.is_cpu:
        return None
    rank, ledger = heaviest
    cores, threads = rank.facts.cpu_count, torch_threads(rank)
    here = len(ranks_on_host(facts, rank))
    if not cores or not threads or not is_oversubscribed(facts, rank):
        return None
    spent = ledger.ns(*_COMPUTED)
    most = max(1 - cores / (threads * here), LEAST_RECOVERED)
    worth = Recovery(unit="ns", min=spent * LEAST_RECOVERED, max=spent * most, whole=ledger.step_ns)
    ranks = f" in each of {here} ranks" if here > 1 else ""
    wanted = max(cores // here, 1)
    return Finding(
        rule="thread_oversubscription",
        title=f"Thread oversubscription: operators use {threads} threads{ranks} on {format_count(cores, 'core')}.",
        why=(
            f"Forward, backward, optimizer and waiting for a core take {format_ns(spent)} of a "
            f"{format_ns(ledger.step_ns)} step; each parallel operator waits until all of its threads have had a "
            "core."
        ),
        remedies=(f"Use one thread per core: torch.set_num_threads({wanted}), or OMP_NUM_THREADS={wanted}.",),
        evidence=(facts.pulse(rank),),
        numbers={"rank": rank.rank, "threads": threads, "ranks_on_host": here, "cores": cores},
        **worth.parts,
    )


# The parts of a shorter call cost more to hand out and to wait for than they save.
PARALLEL_NS: Final = 100_000
# Of what threads save if all work is divided: products of large matrices nearly all, other operators wait for memory.
SAVED_BY_THREADS: Final = (0.3, 1.0)


def idle_cores(facts: Facts) -> Finding | None:
    """Find operators with fewer threads than half of the cores that other ranks and workers leave.

    Recovers 30% to all of ``1 - threads / cores`` of the operators that take 0.1 ms or longer per call.
    """
    if (heaviest := facts.heaviest(_parallel)) is None or not heaviest[0].facts.is_cpu:
        return None
    rank, ledger = heaviest
    threads, cores, spent = torch_threads(rank), _cores_for(facts, rank), _parallel(ledger)
    if not threads or cores < 2 * threads or not spent:
        return None
    saved = spent * (1 - threads / cores)
    worth = Recovery(unit="ns", min=saved * SAVED_BY_THREADS[0], max=saved * SAVED_BY_THREADS[1], whole=ledger.step_ns)
    if worth.share < POLICY.note:
        return None
    return Finding(
        rule="idle_cores",
        title=(
            f"Operators use {format_count(threads, 'thread')} on {cores} cores{facts.on_rank(rank)}: "
            f"{ledger.share_text(spent)} can run in parallel."
        ),
        why=(
            f"Operators of {format_ns(PARALLEL_NS)} per call and longer take {format_ns(spent)} of "
            f"{ledger.length_text}; torch.get_num_threads() is {threads}."
        ),
        remedies=(f"Use all cores: torch.set_num_threads({cores}), or OMP_NUM_THREADS={cores}.",),
        evidence=(facts.pulse(rank), *facts.recorded(rank, "operator_trace")),
        numbers={"rank": rank.rank, "threads": threads, "cores": cores, "parallel_ns": round(spent)},
        **worth.parts,
    )


def _parallel(ledger: TimeLedger) -> float:
    """Return the time of forward and backward in long calls of operators."""
    lines = (line for line in ledger.of("forward", "backward") if line.operator)
    return total(line for line in lines if line.ns >= PARALLEL_NS * max(line.count, 1))


def _cores_for(facts: Facts, rank: Rank) -> int:
    """Return the cores for the operators of a rank: without hyperthreads, other ranks and DataLoader workers."""
    cores, physical = rank.facts.cpu_count or 0, rank.facts.environment.get("physical_cpus")
    here = len(ranks_on_host(facts, rank))
    loaders = rank.training.dataloaders if rank.training else []
    workers = max((loader.num_workers or 0 for loader in loaders), default=0)
    return (min(cores, physical) if isinstance(physical, int) else cores // 2) // here - workers


def is_oversubscribed(facts: Facts, rank: Rank) -> bool:
    """Return whether operators use many more threads than there are cores."""
    cores, threads = rank.facts.cpu_count or 0, torch_threads(rank) or 0
    return bool(cores) and threads * len(ranks_on_host(facts, rank)) >= OVERSUBSCRIBED * cores


# Anomaly detection keeps a stack for each forward operator and checks each gradient for NaN: 1.4 to 3 times the time.
ANOMALY: Final = (0.3, 0.65)
ANOMALY_OFF: Final = "Switch it off: Trainer(detect_anomaly=False), torch.autograd.set_detect_anomaly(False)."
ANOMALY_REGION: Final = (
    "Remove torch.autograd.detect_anomaly() or set_detect_anomaly(True) from the program: it is on in forward, and off "
    "when the fit starts."
)


def _detects_anomaly(rank: Rank) -> bool:
    """Return whether it is on at the start of the fit, or in a recorded forward."""
    rows = (row for window in rank.windows for row in window.read(SavedTensorsRow).recorded)
    return bool(rank.training and rank.training.detect_anomaly) or any(row.detects_anomaly for row in rows)


def anomaly_detection(facts: Facts) -> Finding | None:
    """Find autograd's anomaly detection in use.

    Recovers 30% to 65% of forward and backward. Lost: the forward's stack when a gradient becomes NaN.
    """
    ranks = [rank for rank in facts.run.ranks if _detects_anomaly(rank)]
    if not ranks or ranks[0].rank not in facts.ledgers:
        return None
    rank, ledger = ranks[0], facts.ledgers[ranks[0].rank]
    spent = ledger.ns("forward", "backward")
    worth = Recovery(unit="ns", min=spent * ANOMALY[0], max=spent * ANOMALY[1], whole=ledger.step_ns)
    return Finding(
        rule="anomaly_detection",
        title=(f"Anomaly detection is on: forward and backward take {ledger.share_text(spent)}{facts.on_rank(rank)}."),
        why=(
            f"{format_ns(spent)} of {ledger.length_text}; anomaly detection keeps a stack for each "
            "forward operator and checks every gradient for NaN."
        ),
        remedies=(ANOMALY_OFF if rank.training and rank.training.detect_anomaly else ANOMALY_REGION,),
        evidence=(facts.pulse(rank),),
        numbers={"rank": rank.rank, "passes_ns": round(spent), "duration_ns": round(ledger.step_ns)},
        **worth.parts,
    )


# The Trainer's work around an optimizer step takes 1 to 2 ms for any model; fused saves none of it.
MIN_OPTIMIZER_NS: Final = 5_000_000
# The longer steps of an optimizer that accumulates gradients are at least this share of all.
REGULAR: Final = 0.1
# For fewer tensors a loop costs nothing, but where each operator reads all of a large one again.
FEW_TENSORS: Final = 20
# An optimizer of the program that calls as many operators for each tensor updates one by one.
PER_TENSOR: Final = 2
LARGE: Final = 16 * MIB
SEVERAL_PASSES: Final = frozenset({"Adagrad", "Adam", "AdamW"})
# An optimizer updates each group of parameters by calls of its own.
JOIN: Final = (
    "Join the parameter groups that have the same settings: {settings} instead of {groups}, each with all of its "
    "parameters."
)
FUSED: Final = frozenset({"Adagrad", "Adam", "AdamW", "SGD"})
FOREACH: Final = FUSED | {"ASGD", "Adadelta", "Adafactor", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"}
OF_TORCH: Final = FOREACH | {"LBFGS", "Muon", "SparseAdam"}
FUSE: Final = "Update all parameters in one kernel: torch.optim.{name}(..., fused=True)."
SPLIT: Final = (
    "Use a separate optimizer for the parameters with dense gradients, torch.optim.{name}(..., fused=True); fused does "
    "not support sparse gradients."
)
# With foreach=None torch uses the foreach implementation on these devices, and the loop on all others.
FOREACH_BY_DEFAULT: Final = ("cuda", "xpu", "mtia")
# One kernel for all parameters saves a third to two thirds of the loop's time.
FASTER: Final = (1 / 3, 2 / 3)
# Of an optimizer without a faster implementation: from this share of the step on; one step for two to four batches.
NOTABLE_OPTIMIZER: Final = 0.3
LESS_OFTEN: Final = (1 / 2, 3 / 4)
ACCUMULATE: Final = (
    "Step less often: Trainer(accumulate_grad_batches=4), or a larger batch; a step reads and writes all parameters."
)
TOGETHER: Final = (
    "Update all tensors at once in {name}.step: torch._foreach_add_, torch._foreach_mul_ and the like on lists of them."
)


def optimizer_bound(facts: Facts) -> Finding | None:
    """Find an optimizer that takes much of the step, and whether torch has a faster implementation for all tensors.

    Each group of parameters has calls of its own: of many groups with the same settings, all but one are needless.
    Recovers a third to two thirds of the time of the optimizer in a median step; of several, of the slowest one that
    loops. Without a faster implementation, half to three quarters: one step for two to four batches. Lost: the
    optimizer steps less often, for larger batches.
    """
    worst = facts.worst("optimizer")
    if worst is None or worst[0].rank not in facts.ledgers:
        return None
    rank, statistics = worst
    ledger = facts.ledgers[rank.rank]
    # An optimizer takes about the same time in each of its steps: a mean above the median is due to a few odd steps.
    # Hooks inside its phase are lines of their own, and so are its stalls, unless it steps every few batches only.
    stalls = [stall.excess_ns for stall in ledger.stalls if stall.owner == "optimizer"]
    regular = sum(stalls) / ledger.steps if len(stalls) >= REGULAR * ledger.steps else 0.0
    mean_share = min(statistics.share("optimizer"), (ledger.ns("optimizer") + regular) / ledger.step_ns)
    optimizers = rank.training.optimizers if rank.training else []
    is_dense = _embedding(rank) is not None  # whose time is that finding's
    is_large = sum(each.bytes for each in (rank.training.largest_parameters if rank.training else ())) >= LARGE
    recorded, is_read_often = facts.host_ledger(rank), is_large and not is_dense
    slow = [each for each in optimizers if _loops(each, recorded) and (is_read_often or not _has_few_tensors(each))]
    considered = sorted(slow or ([] if is_dense else optimizers), key=lambda optimizer: -_part_of(ledger, optimizer))
    mean_share *= _part_of(ledger, considered[0]) if considered else 0.0
    spent = min(mean_share, statistics.median_shares["optimizer"]) * ledger.step_ns
    saved = FASTER if slow else LESS_OFTEN
    worth = Recovery(unit="ns", min=spent * saved[0], max=spent * saved[1], whole=ledger.step_ns)
    least = POLICY.note if slow else NOTABLE_OPTIMIZER * LESS_OFTEN[1]
    if worth.share < least or not considered:
        return None
    optimizer_ns = round(mean_share * ledger.step_ns)
    if statistics.mean_ns < POLICY.short_step_ns and optimizer_ns < MIN_OPTIMIZER_NS:
        return None
    optimizer = considered[0]
    name, count = optimizer.name or "the optimizer", optimizer.parameters
    return Finding(
        rule="optimizer_bound",
        title=(
            f"Optimizer-bound: {name} updates {_tensors(optimizer, is_loop=bool(slow))} and takes "
            f"{ledger.share_text(optimizer_ns)}{facts.on_rank(rank)}."
        ),
        why=(
            f"{format_ns(optimizer_ns)} of {ledger.length_text}: {name} updates its "
            f"{f'{count:,} ' if count else ''}parameter tensors{' one by one' if slow else ''} "
            f"(foreach={optimizer.foreach}, fused={optimizer.fused} on {_device(optimizer)}"
            f"{f', {optimizer.groups:,} groups' if (optimizer.groups or 1) > 1 else ''})."
        ),
        remedies=_next_for_optimizer(optimizer, rank) if slow else _less_often(name),
        evidence=(facts.pulse(rank), *facts.recorded(rank, "hooks")),
        numbers={
            "rank": rank.rank,
            "optimizer_share": mean_share,
            "median_optimizer_share": statistics.median_shares["optimizer"],
            "optimizer_ns": optimizer_ns,
            "duration_ns": statistics.mean_ns,
            "optimizers": [found.fields for found in considered],
        },
        **worth.parts,
    )


def _part_of(ledger: TimeLedger, optimizer: OptimizerFacts) -> float:
    """Return the share of an optimizer, by its class, of the phase's time; 1 if it was not recorded."""
    lines = [line for line in ledger.of("optimizer") if line.name]
    whole = ledger.ns("optimizer") if lines else 0.0
    return total(line for line in lines if line.name == optimizer.name) / whole if whole else 1.0


def _loops(optimizer: OptimizerFacts, recorded: TimeLedger | None) -> bool:
    """Return whether an optimizer loops and has a faster implementation, or calls operators for each tensor itself."""
    if _has_needless_groups(optimizer):
        return True
    if optimizer.name not in OF_TORCH:
        lines = recorded.of("optimizer") if recorded else ()
        calls = sum(line.called for line in lines if line.name == optimizer.name)
        return not _has_few_tensors(optimizer) and calls >= PER_TENSOR * (optimizer.parameters or FEW_TENSORS)
    foreach, fused = optimizer.foreach, optimizer.fused
    if optimizer.name not in FOREACH or (_has_few_tensors(optimizer) and optimizer.name not in SEVERAL_PASSES):
        return False
    return not (fused or foreach or (foreach is None and _device(optimizer).startswith(FOREACH_BY_DEFAULT)))


def _tensors(optimizer: OptimizerFacts, *, is_loop: bool) -> str:
    tensors = f"{optimizer.parameters:,} tensors" if optimizer.parameters else "the parameters"
    in_groups = f" in {optimizer.groups:,} parameter groups" if _has_needless_groups(optimizer) else ""
    return f"{tensors}{in_groups or (' one by one' if is_loop else '')}"


def _has_few_tensors(optimizer: OptimizerFacts) -> bool:
    return (optimizer.parameters or FEW_TENSORS) < FEW_TENSORS


def _device(optimizer: OptimizerFacts) -> str:
    return optimizer.device or "cpu"


def _has_needless_groups(optimizer: OptimizerFacts) -> bool:
    return (optimizer.groups or 0) - (optimizer.settings or 0) >= FEW_TENSORS


def _less_often(name: str) -> tuple[str, ...]:
    return (*(() if name in OF_TORCH else (TOGETHER.format(name=name),)), ACCUMULATE)


def _next_for_optimizer(optimizer: OptimizerFacts, rank: Rank) -> tuple[str, ...]:
    name = optimizer.name or ""
    steps = (JOIN.format(settings=optimizer.settings, groups=optimizer.groups),)
    joined = steps if _has_needless_groups(optimizer) else ()
    if name not in OF_TORCH:
        return (*joined, *_less_often(name))
    if optimizer.fused or optimizer.foreach or name not in FOREACH:
        return joined
    foreach = f"torch.optim.{name}(..., foreach=True)"
    if name not in FUSED:
        return (*joined, f"Update the parameters in groups: {foreach}.")
    if rank.training and any(parameter.sparse for parameter in rank.training.largest_parameters):
        return (*joined, SPLIT.format(name=name))
    return (
        *joined,
        FUSE.format(name=name),
        f"If fused does not work (gradient clipping with 16-mixed): {foreach}.",
    )


# The optimizer updates every row of a dense embedding, also those that the batch did not use.
MIN_EMBEDDING: Final = 0.5


def dense_embedding(facts: Facts) -> Finding | None:
    """Find an optimizer that spends its time on a large embedding with dense gradients.

    Recovers the embedding's share of the parameters of the optimizer's time; sparse updates take next to none. Lost:
    momentum and weight decay of rows that the batch does not use.
    """
    worst = facts.worst("optimizer")
    if worst is None or worst[0].rank not in facts.ledgers:
        return None
    rank, ledger = worst[0], facts.ledgers[worst[0].rank]
    found = _embedding(rank)
    if found is None:
        return None
    embedding, share = found
    optimizers = rank.training.optimizers if rank.training else []
    owner = next((each for each in optimizers if embedding.name.partition(".")[0] in each.modules), None)
    spent = ledger.ns("optimizer") * (_part_of(ledger, owner) if owner else 1.0)
    share = 1.0 if owner and owner.parameters == 1 else share
    worth = Recovery(unit="ns", min=spent * share / 2, max=spent * share, whole=ledger.step_ns)
    if worth.share < POLICY.note:
        return None
    return Finding(
        rule="dense_embedding",
        title=(
            f"Optimizer-bound: the optimizer takes {ledger.share_text(spent)}{facts.on_rank(rank)}, mostly to update "
            f"all rows of the embedding {embedding.name}."
        ),
        why=(
            f"{embedding.name} ({format_bytes(embedding.bytes)}) is {percent(share)} of the parameters; its "
            f"gradient is dense: every row is updated in every step, {format_ns(spent)}."
        ),
        remedies=(
            (
                "Update only the rows that a batch uses: torch.nn.Embedding(..., sparse=True) with "
                "torch.optim.SparseAdam (or SGD) for it; two optimizers need self.automatic_optimization = False."
            ),
            *((FUSE.format(name=owner.name),) if owner and owner.name in FUSED else ()),
        ),
        evidence=(facts.pulse(rank), *facts.recorded(rank, "hooks")),
        numbers={"rank": rank.rank, "parameter": embedding.name, "parameter_share": share, "optimizer_ns": spent},
        **worth.parts,
    )


def _embedding(rank: Rank) -> tuple[ParameterFacts, float] | None:
    """Return the largest parameter if it is a dense embedding, and its share of all parameters."""
    training = rank.training
    if training is None or not training.largest_parameters:
        return None
    largest = training.largest_parameters[0]
    share = largest.bytes / max(sum(training.parameter_dtypes.values()), 1)
    is_dense = largest.module in {"Embedding", "EmbeddingBag"} and not largest.sparse
    return (largest, share) if is_dense and share >= MIN_EMBEDDING else None


# In these torch warns about different shapes, and broadcasts.
LOSSES: Final = ("aten::mse_loss", "aten::l1_loss", "aten::smooth_l1_loss", "aten::huber_loss")
BROADCAST: Final = "aten::broadcast_tensors"
# With two targets per prediction half of the work is needless, with thousands nearly all.
OF_ALL: Final = (0.5, 1.0)
SAME_SHAPE: Final = (
    "Give prediction and target the same shape, such as prediction.squeeze(-1) for (N, 1) and (N,): they broadcast to "
    "(N, N)."
)


def broadcast_loss(facts: Facts) -> Finding | None:
    """Find a loss whose prediction and target have different shapes: torch compares all that broadcasting pairs.

    Recovers half to all of the time of the loss's own operators, forward and backward: one target per prediction
    remains of two or more.
    """
    if (worst := facts.heaviest(lambda ledger: ledger.ns("forward", "backward"))) is None:
        return None
    rank, ledger = worst
    recorded = facts.host_ledger(rank) or ledger
    forward = [line for line in recorded.of("forward") if line.called]
    found = []
    for line in forward:
        # Other functions that broadcast, those of distributions, may mean it.
        losses = [loss for loss in forward if loss.operator in LOSSES and loss.module == line.module]
        if line.operator == BROADCAST and line.inside and line.called == sum(loss.called for loss in losses):
            found += losses
    if not found:
        return None
    names = {f"{loss.operator}{suffix}" for loss in found for suffix in ("", "_backward")}
    spent = total(line for line in ledger.of("forward", "backward") if line.operator in names)
    worth = Recovery(unit="ns", min=spent * OF_ALL[0], max=spent * OF_ALL[1], whole=ledger.step_ns)
    loss = max(found, key=lambda line: line.ns)
    name = (loss.operator or "").removeprefix("aten::")
    return Finding(
        rule="broadcast_loss",
        title=(
            f"The loss broadcasts: {name} gets a prediction and a target of different shapes and takes "
            f"{ledger.share_text(spent)}{facts.on_rank(rank)}."
        ),
        why=(
            f"{format_ns(spent)} of {ledger.length_text}. {name} compares each value of one with several of the other; "
            "torch warns that this likely leads to incorrect results."
        ),
        remedies=(SAME_SHAPE,),
        evidence=facts.pulse_and_trace(rank),
        numbers={
            "rank": rank.rank,
            "loss": loss.operator,
            "module": loss.module,
            "loss_ns": round(spent),
            "duration_ns": round(ledger.step_ns),
        },
        **worth.parts,
    )
