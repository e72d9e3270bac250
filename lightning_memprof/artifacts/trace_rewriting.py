"""A window's trace file: compressed, with the categories that TensorBoard's profiler tab reads, and back.

The tab (``torch-tb-profiler`` 0.4) knows the categories of older torch: driver calls are ``runtime``, a DataLoader's
fetch and Lightning's ranges are ``cpu_op``. It omits events of other categories from its sums, and counts a step twice
that also has a range on the device. A rewritten file has the tab's categories; torch's are in the event's ``args`` as
``Original category``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

from isal import igzip

from lightning_memprof.artifacts.own_program import ignore_job_signals, own_program

FAST_LEVEL: Final = 1
# Starting a process costs about as much as rewriting this.
_SMALL_BYTES: Final = 8 << 20
# Limits of that process, which rewrites about 150 MiB per second.
_START_SECONDS: Final = 60.0
_SLOWEST_BYTES: Final = 4 << 20
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
# The end that Kineto writes: the tab takes the text before the last bracket as events. The path is not escaped.
_END: Final = re.compile(rb'\]\s*,\s*"traceName": "[^\n]*"\s*\}\s*\Z')


# A character that :func:`range_name` has escaped.
_LETTER: Final = re.compile(rb"&#([0-9]{1,7});")
_MOST_LETTER: Final = 0x10FFFF


def range_name(name: str) -> str:
    """Return a name for a range, escaped to characters that Kineto preserves; :func:`write_trace` restores it.

    Kineto writes quotes unescaped, which breaks the JSON, ``/`` for a backslash, and ``unknown`` for a name with any
    character that is not printable ASCII.
    """
    # Called for each action.
    if name.isascii() and name.isprintable() and not ('"' in name or "\\" in name):
        return name
    encodable = name.encode("utf-8", "replace").decode()
    return "".join(
        letter if " " <= letter <= "~" and letter not in '"\\' else f"&#{ord(letter)};" for letter in encodable
    )


def write_trace(raw: Path, target: Path) -> None:
    """Write a trace that Kineto saved as ``raw`` to ``target``, as gzip, with the categories that TensorBoard reads.

    Scanning the text holds the GIL: a large trace is rewritten in a separate process, without torch.

    Raises:
        OSError: one of them cannot be read or written.
    """
    if raw.stat().st_size > _SMALL_BYTES and _by_process(raw, target):
        return
    _write(raw, target)


def _by_process(raw: Path, target: Path) -> bool:
    quiet = subprocess.DEVNULL
    seconds = _START_SECONDS + raw.stat().st_size / _SLOWEST_BYTES
    with suppress(OSError, subprocess.TimeoutExpired):
        command = own_program(__name__, str(raw.absolute()), str(target.absolute()))
        # With close_fds, Python before 3.13 forks and reads a pipe until every copy of its other end is closed: a
        # DataLoader worker that the training forks meanwhile has one for its whole life. Without, it uses posix_spawn.
        done = subprocess.run(
            command, stdin=quiet, stdout=quiet, stderr=quiet, check=False, close_fds=False, timeout=seconds
        )
        return done.returncode == 0
    return False


def _write(raw: Path, target: Path) -> None:
    with raw.open("rb") as source, igzip.open(target, "wb", compresslevel=FAST_LEVEL) as gz:  # type: ignore[no-untyped-call]
        tensorboard_categories(source, gz)


def main(raw: str, target: str) -> None:
    """Rewrite a trace in this process."""
    ignore_job_signals()
    # Sockets of gloo and NCCL: other ranks would see the end of a killed training only when this process ends.
    os.closerange(3, max(int(fd.name) for fd in Path("/dev/fd").iterdir()) + 1)
    _write(Path(raw), Path(target))


def tensorboard_categories(source: IO[bytes], target: IO[bytes]) -> None:
    """Copy a trace, with the categories that TensorBoard's profiler tab reads.

    Events in another layout than Kineto's are copied unchanged. Lightning's ranges get the category that the tab's view
    of modules reads, unless the trace has Python stacks: those contain torch's own modules.

    Raises:
        OSError: one of them cannot be read or written.
    """
    rewrite = _Rewrite()
    for piece, is_last in _pieces(source):
        text = rewrite(piece)
        target.write(rewrite.end(text) if is_last else text)


def original_categories(text: bytes) -> bytes:
    """Return events of a rewritten trace with the categories that torch wrote, byte for byte."""
    head, *others = text.split(_MARK)
    if not others:
        return text
    parts: list[bytes] = []
    for other in others:
        category, closes, rest = other.partition(_MARK_END)
        begin = head.rfind(_CATEGORY) + len(_CATEGORY)
        end = head.find(b'"', begin)
        # An event's category precedes its arguments: no other event begins between them.
        if closes and len(category) < _LONGEST_CATEGORY and begin >= len(_CATEGORY) and head.find(_EVENT, end) < 0:
            parts += (head[:begin], category, head[end:])
            head = rest
        else:
            head = head + _MARK + other
    parts.append(head)
    return b"".join(parts)


def _pieces(source: IO[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yield complete events, and whether they are the last; the header is a piece of its own or begins one."""
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
        text = _REWRITTEN.sub(self._event, piece)
        return _LETTER.sub(_letter, text) if b"&#" in text else text

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


def _letter(found: re.Match[bytes]) -> bytes:
    number = int(found[1])
    return json.dumps(chr(number)).encode()[1:-1] if number <= _MOST_LETTER else found[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
