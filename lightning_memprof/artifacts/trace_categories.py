"""The categories of events in a trace file, as TensorBoard's profiler tab reads them, and back.

The tab (``torch-tb-profiler`` 0.4) knows the categories of the torch of its time: calls of a driver are ``runtime``, a
data loader's fetch and Lightning's ranges are ``cpu_op``. Events that a later torch puts elsewhere are left out of its
sums, and a step that the device has a range of is counted twice. A file that was rewritten has what it reads; what
torch wrote is in the event's ``args`` as ``Original category``.
"""

from __future__ import annotations

import re
from typing import IO, TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["original_categories", "tensorboard_categories"]

_CHUNK: Final = 1 << 18
_LONGEST_EVENT: Final = 16 << 20
_EVENT: Final = b'"ph"'

_MARK: Final = b'"Original category": "'
_MARK_END: Final = b'", '
_CATEGORY: Final = b'"cat": "'
_LONGEST_CATEGORY: Final = 64

_CALL: Final = rb"[a-z0-9]+_(?:runtime|driver)"
_FETCH: Final = rb'user_annotation(?=",\s*"name": "enumerate\(Data(?:Loader|Pipe)\)#)'
_DEVICE_STEP: Final = rb'gpu_user_annotation(?=",\s*"name": "ProfilerStep#)'
_LIGHTNING: Final = rb'(?:cpu_op|user_annotation)(?=",\s*"name": "\[pl\]\[(?:module|profile)\])'
# From the category to where the arguments open, through the name and numbers of one event as Kineto writes it.
_REWRITTEN: Final = re.compile(
    rb'"cat": "(?:(?P<call>%b)|(?P<fetch>%b)|(?P<step>%b)|(?P<lightning>%b))"'
    rb'(?P<between>,\s*"name": "(?P<name>[^"\\]*(?:\\.[^"\\]*)*)"[^{}]*"args": \{\s*)(?=")'
    % (_CALL, _FETCH, _DEVICE_STEP, _LIGHTNING)
)
_WITH_STACK: Final = re.compile(rb'"with_stack": ?1\b')
# Kineto's last words. The tab takes what stands before the last bracket for the events. The path in them is as the file
# system has it, quotation marks and all.
_END: Final = re.compile(rb'\]\s*,\s*"traceName": "[^\n]*"\s*\}\s*\Z')


def tensorboard_categories(source: IO[bytes], target: IO[bytes]) -> None:
    """Copy a trace, with the categories that TensorBoard's profiler tab reads.

    Events that are not written as Kineto writes them stay as they are. Lightning's ranges are marked as the tab's view
    of modules wants them; in a trace with Python stacks torch's own modules are there, and the ranges are left out.

    Args:
        source: a trace as torch wrote it, plain JSON.
        target: where it goes.

    Raises:
        OSError: one of them cannot be read or written.

    """
    rewrite = _Rewrite()
    for piece, is_last in _pieces(source):
        text = rewrite(piece)
        target.write(rewrite.end(text) if is_last else text)


def original_categories(text: bytes) -> bytes:
    """Give events of a rewritten trace the categories that torch wrote, byte for byte.

    Args:
        text: whole events.
    """
    head, *others = text.split(_MARK)
    if not others:
        return text
    parts: list[bytes] = []
    for other in others:
        category, closes, rest = other.partition(_MARK_END)
        begin = head.rfind(_CATEGORY) + len(_CATEGORY)
        end = head.find(b'"', begin)
        # An event's category stands before its arguments: between them no other event begins.
        if closes and len(category) < _LONGEST_CATEGORY and begin >= len(_CATEGORY) and head.find(_EVENT, end) < 0:
            parts += (head[:begin], category, head[end:])
            head = rest
        else:
            head = head + _MARK + other
    parts.append(head)
    return b"".join(parts)


def _pieces(source: IO[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Whole events, and whether no more follow; what stands before the first one is a piece or begins one."""
    rest = b""
    while data := source.read(_CHUNK):
        rest += data
        cut = rest.rfind(_EVENT)
        if cut > 0:
            yield rest[:cut], False
            rest = rest[cut:]
        elif len(rest) > _LONGEST_EVENT:
            yield rest, False
            rest = b""
    yield rest, True


class _Rewrite:
    """Rewrites piece by piece."""

    def __init__(self) -> None:
        self._is_first = True
        self._has_stacks = False
        self._has_modules = self._has_actions = False

    def __call__(self, piece: bytes) -> bytes:
        if self._is_first:
            self._is_first = False
            self._has_stacks = _WITH_STACK.search(piece[: max(0, piece.find(b'"traceEvents"'))]) is not None
        return _REWRITTEN.sub(self._event, piece)

    def end(self, text: bytes) -> bytes:
        """Finish the last piece: with ``Framework``, the tab shows Lightning's modules and counts operators alone."""
        if not self._has_stacks and self._has_modules and self._has_actions:
            return _END.sub(b'],\n  "Framework": "pytorch-lightning"\n}', text)
        return _END.sub(b"]\n}", text)

    def _event(self, found: re.Match[bytes]) -> bytes:
        if found["call"]:
            was, category = found["call"], b"runtime"
        elif found["fetch"]:
            was, category = found["fetch"], b"cpu_op"
        elif found["step"]:
            was, category = found["step"], b"gpu_step"
        else:
            was, category = found["lightning"], b"user_annotation" if self._has_stacks else b"cpu_op"
            is_module = found["name"].startswith(b"[pl][module]")
            self._has_modules |= is_module
            self._has_actions |= not is_module
            if was == category:
                return found[0]
        return b'"cat": "%b"%b%b%b%b' % (category, found["between"], _MARK, was, _MARK_END)
