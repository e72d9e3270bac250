"""A reader of pickles that hold data and nothing else: numbers, text, lists, tuples and dictionaries.

An unpickler runs what a pickle names, and one that refuses names can still be made to ask for any amount of memory (a
memo of 2**32 entries, a text of 2**60 bytes), to overflow the stack (a tuple of a tuple of ... as a key) or to compare
keys for hours. This one knows the opcodes that data need, takes only text as keys, and makes nothing that the file is
not long enough to hold. The first opcode that it does not know ends the reading, before anything is made of it.

Format: `pickletools` of the standard library, protocols 2 to 5.
"""

from __future__ import annotations

import struct
from types import MappingProxyType
from typing import Any, Final

from lightning_memprof.errors import ArtifactError

# Decompressed. About 40 times as much memory is the most that a hostile pickle can take.
MAX_BYTES: Final = 512 << 20
# Lists, dictionaries and tuples, and those that are begun inside one another.
MAX_CONTAINERS: Final = 10_000_000
MAX_DEPTH: Final = 1_000
_MAX_INTEGER_BYTES: Final = 16
_GLOBAL: Final = ord("c")
_STACK_GLOBAL: Final = 0x93
_STOP: Final = ord(".")
_SHOWN: Final = 60
_TEXT_KEYS: Final = frozenset({str})
_DAMAGE: Final = (IndexError, KeyError, ValueError, TypeError, OverflowError, struct.error)

_CONSTANTS: Final = MappingProxyType({ord("N"): None, 0x88: True, 0x89: False, ord(")"): ()})
# Bytes of the length or number that follows.
_TEXTS: Final = MappingProxyType({0x8C: 1, ord("X"): 4})
_PUTS: Final = MappingProxyType({ord("q"): 1, ord("r"): 4})
_SKIPPED: Final = MappingProxyType({0x80: 1, 0x95: 8})  # PROTO, FRAME
_TUPLES: Final = MappingProxyType({0x85: 1, 0x86: 2, 0x87: 3})


def read_pickle(data: bytes, source: str) -> Any:
    """Read a pickle of numbers, text, None, lists, tuples and dictionaries with text as keys.

    Containers that the pickle shares are shared.

    Args:
        data: the pickle, decompressed.
        source: where it is from, the first words of every error.

    Raises:
        ArtifactError: it names a global or has another opcode that data do not need; it is damaged, cut off, above a
            limit, or followed by other data.
    """
    if len(data) > MAX_BYTES:
        raise ArtifactError(f"{source}: is longer than {MAX_BYTES} bytes; record fewer events (max_entries)")
    reader = _Reader(data, source)
    try:
        found = reader.read()
    except _DAMAGE as error:
        raise ArtifactError(
            f"{source}: is damaged or cut off at byte {min(reader.at, len(data))} of {len(data)}; copy it again"
        ) from error
    if reader.at < len(data):
        raise ArtifactError(
            f"{source}: has {len(data) - reader.at} bytes after the end of the pickle at byte {reader.at}; another "
            "dump was appended or partly overwritten: dump it again"
        )
    return found


class _Reader:
    def __init__(self, data: bytes, source: str) -> None:
        self.at = 0
        self._data = data
        self._source = source
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._containers = 0

    def read(self) -> Any:  # noqa: C901, PLR0912 one opcode a branch: a call for each would take three times as long
        data, stack, marks, memo = self._data, self._stack, self._marks, self._memo
        at = 0
        while True:
            code = data[at]
            at += 1
            if code == 0x68:  # BINGET
                stack.append(memo[data[at]])
                at += 1
            elif code == 0x6A:  # LONG_BINGET
                stack.append(memo[int.from_bytes(data[at : at + 4], "little")])
                at += 4
            elif code == 0x94:  # MEMOIZE
                memo.append(stack[-1])
            elif code == 0x4B:  # BININT1
                stack.append(data[at])
                at += 1
            elif code == 0x8A and data[at] <= _MAX_INTEGER_BYTES:  # LONG1
                end = at + 1 + data[at]
                stack.append(int.from_bytes(data[at + 1 : end], "little", signed=True))
                at = end
            elif code == 0x28:  # MARK
                marks.append(len(stack))
                if len(marks) > MAX_DEPTH:
                    raise ArtifactError(f"{self._source}: nests deeper than {MAX_DEPTH}; a snapshot does not")
            elif code == 0x75:  # SETITEMS
                items = self._to_mark()
                self._set(stack[-1], items)
            elif code == 0x7D:  # EMPTY_DICT
                stack.append({})
                self._count()
            elif code == 0x4A:  # BININT
                stack.append(int.from_bytes(data[at : at + 4], "little", signed=True))
                at += 4
            elif code == 0x5D:  # EMPTY_LIST
                stack.append([])
                self._count()
            elif code == _STOP:
                self.at = at
                return stack.pop()
            else:
                self.at = at
                self._rare(code)
                at = self.at

    def _rare(self, code: int) -> None:
        """Push a value, name the last one, or make or fill a container."""
        stack = self._stack
        if code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code in _TEXTS:
            stack.append(self._take(self._number(_TEXTS[code])).decode("utf-8", "replace"))
        elif code in _PUTS:
            self._put(self._number(_PUTS[code]))
        elif code in _SKIPPED:
            self._take(_SKIPPED[code])
        elif code == ord("M"):
            stack.append(self._number(2))
        elif code == ord("G"):
            stack += struct.unpack(">d", self._take(8))
        elif code in _TUPLES:
            self._count()
            stack[-_TUPLES[code] :] = [tuple(self._top(_TUPLES[code]))]
        elif code == ord("t"):
            self._count()
            stack.append(tuple(self._to_mark()))
        elif code == ord("a"):
            self._extend(stack[-2], [stack.pop()])
        elif code == ord("e"):
            items = self._to_mark()
            self._extend(stack[-1], items)
        elif code == ord("s"):
            pair = self._top(2)
            del stack[-2:]
            self._set(stack[-1], pair)
        else:
            self._refuse(code)

    def _refuse(self, code: int) -> None:
        if code == _GLOBAL:
            name = b".".join([self._line()[:_SHOWN], self._line()[:_SHOWN]]).decode("utf-8", "replace")
            found = f"names the global {name!r}"
        elif code == _STACK_GLOBAL:
            name = ".".join(part[:_SHOWN] if isinstance(part, str) else "?" for part in self._top(2))
            found = f"names the global {name!r}"
        else:
            import pickletools

            known = next((opcode.name for opcode in pickletools.opcodes if opcode.code == chr(code)), None)
            if known is None:
                raise ValueError
            found = f"has the opcode {known}"
        raise ArtifactError(
            f"{self._source}: {found} where a snapshot holds data only; nothing of it was run: ask its author"
        )

    def _take(self, length: int) -> bytes:
        end = self.at + length
        if end > len(self._data):
            raise IndexError
        taken = self._data[self.at : end]
        self.at = end
        return taken

    def _number(self, length: int) -> int:
        return int.from_bytes(self._take(length), "little")

    def _line(self) -> bytes:
        return self._take(self._data.index(b"\n", self.at) + 1 - self.at)[:-1]

    def _top(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise IndexError
        return self._stack[-count:]

    def _to_mark(self) -> list[Any]:
        mark = self._marks.pop()
        items = self._stack[mark:]
        del self._stack[mark:]
        return items

    def _put(self, number: int) -> None:
        # Every entry takes at least a byte: a larger number is not a memo of this file.
        if number > self.at:
            raise IndexError
        self._memo += [None] * (number + 1 - len(self._memo))
        self._memo[number] = self._stack[-1]

    def _count(self) -> None:
        self._containers += 1
        if self._containers > MAX_CONTAINERS:
            raise ArtifactError(
                f"{self._source}: holds more than {MAX_CONTAINERS} lists and dictionaries; "
                "record fewer events (max_entries)"
            )

    def _extend(self, target: Any, items: list[Any]) -> None:
        if type(target) is not list:
            raise TypeError
        target += items

    def _set(self, target: Any, items: list[Any]) -> None:
        if type(target) is not dict or len(items) % 2:
            raise TypeError
        keys = items[::2]
        # Only the hash of text cannot be chosen by the file's author.
        if not _TEXT_KEYS.issuperset(map(type, keys)):
            raise TypeError
        target.update(zip(keys, items[1::2], strict=True))
