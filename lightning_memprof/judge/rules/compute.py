"""Time in the model and the optimizer: precision, threads, anomaly detection, optimizers, a loss that broadcasts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

from lightning_memprof.account.ledger.model import TimeLedger, TimeLine, scaled, total
from lightning_memprof.account.parts import Part
from lightning_memprof.account.steps.lines import Spot, optimizer_spot
from lightning_memprof.artifacts.manifest import OptimizerFacts, ParameterFacts
from lightning_memprof.artifacts.series import SavedTensorsRow
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.cores import core_load, is_oversubscribed, ranks_on_host, torch_threads
from lightning_memprof.judge.fact import PASSES, Fact
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Severity
from lightning_memprof.judge.operators import DECOMPOSES, fitting
from lightning_memprof.judge.optimizers import FOREACH, FUSED, OF_TORCH
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.judge.rule import Detail, Found, Rule
from lightning_memprof.judge.traces import remedies as remedies_for
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_bytes, format_count, format_ns, percent

WORK: Final[tuple[Part, ...]] = (*PASSES, Part.OPTIMIZER)
COMPUTED: Final[tuple[Part, ...]] = (*WORK, Part.CORE_WAIT)


def in_double(facts: Facts, fact: Fact) -> Detail:
    """Return the part of forward, backward and optimizer that computes in float64."""
    says, share, module = _double_share(fact.rank, fact.ledger)
    return Detail(
        lines=scaled(fact.lines, share * fact.ns),
        says=says,
        fields={"doubles": percent(share), "module": module},
        why="With float64, operators take about twice the time and memory of float32.",
        numbers={"double_share": share},
        evidence=facts.recorded(fact.rank, "saved_tensors"),
    )


def _double_share(rank: Rank, ledger: TimeLedger) -> tuple[str, float, str]:
    """Return a title, the share of float64 in the bytes of floating-point numbers or in the model's time, and where."""
    rows = [row for window in rank.windows for row in window.read(SavedTensorsRow).recorded]
    of_types = [row.dtypes for row in rows if row.dtypes]
    source, dtypes = "saved activations", of_types[-1] if of_types else {}
    if not of_types:
        source, dtypes = "parameters", rank.training.parameter_dtypes if rank.training else {}
    floats = sum(size for dtype, size in dtypes.items() if "float" in dtype)
    share = dtypes.get("float64", 0) / floats if floats else 0.0
    # Without gradients, as in a part that prepares inputs, no activation is saved.
    paths = sorted({path for row in rows for path in row.doubles})
    spent: Counter[str] = Counter()
    for line in ledger.of(*PASSES):
        if path := next((path for path in paths if f"{line.module}.".startswith(f"{path}.")), None):
            spent[path] += round(line.ns)
    timed = spent.total() / max(ledger.ns(*WORK), 1)
    if timed <= share:
        return f"Double precision: {{doubles}} of the {source} are float64{{rank}}.", share, ""
    most = spent.most_common(1)[0][0]
    return "Double precision: {doubles} of the model's time is in float64, mostly in {module}{rank}.", timed, most


def threads_and_cores(facts: Facts, fact: Fact) -> Detail | None:
    """Return the threads of operators and the cores; at most the share of threads that cannot run at once is lost."""
    rank = fact.rank
    if not rank.facts.is_cpu or not is_oversubscribed(facts, rank):
        return None
    cores, threads, here = rank.facts.cpu_count or 1, torch_threads(rank) or 1, len(ranks_on_host(facts, rank))
    return Detail(
        fields={
            "given": f"{threads} threads{f' in each of {here} ranks' if here > 1 else ''}",
            "cores": format_count(cores, "core"),
            "threads": max(cores // here, 1),
        },
        why="Each parallel operator waits until all of its threads have had a core.",
        saves=(POLICY.verdict, 1 - cores / (threads * here)),
        numbers={"threads": threads, "cores": cores},
    )


# Of what threads save if all work is divided: products of large matrices nearly all, other operators wait for memory.
SAVED_BY_THREADS: Final = (0.3, 1.0)


def on_few_cores(facts: Facts, fact: Fact) -> Detail | None:
    """Return the long calls of operators, where more than twice as many cores are free as they have threads."""
    rank = fact.rank
    threads, cores = torch_threads(rank), _cores_for(facts, rank)
    if not rank.facts.is_cpu or not threads or cores < 2 * threads:
        return None
    operators = (line for line in fact.lines if line.operator)
    least, most = (saved * (1 - threads / cores) for saved in SAVED_BY_THREADS)
    return Detail(
        lines=tuple(line for line in operators if line.ns >= POLICY.parallel_ns * max(line.count, 1)),
        fields={"given": format_count(threads, "thread"), "cores": cores, "threads": cores},
        why=(
            f"These operators take {format_ns(POLICY.parallel_ns)} per call or longer; torch.get_num_threads() is "
            f"{threads}."
        ),
        saves=(least, most),
        numbers={"threads": threads, "cores": cores},
        evidence=facts.recorded(rank, "operator_trace"),
    )


def _cores_for(facts: Facts, rank: Rank) -> int:
    """Return the cores for a rank's operators: without hyperthreads, other ranks, workers and other programs.

    0 where the use of the cores was not recorded.
    """
    cores, physical = rank.facts.cpu_count or 0, rank.facts.environment.get("physical_cpus")
    if (load := core_load(facts, rank)) is None:
        return 0
    here = len(ranks_on_host(facts, rank))
    loaders = rank.training.dataloaders if rank.training else []
    workers = max((loader.num_workers or 0 for loader in loaders), default=0)
    alone = min(cores, physical) if isinstance(physical, int) else cores // 2
    return min(alone, round(load.free)) // here - workers


def detects_anomalies(_: Facts, fact: Fact) -> Detail | None:
    """Return that anomaly detection is on when the fit starts, or in a recorded forward."""
    training = fact.rank.training
    rows = (row for window in fact.rank.windows for row in window.read(SavedTensorsRow).recorded)
    is_on = bool(training and training.detect_anomaly) or any(row.detects_anomaly for row in rows)
    return Detail() if is_on else None


SEVERAL_PASSES: Final = frozenset({"Adagrad", "Adam", "AdamW"})
# With foreach=None torch uses the foreach implementation on these devices, and the loop on all others.
FOREACH_BY_DEFAULT: Final = ("cuda", "xpu", "mtia")
# Of which torch._foreach_ has a form for lists of tensors.
OF_LISTS: Final = re.compile(
    r"aten::(?:_foreach_)?(?:add|sub|mul|div|addcmul|addcdiv|lerp|pow|sqrt|rsqrt|reciprocal|neg|abs|sign|exp|log|copy|"
    r"zero|clamp(?:_min|_max)?|maximum|minimum|norm|linalg_vector_norm)_?\Z"
)
# One kernel for all parameters saves a third to two thirds of the loop's time.
FASTER: Final = (1 / 3, 2 / 3)
# A kernel of all parameters reads and writes each state once, and of many small parameters it saves the launches.
IN_ONE_KERNEL: Final = (0.4, 0.9)
# One step for two to four batches.
LESS_OFTEN: Final = (1 / 2, 3 / 4)


def slow_in_traces(facts: Facts) -> Iterator[Found]:
    """Yield the optimizers of traces that update one parameter at a time on a device."""
    for trace in facts.steady_traces:
        ledger, window, program = trace.device_ledger, trace.gpu_window, trace.program
        if ledger is None or window is None or not window.compute_ns or program.loop_optimizer not in FOREACH:
            continue
        spent = ledger.ns(Part.COMPUTE) * min(program.loop_ns / window.compute_ns, 1.0)
        line = TimeLine(part=Part.COMPUTE, name=program.loop_optimizer, ns=spent)
        yield (
            Fact(source=trace, ledger=ledger, lines=(line,)),
            Detail(
                says="{optimizer}, one parameter at a time, takes {share}{rank}.",
                fields={"optimizer": program.loop_optimizer},
                measured=f"Its kernels take {format_ns(spent)} of {format_ns(ledger.step_ns)}",
                why="No kernel updates several parameters.",
                remedies=remedies_for(trace, do.FUSED_OPTIMIZER),
                numbers={"optimizer": program.loop_optimizer},
                saves=IN_ONE_KERNEL,
            ),
        )


def slowest_optimizer(facts: Facts, fact: Fact) -> Detail | None:
    """Return the optimizer that takes most: of those that update tensors one by one, else of all if it bounds the step.

    What the faster form replaces is saved: all of an optimizer of torch; of one of the program the operators that have
    a form for lists. The time of a large dense embedding is not the loop's.
    """
    rank, ledger, dense = fact.rank, fact.ledger, _embedding(fact.rank)
    optimizers = rank.training.optimizers if rank.training else []
    optimizers = [each for each in optimizers if dense is None or _is_apart(each, dense[0])]
    recorded = facts.host_ledger(rank)
    least = 2 * POLICY.note * ledger.step_ns  # the faster form saves half of it
    loops = [
        each for each in optimizers if _saved_by_lists(each, rank, recorded) * total(_own(ledger, each, rank)) >= least
    ]
    chosen = max(loops or optimizers, key=lambda each: total(_own(ledger, each, rank)), default=None)
    if chosen is None:
        return None
    lines = _own(ledger, chosen, rank)
    spot = optimizer_spot(rank, chosen.name or "")
    if spot is not None and (waiting := _waiting(spot, lines)) is not None:
        return waiting
    if not loops and total(lines) < POLICY.bound * ledger.step_ns:
        return None
    name, part = chosen.name or "the optimizer", _saved_by_lists(chosen, rank, recorded)
    how = f"in {chosen.groups:,} parameter groups" if _has_needless_groups(chosen) else "one by one"
    fields = {"optimizer": name, "settings": chosen.settings, "groups": chosen.groups}
    remedies = _faster_optimizer(chosen, rank) if loops else _rarer(chosen, recorded, spot)
    why = (
        f"{name} updates {_tensors(chosen)} in {format_count(chosen.groups or 1, 'group')} on {_device(chosen)}"
        f"{f' with foreach={chosen.foreach}, fused={chosen.fused}' if name in OF_TORCH else ''}"
    )
    return Detail(
        lines=lines,
        says=f"{{optimizer}} updates {_tensors(chosen)} {how}: {{share}}{{rank}}." if loops else "",
        fields=fields,
        why=f"{why}{spot.share_text('the optimizer') if spot else ''}.",
        remedies=tuple(remedy.filled(**fields) for remedy in remedies),
        saves=(part * FASTER[0], part * FASTER[1]) if loops else LESS_OFTEN,
        numbers={"optimizers": [each.fields for each in loops or optimizers]},
    )


def _waiting(spot: Spot, lines: tuple[TimeLine, ...]) -> Detail | None:
    """Return the wait that is most of an optimizer; inside operators the training thread waits for other threads."""
    ns = min(spot.share * total(lines), total(line for line in lines if not line.operator))
    if not spot.waits or ns < POLICY.most * total(lines):
        return None
    return Detail(
        lines=scaled(lines, ns),
        says="{place} waits {share}{rank}.",
        fields={"place": spot.text},
        why=f"The training thread sleeps there{spot.at}.",
        remedies=(do.WAIT_OUTSIDE.filled(owner=spot.function),),
        saves=(0.5, 1.0),
    )


def _own(ledger: TimeLedger, optimizer: OptimizerFacts, rank: Rank) -> tuple[TimeLine, ...]:
    """Return an optimizer's lines; all of the part where it is alone, or where no line has a name."""
    lines = ledger.of("optimizer")
    is_alone = rank.training is not None and len(rank.training.optimizers) == 1
    return lines if is_alone or not any(line.name for line in lines) else _named(lines, optimizer)


def _named(lines: tuple[TimeLine, ...], optimizer: OptimizerFacts) -> tuple[TimeLine, ...]:
    return tuple(line for line in lines if line.name == optimizer.name)


def _saved_by_lists(optimizer: OptimizerFacts, rank: Rank, recorded: TimeLedger | None) -> float:
    """Return the part of an optimizer's time, 0 to 1, that an implementation for all tensors at once replaces."""
    if _has_needless_groups(optimizer):
        return 1.0
    largest = rank.training.largest_parameters if rank.training else []
    few = (optimizer.parameters or POLICY.few_tensors) < POLICY.few_tensors
    if optimizer.name in OF_TORCH:
        is_read_often = optimizer.name in SEVERAL_PASSES and sum(each.bytes for each in largest) >= POLICY.large_bytes
        is_default = optimizer.foreach is None and _device(optimizer).startswith(FOREACH_BY_DEFAULT)
        is_faster = optimizer.fused or optimizer.foreach or is_default or optimizer.name not in FOREACH
        return 0.0 if is_faster or (few and not is_read_often) else 1.0
    lines = _named(recorded.of("optimizer"), optimizer) if recorded else ()
    replaced = [line for line in lines if OF_LISTS.match(line.operator or "")]
    called = sum(line.called for line in replaced)
    if few or called < POLICY.per_tensor * (optimizer.parameters or POLICY.few_tensors):
        return 0.0
    # Python between the calls goes with them.
    python = total(line for line in lines if not line.operator) * called / sum(line.called for line in lines)
    return (total(replaced) + python) / max(total(lines), 1.0)


def _tensors(optimizer: OptimizerFacts) -> str:
    return format_count(optimizer.parameters, "tensor") if optimizer.parameters else "its tensors"


def _device(optimizer: OptimizerFacts) -> str:
    return optimizer.device or "cpu"


def _has_needless_groups(optimizer: OptimizerFacts) -> bool:
    """Return whether many groups have the same settings: each group has calls of its own."""
    return (optimizer.groups or 0) - (optimizer.settings or 0) >= POLICY.few_tensors


def _rarer(optimizer: OptimizerFacts, recorded: TimeLedger | None, spot: Spot | None) -> tuple[Remedy, ...]:
    """Return how an optimizer without a faster form does less."""
    lines = _named(recorded.of("optimizer"), optimizer) if recorded else ()
    decomposed = total(line for line in lines if DECOMPOSES.matches(line.operator))
    return (*((do.DECOMPOSE_LESS,) if decomposed > total(lines) / 2 else ()), do.ACCUMULATE, *fitting("", spot))


def _faster_optimizer(optimizer: OptimizerFacts, rank: Rank) -> tuple[Remedy, ...]:
    joined = (do.JOIN_GROUPS,) if _has_needless_groups(optimizer) else ()
    if optimizer.name not in OF_TORCH:
        return (*joined, do.FOREACH_IN_STEP, do.ACCUMULATE)
    if optimizer.fused or optimizer.foreach or optimizer.name not in FOREACH:
        return joined
    # The fused kernels have no sparse gradients.
    is_sparse = rank.training is not None and any(each.sparse for each in rank.training.largest_parameters)
    kernels = "fused" if optimizer.name in FUSED and not is_sparse else "foreach"
    return (*joined, do.FUSED_OPTIMIZER.filled(optimizer=optimizer.name, kernels=kernels))


def dense_embedding(_: Facts, fact: Fact) -> Detail | None:
    """Return the optimizer that updates all rows of a large embedding; sparse updates take next to none."""
    training, found = fact.rank.training, _embedding(fact.rank)
    if training is None or found is None:
        return None
    embedding, share = found
    owner = next((each for each in training.optimizers if not _is_apart(each, embedding)), None)
    share = 1.0 if owner and owner.parameters == 1 else share
    name = owner.name if owner else None
    fused = (do.FUSED_OPTIMIZER.filled(optimizer=name, kernels="fused"),) if name in FUSED else ()
    return Detail(
        lines=_own(fact.ledger, owner, fact.rank) if owner else None,
        fields={"embedding": embedding.name},
        why=(
            f"{embedding.name} ({format_bytes(embedding.bytes)}) is {percent(share)} of the parameters, and its "
            "gradient is dense."
        ),
        remedies=(do.SPARSE_EMBEDDING, *fused),
        saves=(share / 2, share),
        numbers={"parameter": embedding.name},
    )


def _embedding(rank: Rank) -> tuple[ParameterFacts, float] | None:
    """Return the largest parameter if it is a dense embedding, and its share of all parameters."""
    training = rank.training
    if training is None or not training.largest_parameters:
        return None
    largest = training.largest_parameters[0]
    share = largest.bytes / max(sum(training.parameter_dtypes.values()), 1)
    is_dense = largest.module in {"Embedding", "EmbeddingBag"} and not largest.sparse
    return (largest, share) if is_dense and share >= POLICY.most else None


def _is_apart(optimizer: OptimizerFacts, embedding: ParameterFacts) -> bool:
    """Return whether an optimizer updates no embedding of a name; one without recorded modules updates all."""
    return bool(optimizer.modules) and embedding.name.partition(".")[0] not in optimizer.modules


# In these torch warns about different shapes, and broadcasts.
LOSSES: Final = ("aten::mse_loss", "aten::l1_loss", "aten::smooth_l1_loss", "aten::huber_loss")
BROADCAST: Final = "aten::broadcast_tensors"


def broadcast_loss(facts: Facts, fact: Fact) -> Detail | None:
    """Return the operators of a loss whose prediction and target have different shapes, forward and backward."""
    forward = [line for line in (facts.host_ledger(fact.rank) or fact.ledger).of("forward") if line.called]
    found = []
    for line in forward:
        # Other functions that broadcast, those of distributions, may mean it.
        losses = [loss for loss in forward if loss.operator in LOSSES and loss.module == line.module]
        if line.operator == BROADCAST and line.inside and line.called == sum(loss.called for loss in losses):
            found += losses
    if not found:
        return None
    names = {f"{loss.operator}{suffix}" for loss in found for suffix in ("", "_backward")}
    loss = max(found, key=lambda line: line.ns)
    return Detail(
        lines=tuple(line for line in fact.lines if line.operator in names),
        fields={"loss": (loss.operator or "").removeprefix("aten::")},
        why="Each value is compared with several of the other tensor; torch warns of incorrect results.",
        # What it costs is the smaller part: the training minimizes another loss.
        at_least=Severity.WARNING,
        numbers={"loss": loss.operator, "module": loss.module},
    )


ROWS: Final = (
    Rule(
        id="anomaly_detection",
        about="Anomaly detection stores a stack for each forward operator and checks every gradient for NaN.",
        trade_off="No forward stack when a gradient becomes NaN.",
        of=PASSES,
        detail=detects_anomalies,
        says="Anomaly detection is on: forward and backward take {share}{rank}.",
        remedies=(do.NO_ANOMALY_DETECTION,),
        saves=(0.3, 0.65),
    ),
    Rule(
        id="double_precision",
        about="float64 takes twice the time on a CPU, and up to 64 times on GPUs without float64 units.",
        trade_off="Lower precision; training rarely needs float64.",
        of=WORK,
        detail=in_double,
        says="Double precision takes {share}{rank}.",
        remedies=(do.FLOAT32,),
        saves=(0.35, 0.5),
    ),
    Rule(
        id="broadcast_loss",
        about="Prediction and target have different shapes, and all pairs are compared. Needs an operator trace.",
        when="At least `warning`: the loss is not the intended one.",
        trade_off="None.",
        of=PASSES,
        detail=broadcast_loss,
        says="The loss broadcasts: {loss} gets tensors of different shapes: {share}{rank}.",
        remedies=(do.SAME_SHAPE,),
        saves=(0.5, 1.0),
    ),
    Rule(
        id="thread_oversubscription",
        about="On a CPU, a parallel region waits for its last thread: a host has twice as many threads as cores.",
        trade_off="None. The remedy saves at most the share of the threads without a core.",
        of=COMPUTED,
        detail=threads_and_cores,
        says="Thread oversubscription: operators use {given} on {cores}.",
        remedies=(do.THREADS,),
        saves=(POLICY.verdict, 1.0),
    ),
    Rule(
        id="idle_cores",
        about=(
            "On a CPU, operators of 0.1 ms per call or longer use at most half of the free physical cores, as with "
            "OMP_NUM_THREADS=1, the default of torchrun. Needs an operator trace and the load of the cores."
        ),
        trade_off="Fewer cores for other programs. The remedy saves 1 - threads / cores of this time.",
        of=PASSES,
        detail=on_few_cores,
        says="Operators use {given} on {cores} free cores{rank}: {share} can run in parallel.",
        remedies=(do.THREADS,),
        saves=SAVED_BY_THREADS,
    ),
    Rule(
        id="dense_embedding",
        about="Without sparse=True the optimizer updates every row of an Embedding with half of all parameters.",
        trade_off="No momentum and weight decay for rows that the batch does not use.",
        of=(Part.OPTIMIZER,),
        detail=dense_embedding,
        says="The optimizer updates all rows of the embedding {embedding}: {share}{rank}.",
        bound="Optimizer-bound",
        saves=(0.5, 1.0),
    ),
    Rule(
        id="optimizer_bound",
        about=(
            "An optimizer updates 20 tensors or more one by one although a faster implementation exists (fused, "
            "foreach, torch._foreach_ functions), or has many parameter groups with the same settings."
        ),
        when="Without a faster implementation, the optimizer is reported from 50% of each step.",
        trade_off="None, or fewer optimizer steps, which recovers half to three quarters of the time.",
        of=(Part.OPTIMIZER,),
        find=slow_in_traces,
        detail=slowest_optimizer,
        says="{optimizer} takes {share}{rank}.",
        bound="Optimizer-bound",
        saves=FASTER,
    ),
)
