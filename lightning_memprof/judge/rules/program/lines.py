"""Lines of the program that take much of a step, and the next steps that fit what they call."""

from __future__ import annotations

import re
from typing import Final

from lightning_memprof.account.parts import Part
from lightning_memprof.account.steps.events import FORWARD
from lightning_memprof.account.steps.lines import MIN_LOOKS, Spot, lines, source_of, spots
from lightning_memprof.artifacts.series import MODULE_CALL, LineRow
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Finding, Recovery
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_ns, percent

DECOMPOSE: Final = (
    "Decompose matrices less often, as in every 10th step, or approximate: a power iteration (spectral_norm) for the "
    "largest singular value, torch.svd_lowrank for a few; solve(A, b) instead of an inverse."
)
SORT: Final = (
    "Sort less: torch.topk or kthvalue for a few values, torch.bincount or histc for counts, and once what stays the "
    "same."
)
LOOK_UP: Final = (
    "Look up rows instead of multiplying one-hot vectors with a table: torch.nn.functional.embedding(index, table), or "
    "table[index]."
)
DRAW: Final = "Draw fewer random numbers: dropout in fewer places, noise only for what uses it."
MOVE: Final = (
    "Copy less: write into one tensor that exists, keep one dtype and layout instead of .to(), .contiguous() and "
    ".clone() in each step, and stack once instead of a cat for each part."
)
ACCUMULATE: Final = "Compute running sums once for all positions, or only for those that are used."
FUSED_ATTENTION: Final = (
    "Use the fused kernel: torch.nn.functional.scaled_dot_product_attention(query, key, value), or "
    "MultiheadAttention(need_weights=False) where nobody reads the weights."
)
Choices = tuple[tuple[str, re.Pattern[str]], ...]
# Of operators, innermost as a ledger has them.
OPERATORS: Final = (
    (
        DECOMPOSE,
        re.compile(
            r"aten::\w*(?:linalg|svd|eigh?\b|cholesky|inverse|geqrf|orgqr|qr\b|lu_|triangular_solve|matrix_exp)"
        ),
    ),
    (SORT, re.compile(r"aten::_?(?:sort|argsort|msort|topk|kthvalue|median|nanmedian|mode|unique\w*|quantile)\b")),
    (FUSED_ATTENTION, re.compile(r"attention without")),
    (
        DRAW,
        re.compile(
            r"aten::(?:normal|uniform|bernoulli|random|exponential|log_normal|geometric|multinomial|randperm)_?\Z"
        ),
    ),
    (ACCUMULATE, re.compile(r"aten::_?(?:cumsum|cumprod|cummax|cummin|logcumsumexp)\w*\Z")),
    (
        MOVE,
        re.compile(r"aten::(?:copy_|cat|_cat|stack|clone|_to_copy|index_select|repeat|repeat_interleave|roll|flip)\Z"),
    ),
)
CHEAPER: Final = (
    "Make {name} cheaper, or run it less often: compute what stays the same only once, in __init__ or setup, and keep "
    "it (register_buffer)."
)
# Modules of torch that compute with one operator, and that programs write themselves under the same name.
FUSED: Final = (
    "LayerNorm",
    "RMSNorm",
    "GroupNorm",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "GELU",
    "SiLU",
    "Mish",
)
BY_HAND: Final = "Use torch.nn.{fused} instead of {name}: one fused operator, which also keeps less for backward."
COPY_LESS: Final = (
    "Copy less in {name}: refer to what does not change, copy tensors in place (torch._foreach_copy_), or copy in "
    "every Nth batch."
)
# Of a line's source, and of the functions of libraries that it calls: in steps, and anywhere.
OF_STEPS: Final = (
    (
        (
            "Keep the iterator: make it once, as iterator = iter(loader) in on_train_start, and call next(iterator) in "
            "the steps; or let the Trainer load both: CombinedLoader."
        ),
        re.compile(r"next\(iter\(|DataLoader\.__iter__|DataLoaderIter\.__init__|RandomSampler"),
    ),
    (
        "Let the Trainer load both, with workers: return CombinedLoader([first, second]) from train_dataloader.",
        re.compile(r"DataLoaderIter\.__next__"),
    ),
    (
        (
            "Compute metrics less often in {name}, and other values without gradients: every Nth batch, or once per "
            "epoch."
        ),
        re.compile(
            r"\b(?:np|numpy|stats)\.(?:arg|lex)?(?:sort|rankdata|unique|quantile|percentile|median|histogram\w*|corrcoef|"
            r"spearmanr|pearsonr|kendalltau|trapz|trapezoid)\("
            r"|\b\w+_score\b|\b(?:roc|precision_recall|det)_curve\b|confusion_matrix|classification_report"
        ),
    ),
)
DECOMPOSES: Final = re.compile(
    r"linalg\.(?:svd\w*|eig\w*|matrix_(?:norm|exp|rank|power)|p?inv|qr|cholesky\w*|s?l?o?g?det|lstsq|cond|solve)\("
    r"|\.(?:svd|eigh?|inverse|pinverse|cholesky|matrix_exp|det|logdet)\("
)
OF_SAMPLES: Final = (
    (
        (
            "Decompose matrices once, in __init__ of the data set, where all samples have the same; else once per "
            "sample, before training."
        ),
        DECOMPOSES,
    ),
)
CALLS: Final = (
    (
        COPY_LESS,
        re.compile(r"deepcopy|\bcopy\.copy\(|\.state_dict\("),
    ),
    (
        (
            "Use torch.distributions.Independent(Normal(mean, std), 1) in {name}: a diagonal covariance needs neither "
            "matrices nor their Cholesky decomposition."
        ),
        re.compile(r"MultivariateNormal\(.*(?:diag|eye)"),
    ),
    (DECOMPOSE, DECOMPOSES),
    (
        "Run one backward for the sum of the losses: each backward with retain_graph=True runs through the same graph.",
        re.compile(r"retain_graph ?= ?True"),
    ),
    (
        "Record fewer steps with the profiler in {name}: torch.profiler.schedule(wait=100, active=3, repeat=1).",
        re.compile(r"\bprofile(?:r)?\.(?:step|start|stop|export\w*)\b|export_chrome_trace|tensorboard_trace_handler"),
    ),
    (
        "Let the optimizer decay the weights, in one pass: weight_decay=... of AdamW or SGD, not a sum in the loss.",
        re.compile(r"^(?!.*grad).*(?:\b(?:pow|square|norm|abs)\(|\*\* ?2).*\bparameters\("),
    ),
    (LOOK_UP, re.compile(r"one_hot\(.*@|one_hot\(.*matmul|(?:matmul|mm|linear|einsum)\(.*one_hot\(")),
    (
        (
            "Draw only what is used in {name}, without permuting everything for a few values: "
            "numpy.random.default_rng().choice or .integers, torch.randint."
        ),
        re.compile(r"random\.(?:choice|permutation|shuffle|sample)\("),
    ),
    (
        "Write less often in {name}: every N batches, or in a thread.",
        re.compile(
            r"\b(?:json|pickle|torch|np|numpy)\.(?:dump|dumps|save|savez\w*|savetxt)\(|\.write\w*\(|\bprint\(|savefig|"
            r"\.to_(?:csv|json|parquet)\(|\.add_(?:image|images|histogram|figure|embedding|graph)\(|\.flush\(|fsync|"
            r"\bopen\(.*['\"][wax]b?\+?['\"]"
        ),
    ),
    (
        "List the files once, when the data set is made, and keep the list.",
        re.compile(r"\b(?:glob|rglob|listdir|scandir|iterdir|walk)\("),
    ),
    (
        "Open and parse a file of many samples once, when the data set is made; map large arrays into memory.",
        re.compile(
            r"(?<!Image\.)\bopen\(|read_(?:csv|json|parquet|excel|text|bytes)\(|\b(?:np|numpy|torch|json|yaml|pickle)\.loads?\("
        ),
    ),
    (
        "Do not wait for another program or the network in {name}: prepare its results, or call it in a thread.",
        re.compile(r"\bsubprocess\.|\brequests\.|urlopen|\.communicate\(|nvidia-smi|check_output"),
    ),
    (
        "Parse each text once, before training, and keep the numbers.",
        re.compile(r"literal_eval|strptime|fromisoformat|fromstring|\bre\.(?:split|findall|finditer)\("),
    ),
    (
        "Make the array first, then one tensor: torch.from_numpy(numpy.stack(parts)), not a tensor for each value.",
        # Not one tensor of what a function of the program returns, or Python computes for each value: that takes the
        # time.
        re.compile(
            r"torch\.(?:tensor|FloatTensor|LongTensor)\("
            r"(?!.*\bself\.\w+\(|(?<=return torch\.tensor\()(?:\[[^\[\]]*\(.* for |\w+\[))"
            r"|\.tolist\(\)"
        ),
    ),
    (SORT, re.compile(r"\b(?:sorted|argsort|sort|unique|quantile|percentile|median)\(")),
)


# Lines with less of the step are not worth a rewrite; a helper of which nothing else is known may be what it has to be.
NOTABLE_LINE: Final = 0.10
NOTABLE_HELPER: Final = 0.30
# A line that names the operator of a loop explains it with less of the time.
LOOPED: Final = 0.10
# Functions that the Trainer and data loaders call by their names.
NAMED: Final = re.compile(
    r"(?:^|\.)(?:on_\w+|\w+_step|configure_\w+|optimizer_\w+|lr_\w+|transfer_\w+|\w*loader\w*|"
    r"backward|forward|setup|__(?:getitem|getitems|iter|next|len)__|step|log\w*)$"
)
# What is done less often or in another way leaves some of its time.
SAVED: Final = (0.5, 0.95)
OF_HELPER: Final = (0.0, 0.5)
OF_TRAINING_STEP: Final = (Part.FORWARD, Part.FORWARD_HOOK, Part.SELF_LOG)
BACKWARD: Final = re.compile(r"\b(?:manual_)?backward\(")


def costly_line(facts: Facts) -> Finding | None:
    """Find a function of the training step that takes much of the step for work that has a cheaper form, or a helper.

    Recovers 50% to 95% of the time of its lines that call this, in forward; up to half of a helper's.
    """
    if (worst := facts.heaviest(lambda ledger: ledger.ns(*OF_TRAINING_STEP))) is None or not worst[0].facts.is_cpu:
        return None
    rank, ledger = worst
    rows = lines(rank, FORWARD["fit"])
    scales = {
        is_backward: ledger.ns(*parts) / max(sum(row.ns or 0 for row in rows if _is_backward(row) == is_backward), 1)
        for is_backward, parts in ((False, OF_TRAINING_STEP), (True, ("backward",)))
    }
    of_kind: dict[tuple[str, str], list[LineRow]] = {}
    for row in rows:
        step = _fitting(source_of(row), row.called, row.inside) or (CHEAPER if _is_helper(row) else None)
        if step is not None and row.functions[-1] != MODULE_CALL:
            of_kind.setdefault((row.functions[-1], step), []).append(row)
    found = []
    for (function, step), alike in of_kind.items():
        ns = sum(scales[_is_backward(row)] * (row.ns or 0) for row in alike)
        least, saved = (NOTABLE_HELPER, OF_HELPER) if step == CHEAPER else (NOTABLE_LINE, SAVED)
        if ns >= least * ledger.step_ns and sum(row.looks or 0 for row in alike) >= MIN_LOOKS:
            found.append((sum(saved) * ns, saved, ns, function, step))
    if not found:
        return None
    _, saved, ns, function, step = max(found)
    line = max(of_kind[function, step], key=lambda row: row.ns or 0)
    worth = Recovery(unit="ns", min=ns * saved[0], max=ns * saved[1], whole=ledger.step_ns)
    return Finding(
        rule="costly_line",
        title=(f"{function} ({line.place}) takes {ledger.share_text(ns)}{facts.on_rank(rank)}: `{source_of(line)}`."),
        why=(
            f"{format_ns(ns)} of {ledger.length_text}: these lines take "
            f"{percent(ns / ledger.ns(*OF_TRAINING_STEP, *(('backward',) if _is_backward(line) else ())))} of "
            "the time of training_step."
        ),
        remedies=tuple(dict.fromkeys(each.format(name=function) for each in (step, CHEAPER))),
        evidence=facts.pulse_and_trace(rank),
        numbers={
            "rank": rank.rank,
            "function": function,
            "place": line.place,
            "line_ns": round(ns),
            "duration_ns": round(ledger.step_ns),
        },
        **worth.parts,
    )


def _is_backward(row: LineRow) -> bool:
    """Return whether a line of training_step runs the backward pass, with automatic optimization off."""
    return BACKWARD.search(source_of(row)) is not None


def _is_helper(row: LineRow) -> bool:
    return len(row.functions) > 1 and MODULE_CALL not in row.functions and not _is_backward(row)


def fitting(operator: str, spot: Spot | None) -> tuple[str, ...]:
    """Return the next steps that fit an operator, and the line of the program with most of the time."""
    of_operator = [step for step, matches in OPERATORS if matches.match(operator)][:1]
    found = dict.fromkeys((*((*_by_hand(spot), *of_spot(spot)) if spot else ()), *of_operator))
    return (*found, *((CHEAPER.format(name=spot.function),) if spot and spot.is_helper and not found else ()))


def _by_hand(spot: Spot) -> tuple[str, ...]:
    """Return the next step for a module of the program that has the name of one of torch's."""
    name, _, method = spot.function.rpartition(".")
    usual = name.rpartition(".")[2].lower().replace("_", "")
    return tuple(BY_HAND.format(fused=own, name=name) for own in FUSED if own.lower() == usual and method == "forward")


def of_spot(spot: Spot) -> tuple[str, ...]:
    """Return the next step that fits what a line calls, if there is one."""
    step = _fitting(spot.source, spot.called, spot.inside)
    return () if step is None else (step.format(name=spot.function),)


def of_samples(spot: Spot) -> tuple[str, ...]:
    """Return the next step that fits what a line calls that makes samples, if there is one."""
    step = _fitting(spot.source, spot.called, spot.inside, choices=(*OF_SAMPLES, *CALLS))
    return () if step is None else (step.format(name=spot.function),)


def _fitting(*texts: str | None, choices: Choices = (*OF_STEPS, *CALLS)) -> str | None:
    text = " ".join(filter(None, texts))
    return next((step for step, matches in choices if matches.search(text)), None)


def of_action(rank: Rank, action: str) -> Spot | None:
    """Return where an action has most of its time, ``Histograms.on_train_batch_end``, in recorded windows."""
    found = lines(rank, action.rpartition(".")[2])
    return next(iter(spots([row for row in found if row.functions[0] == action] or found)), None)


def of_collate(rank: Rank) -> Spot | None:
    """Return where the program makes batches of samples: a function that no hook and no method of a data set is."""
    found = [row for window in rank.windows for row in window.read(LineRow).rows if row.functions]
    return next(iter(spots([row for row in found if not NAMED.search(row.functions[0])])), None)


def of_forward(rank: Rank) -> Spot | None:
    """Return where the forward has most of its time, without the lines that only call modules."""
    found = [row for row in lines(rank, FORWARD.get(rank.facts.stage, "")) if not _is_backward(row)]
    return next(iter(spots(found)), None)


def of_loop(rank: Rank, operator: str) -> Spot | None:
    """Return where the forward has most of its time, else where it calls the operator of a loop."""
    if (most := of_forward(rank)) is not None:
        return most
    called = re.compile(rf"\b{re.escape(operator.rpartition('::')[2].strip('_'))}\b")
    found = spots(lines(rank, FORWARD.get(rank.facts.stage, "")), LOOPED)
    return next((spot for spot in found if spot.source and called.search(spot.source)), None)


def has(spot: Spot, whole: str, around: str = "") -> str:
    """Return the share of a function in a time, to end a sentence.

    Args:
        spot: the function.
        whole: the time, for people: ``the forward``.
        around: a function that the sentence names already.
    """
    if spot.function != around:
        return f"; {spot.text} has {percent(spot.share)} of {whole}{spot.at}"
    return f"; mostly {spot.place}{spot.at}" if spot.place else ""
