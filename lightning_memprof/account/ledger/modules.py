"""The module with most of a step, and the usual names of the work of operators."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from lightning_memprof.account.ledger.host import MAX_FORWARDS
from lightning_memprof.account.ledger.model import TimeLine, grouped, total
from lightning_memprof.account.memory.activations import paths_around
from lightning_memprof.artifacts.series import SavedTensorsRow
from lightning_memprof.read.run.model import Rank

ROOT: Final = "the model"
# A module with less of its parent's time does not explain it.
EXPLAINS: Final = 0.5
# What one of several submodules must have, of the whole and beside the next one, to be worth a name.
LEADS: Final = 0.25
AHEAD: Final = 1.25
UPDATES: Final = "optimizer updates"
# Work of one kind, under the names of operators and kernels, of forward and backward and of all libraries; a name has
# the first that fits.
FAMILIES: Final = (
    (
        UPDATES,
        re.compile(r"aten::_(?:foreach_|fused_(?:adam|sgd))|multi_tensor_apply|Fused(?:Adam|Optimizer)", re.IGNORECASE),
    ),
    ("compiled code", re.compile(r"CompiledFxGraph|CompiledFunction|Torch-Compiled Region|TorchDynamo|\btriton_")),
    ("attention", re.compile(r"attention|attn(?![a-z])|\bflash|_flash_|fmha|\bmha_", re.IGNORECASE)),
    (
        "convolution",
        re.compile(
            r"conv(?!ert|ex)|im2col|col2im|winograd|fprop|(?<![a-z])[dw]grad|igemm_(?:fwd|bwd|wrw)|[sh\d]cudnn_",
            re.IGNORECASE,
        ),
    ),
    ("normalization", re.compile(r"(?:batch|layer|group|instance|rms)_?norm|cudnn::bn_", re.IGNORECASE)),
    ("recurrent layers", re.compile(r"lstm|(?<![a-z])gru(?![a-z])|rnn", re.IGNORECASE)),
    (
        "matrix multiplication",
        re.compile(
            r"::_?\w*?(?<![a-z])(?:add|b|badd|addb|int_|scaled_|grouped_)*mm(?![a-z])|::(?:mv|addmv|v?dot)\Z"
            r"|(?<!bi)(?<!tri)(?<!upsample_)linear\w*\Z|(?<!fb)gem[mv]|nvjet|matmul|cijk_|splitk|xmma",
            re.IGNORECASE,
        ),
    ),
)
# They read and write each element once, for little arithmetic.
POINTWISE: Final = re.compile(
    r"aten::_?(?:add|sub|rsub|mul|div|true_divide|pow|square|neg|abs|sign|sgn|exp2?|expm1|log|log1p|log2|r?sqrt"
    r"|reciprocal|sin|cos|tanh?|erfc?|(?:leaky_|p|r)?relu6?|gelu|silu|elu|celu|selu|glu|mish|(?:hard|log_)?sigmoid"
    r"|hard(?:tanh|swish)|softplus|threshold|clamp(?:_min|_max)?|clip|maximum|minimum|floor|ceil|round|trunc|fmod"
    r"|remainder|lerp|addcmul|addcdiv|where|masked_fill|fill|zero|eq|ne|lt|le|gt|ge|isnan|isfinite"
    r"|(?:logical|bitwise)_\w+|copy|to_copy|to|cat|stack|clone|contiguous|repeat|flip|roll|tril|triu"
    r"|(?:native_|fused_)?dropout|constant_pad_nd)(?:_backward|_forward)?_?\Z"
    r"|(?<!index_)(?<!gather_)elementwise_kernel|CatArrayBatchedCopy|fused_dropout|batched_transpose|nchwToNhwc|nhwcToNchw|FillFunctor"
)
# Operators that read a value of a tensor, and those that iterate over one.
READS: Final = frozenset({"aten::item", "aten::is_nonzero"})
OF_VALUES: Final = READS | {"", "aten::_local_scalar_dense", "aten::unbind", "aten::select"}
# They compute nothing.
VIEWS: Final = OF_VALUES | {
    f"aten::{name}"
    for name in (
        "alias", "as_strided", "chunk", "detach", "diagonal", "expand", "expand_as", "flatten", "movedim", "narrow",
        "permute", "reshape", "slice", "split", "squeeze", "swapaxes", "t", "transpose", "unflatten", "unfold",
        "unsqueeze", "view", "view_as",
    )
}  # fmt: skip
# Adds the gradient of a parameter in a backward pass.
ACCUMULATE: Final = "torch::autograd::AccumulateGrad"


class Heaviest(msgspec.Struct, frozen=True, kw_only=True):
    """The innermost module that takes most of the time of forward and backward, and the operators most of its time.

    ``ns`` is per step, ``family`` names the operators, ``family_ns`` is their part; ``operators`` are all that run.
    ``leader`` is the submodule that stands out, ``leader_ns`` its time.
    """

    module: str
    ns: float
    family: str
    family_ns: float
    leader: str = ""
    leader_ns: float = 0.0
    operators: frozenset[str] = frozenset()


def heaviest_module(owners: Iterable[TimeLine]) -> Heaviest | None:
    """Return the innermost module with at least half of the time of the lines of forward and backward.

    None where they are not divided among operators.
    """
    lines = grouped(owners)
    if not any(line.operator for line in lines):
        return None
    path: tuple[str, ...] = ()
    inside = lines
    while True:
        below: dict[str, list[TimeLine]] = defaultdict(list)
        for line in inside:
            parts = (line.module or "").split(".") if line.module else []
            if len(parts) > len(path):
                below[parts[len(path)]].append(line)
        name = max(below, key=lambda child: total(below[child]), default=None)
        if name is None or total(below[name]) < EXPLAINS * total(lines):
            break
        path, inside = (*path, name), below[name]
    families = Counter[str]()
    for line in inside:
        families[operator_family(line.operator)] += line.ns  # type: ignore[assignment]  # counts may be floats
    unfused = total(_unfused(inside))
    if unfused >= UNFUSED_SHARE * total(inside):
        families = Counter({UNFUSED: round(unfused)})
    family, family_ns = families.most_common(1)[0]
    leader, leader_ns = _leader({child: total(of_child) for child, of_child in below.items()}, total(inside))
    return Heaviest(
        module=".".join(path) or ROOT,
        ns=total(inside),
        family=family,
        family_ns=family_ns,
        leader=".".join((*path, leader)) if leader else "",
        leader_ns=leader_ns,
        operators=frozenset(line.operator for line in inside if line.operator),
    )


def _leader(submodules: Mapping[str, float], whole: float) -> tuple[str, float]:
    """Return the submodule whose time stands out, and this time; an empty name where none does."""
    first, second, *_ = [*sorted(((ns, name) for name, ns in submodules.items()), reverse=True), (0.0, ""), (0.0, "")]
    return (first[1], first[0]) if first[0] >= max(LEADS * whole, AHEAD * second[0]) else ("", 0.0)


# Attention that keeps its weights: batched products around a softmax. Projections are products of two matrices.
UNFUSED: Final = "attention without the fused kernel"
UNFUSED_SHARE: Final = 0.3
BATCHED: Final = frozenset({"aten::bmm", "aten::baddbmm"})
SOFTMAX: Final = "aten::_softmax"
PROJECTION: Final = re.compile(r"aten::(?:mm|addmm|linear|mkldnn_linear\w*)\Z")


def _unfused(lines: Iterable[TimeLine]) -> list[TimeLine]:
    """Return the lines of modules that compute attention with operators of their own, without the projections."""
    of_modules: dict[str | None, list[TimeLine]] = defaultdict(list)
    for line in lines:
        of_modules[line.module].append(line)
    found = []
    for own in of_modules.values():
        calls: dict[str, float] = defaultdict(float)
        for line in own:
            if line.part == "forward":
                calls[line.operator or ""] += line.count
        if 0 < calls[SOFTMAX] <= sum(calls[name] for name in BATCHED) / 2:
            found += [line for line in own if line.operator and not PROJECTION.match(line.operator)]
    return found


def operator_family(operator: str | None) -> str:
    """Return the usual name of the work of an operator or a kernel, ``matrix multiplication``, else its own.

    Outside operators it is ``Python``; None, where nothing is recorded, is ``unprofiled``.
    """
    if operator is None:
        return "unprofiled"
    return next((name for name, matches in FAMILIES if matches.search(operator)), operator or "Python")


def forwards_per_step(rank: Rank) -> int:
    """Return how often each recorded step calls the whole model before its one backward; 1 where steps or parts differ.

    The whole model is the LightningModule, else all outermost modules with parameters: around a block that one forward
    repeats, others run once.
    """
    rows = [row for window in rank.windows for row in window.read(SavedTensorsRow).recorded]
    trained = {path for row in rows for path, sizes in row.parameters.items() if sizes[0]}
    backwards, found = [row for row in rows if row.modules], set[int]()
    for row in backwards:
        calls = {path: cells[2] for path, cells in row.modules.items() if cells[2] and path in trained}
        found |= {count for path, count in calls.items() if calls.keys().isdisjoint(paths_around(path))}
    count, *others = found or {1}
    is_once = others or len({row.step for row in backwards}) < len(backwards) or count > MAX_FORWARDS
    return 1 if is_once else count


def in_compiled(module: str, rank: Rank) -> bool:
    """Return whether torch.compile has compiled a module, or one around it."""
    found = path_parts(module)
    return any(found[: len(place)] == place for place in compiled_paths(rank))


def compiled_paths(rank: Rank) -> list[list[str]]:
    """Return the paths of compiled modules."""
    return [path_parts(path) for path in (rank.training.compiled if rank.training else ())]


def path_parts(module: str) -> list[str]:
    """Return the parts of a path; numbers and ranges of numbers, ``0-5``, are alike."""
    parts = module.split(".") if module not in {"", ROOT} else []
    return ["" if part.replace("-", "").isdigit() else part for part in parts]
