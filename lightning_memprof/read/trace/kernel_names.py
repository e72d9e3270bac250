"""Short names of kernels: the function and, for a general kernel of ATen, the operation that it runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

# How compilers write a namespace without a name.
_ANONYMOUS: Final = re.compile(
    r"(?:\(anonymous namespace\)|<unnamed>|`anonymous namespace'|\{anonymous\}|_GLOBAL__N_\w*)::"
)
# Other names come from Python, an operator or a compiler without templates: they have no parts to drop.
_IN_CPP: Final = re.compile(r"[\w:]+[<(]")
_MANGLED: Final = re.compile(r"_ZN?K?(?=\d)")
_CLONE: Final = re.compile(r" \[clone [^\]]*\]")
_ATEN: Final = re.compile(r"^(?:at|at_cuda_detail|c10)::(?:\w+::)*")
_LAMBDA: Final = re.compile(r"(?:\{lambda|'lambda\d*')\((.+)\)(?:#\d+\})?(?: const)?\Z")
_SKIPPED: Final = re.compile(r"\{|'lambda|operator\(\)|const\b|\Z")
# Functions of CUTLASS whose first argument is the kernel.
_WRAPPERS: Final = re.compile(r"(?:.*::)?(?:Kernel2?|device_kernel|enable_sm\w+)")
_NUMBER: Final = re.compile(r"(-?\d+)[ul]*\Z|true\Z|false\Z|\(")
_TYPE: Final = re.compile(
    r"(?:unsigned |signed )?(?:bool|char|short|int|long|long long|float|double|half|void|unsigned)\d?(?: const)?\Z"
    r"|(?:c10|cutlass\w*)::\w+(?:<\w+>)?\Z|__(?:half|nv_\w+)\Z"
)
# Arguments that do nothing but call the operation in theirs.
_CALLERS: Final = re.compile(r"gpu_kernel_impl\w*|ReduceOp|func_wrapper_t")
# Arguments that say where the operands are, never what runs.
_OPERANDS: Final = re.compile(
    r"at_cuda_detail::|thrust::|cub::|.*(?:^|::)(?:array|Array|tuple|pair|integral_constant|memory::\w+|OpaqueType"
    r"|\w*(?:Metadata|OffsetCalculator|Iterator|Policy\d*))\Z"
)
# A separator or a bracket; `->` is none.
_TOKENS: Final = {
    separator: re.compile(rf"{re.escape(separator)}|[<(\[{{)\]}}]|(?<!-)>") for separator in (",", " ", "::", "(")
}
_LONGEST_READ: Final = 20_000
_DEEPEST: Final = 12


def plain_kernel(name: str) -> str:
    """Return a kernel's name without its return type and anonymous namespaces."""
    return _ANONYMOUS.sub("", name.removeprefix("void "))


def kernel_name(name: str, *, with_sizes: bool = False) -> str:
    """Return a kernel's function, for a general kernel of ATen with its operation and type.

    ``reduce_kernel<sum_functor<float>>``; parameters, lambdas and arguments that describe operands are left out.

    Args:
        name: as in a trace; one that is not C++ is returned as it is.
        with_sizes: keep the kernel's numbers and types: ``reduce_kernel<512, 1, sum_functor<float>>``.
    """
    kernel = _kernel(name)
    if kernel is None:
        return plain_kernel(name)
    arguments: list[str] = []
    for argument in kernel.arguments:
        operations = list(_operations(argument, nested=with_sizes)) if kernel.is_aten else []
        if not operations and with_sizes and (_NUMBER.match(argument) or _TYPE.match(argument)):
            operations = [_bare(argument)]
        arguments += operations
    if not with_sizes:
        # The first operation has the type of the tensors, those inside it the type in which they compute.
        typed = {argument.partition("<")[0]: argument for argument in reversed(arguments)}
        arguments = [*arguments[:1], *(name for name in reversed(typed) if typed[name] != arguments[0])]
    return f"{kernel.function}<{', '.join(arguments)}>" if arguments else kernel.function


def kernel_names(names: Iterable[str]) -> list[str]:
    """Return the short names of kernels.

    Kernels that would then share a name have their numbers and types too; those that still share it are numbered:
    ``GemmUniversal #2``.
    """
    full = list(names)
    shown = {name: kernel_name(name) for name in full}
    shared = Counter(shown.values())
    numbers = Counter[str]()
    for name, short in shown.items():
        if shared[short] > 1:
            sized = kernel_name(name, with_sizes=True)
            numbers[sized] += 1
            shown[name] = sized if numbers[sized] == 1 else f"{sized} #{numbers[sized]}"
    return [shown[name] for name in full]


class _Name(msgspec.Struct, frozen=True, kw_only=True):
    """A function or a type of C++, the arguments of its template, and the type that its lambda takes."""

    scoped: str
    arguments: list[str]
    taken: str
    is_aten: bool

    @property
    def function(self) -> str:
        """The name without the namespaces of ATen."""
        return _ATEN.sub("", self.scoped)


def _kernel(name: str) -> _Name | None:
    text = _CLONE.sub("", plain_kernel(_demangled(name[:_LONGEST_READ])))
    if not _IN_CPP.match(text):
        return None
    returned, *rest = _split(text, " ")
    if rest and returned.endswith("::type") and _IN_CPP.match(rest[0]):
        text = text.removeprefix(returned).strip()
    found = _parsed(text)
    while found.arguments and _WRAPPERS.fullmatch(found.scoped):
        found = _parsed(found.arguments[0])
    return found


def _parsed(text: str) -> _Name:
    """Return the function around all lambdas of a name."""
    taken, scopes = "", []
    for part in _split(text, "::"):
        if match := _LAMBDA.match(part):
            taken = _split(match[1], ",")[-1]
        # A call of an object is a part of it: `sum_functor<float>::operator()(int)::{lambda(float)#1}`.
        if not _SKIPPED.match(part):
            scopes.append(part)
    *outer, last = scopes or [text]
    function, _, rest = _split(last, "(")[0].partition("<")
    scope = "".join(f"{part.partition('<')[0]}::" for part in outer)
    arguments = _split(rest.strip().removesuffix(">"), ",") if rest else []
    return _Name(
        scoped=f"{scope}{function}",
        arguments=arguments,
        taken=taken,
        is_aten=re.search(r"\bat::", text) is not None,
    )


def _operations(text: str, depth: int = 0, *, nested: bool) -> Iterator[str]:
    """Yield the innermost functions and functors in an argument with their types, or all, one inside the other."""
    if depth > _DEEPEST or _NUMBER.match(text) or _TYPE.match(text):
        return
    found = _parsed(text)
    if _OPERANDS.match(found.scoped) or text.endswith(("*", "&")):
        return
    inner = [name for argument in found.arguments for name in _operations(argument, depth + 1, nested=nested)]
    known = [argument for argument in [*found.arguments, found.taken] if _TYPE.match(argument)]
    function = found.scoped.rpartition("::")[2]
    if inner and nested and not _CALLERS.fullmatch(function):
        yield f"{function}<{', '.join(inner)}>"
    elif inner:
        yield from inner
    elif function:
        yield f"{function}<{_bare(known[0])}>" if known else function


def _bare(argument: str) -> str:
    number = _NUMBER.match(argument)
    return number[1] if number and number[1] else argument.rpartition("::")[2].removeprefix("__nv_")


def _split(text: str, separator: str) -> list[str]:
    """Split a name of C++ where no bracket is open."""
    parts, depth, start = [], 0, 0
    for match in _TOKENS[separator].finditer(text):
        found = match[0]
        if found == separator and not depth and match.start() > start:
            parts.append(text[start : match.start()].strip())
            start = match.end()
        else:
            depth += (found in "<({[") - (found in ")}]>")
    return [*parts, text[start:].strip()]


def _demangled(name: str) -> str:
    """Return the functions of a name that the CUDA profiler has not demangled, to the second open bracket."""
    match = _MANGLED.match(name)
    if match is None:
        return name
    text, place = "", match.end()
    while place < len(name) and text.count("<") < 2:
        if size := re.match(r"\d+", name[place:]):
            start = place + size.end()
            place = start + int(size[0])
            text += f"{'' if not text or text.endswith('<') else '::'}{name[start:place]}"
        else:
            text += "<" if name[place] == "I" else ""
            place += 1
    return text
