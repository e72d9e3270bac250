"""A reader of pickles that hold data and nothing else: numbers, text, lists, tuples and dictionaries.

An unpickler runs what a pickle names, and one that refuses names can still be made to ask for any amount of memory (a
memo of 2**32 entries, a text of 2**60 bytes), to overflow the stack (a tuple of a tuple of ... as a key) or to compare
keys for hours. This one knows the opcodes that data need, takes only text as keys, and makes nothing that the file is
not long enough to hold. The first opcode that it does not know ends the reading, before anything is made of it.

Format: `pickletools` of the standard library, protocols 0 to 5.
"""

from __future__ import annotations

import struct
from types import MappingProxyType
from typing import Any, Final

import msgspec

from lightning_memprof.errors import ArtifactError

_MAX_INTEGER_BYTES: Final = 16
_MAX_DIGITS: Final = 40
_GLOBAL: Final = ord("c")
_INST: Final = ord("i")
_STACK_GLOBAL: Final = 0x93
_STOP: Final = ord(".")
_SHOWN: Final = 60
_TEXT_KEYS: Final = frozenset({str})
_DAMAGE: Final = (IndexError, KeyError, ValueError, TypeError, OverflowError, struct.error)

_CONSTANTS: Final = MappingProxyType({ord("N"): None, 0x88: True, 0x89: False, ord(")"): ()})
_FIXED: Final = MappingProxyType(
    {
        ord("J"): struct.Struct("<i"),
        ord("K"): struct.Struct("<B"),
        ord("M"): struct.Struct("<H"),
        ord("G"): struct.Struct(">d"),
    }
)
_TEXTS: Final = MappingProxyType({0x8C: struct.Struct("<B"), ord("X"): struct.Struct("<I"), 0x8D: struct.Struct("<Q")})
_BYTES: Final = MappingProxyType(
    {ord("C"): struct.Struct("<B"), ord("B"): struct.Struct("<I"), 0x8E: struct.Struct("<Q")}
)
_LONGS: Final = MappingProxyType({0x8A: struct.Struct("<B"), 0x8B: struct.Struct("<I")})
_GETS: Final = MappingProxyType({ord("h"): struct.Struct("<B"), ord("j"): struct.Struct("<I")})
_PUTS: Final = MappingProxyType({ord("q"): struct.Struct("<B"), ord("r"): struct.Struct("<I")})
_TUPLES: Final = MappingProxyType({0x85: 1, 0x86: 2, 0x87: 3})
_SKIPPED: Final = MappingProxyType({0x80: 1, 0x95: 8})  # PROTO, FRAME


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a pickle may take.

    Args:
        bytes: its length, decompressed. About 40 times as much memory is the most that a hostile one can take.
        containers: lists, dictionaries and tuples in it.
        depth: containers that are begun inside one another.
    """

    bytes: int = 512 << 20
    containers: int = 10_000_000
    depth: int = 1_000


def read_pickle(data: bytes, source: str, limits: Limits | None = None) -> Any:
    """Read a pickle of numbers, text, bytes, None, lists, tuples and dictionaries with text as keys.

    Containers that the pickle shares are shared.

    Args:
        data: the pickle, decompressed.
        source: where it is from, the first words of every error.
        limits: what it may take.

    Raises:
        ArtifactError: it names a global or has another opcode that data do not need; it is damaged, cut off, above a
            limit, or followed by other data.
    """
    limits = limits or Limits()
    if len(data) > limits.bytes:
        raise ArtifactError(f"{source}: is longer than {limits.bytes} bytes; record fewer events (max_entries)")
    reader = _Reader(data, source, limits)
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
    def __init__(self, data: bytes, source: str, limits: Limits) -> None:
        self.at = 0
        self._data = data
        self._source = source
        self._limits = limits
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
                if len(marks) > self._limits.depth:
                    raise ArtifactError(f"{self._source}: nests deeper than {self._limits.depth}; a snapshot does not")
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
        if code in _CONSTANTS:
            self._stack.append(_CONSTANTS[code])
        elif code in _FIXED:
            self._stack.append(self._number(_FIXED[code]))
        elif code in _TEXTS:
            self._stack.append(self._take(self._number(_TEXTS[code])).decode("utf-8", "replace"))
        elif code in _BYTES:
            self._stack.append(self._take(self._number(_BYTES[code])))
        elif code in _LONGS:
            self._stack.append(self._long(self._number(_LONGS[code])))
        elif code in _GETS:
            self._stack.append(self._memo[self._number(_GETS[code])])
        elif code in _PUTS:
            self._put(self._number(_PUTS[code]))
        elif code in _SKIPPED:
            self._take(_SKIPPED[code])
        elif not self._build(code) and not self._read_line(code):
            self._refuse(code)

    def _build(self, code: int) -> bool:
        """Make or fill a container, or move on the stack; False where the opcode does neither."""
        stack = self._stack
        if code in _TUPLES:
            self._count()
            stack[-_TUPLES[code] :] = [tuple(self._top(_TUPLES[code]))]
            return True
        match chr(code):
            case "a":
                self._extend(stack[-2], [stack.pop()])
            case "e":
                items = self._to_mark()
                self._extend(stack[-1], items)
            case "s":
                pair = self._top(2)
                del stack[-2:]
                self._set(stack[-1], pair)
            case "t" | "l" | "d" as kind:
                self._count()
                items = self._to_mark()
                made: dict[Any, Any] = {}
                if kind == "d":
                    self._set(made, items)
                stack.append(tuple(items) if kind == "t" else items if kind == "l" else made)
            case "0":
                stack.pop()
            case "1":
                self._to_mark()
            case "2":
                stack.append(stack[-1])
            case _:
                return False
        return True

    def _read_line(self, code: int) -> bool:
        """Take what protocol 0 writes as a line of text; False where the opcode is another."""
        kind = chr(code)
        if kind not in "IFLVgp":
            return False
        line = self._line()
        if kind == "V":
            self._stack.append(line.decode("raw-unicode-escape", "replace"))
        elif len(line) > _MAX_DIGITS:
            raise ValueError
        elif kind == "F":
            self._stack.append(float(line))
        elif kind == "I" and line in {b"00", b"01"}:
            self._stack.append(line == b"01")
        elif kind in "IL":
            self._stack.append(int(line.removesuffix(b"L")))
        elif kind == "g":
            self._stack.append(self._memo[int(line)])
        else:
            self._put(int(line))
        return True

    def _refuse(self, code: int) -> None:
        if code in {_GLOBAL, _INST}:
            name = b".".join([self._line()[:_SHOWN], self._line()[:_SHOWN]]).decode("utf-8", "replace")
        elif code == _STACK_GLOBAL:
            name = ".".join(part[:_SHOWN] if isinstance(part, str) else "?" for part in self._top(2))
        else:
            import pickletools

            known = next((opcode.name for opcode in pickletools.opcodes if opcode.code == chr(code)), None)
            if known is None:
                raise ValueError
            raise ArtifactError(
                f"{self._source}: has the opcode {known} where a snapshot holds data only; nothing of it was run: "
                "ask its author"
            )
        raise ArtifactError(
            f"{self._source}: names the global {name!r} where a snapshot holds data only; nothing of it was run: "
            "ask its author"
        )

    def _take(self, length: int) -> bytes:
        end = self.at + length
        if end > len(self._data):
            raise IndexError
        taken = self._data[self.at : end]
        self.at = end
        return taken

    def _number(self, layout: struct.Struct) -> Any:
        return layout.unpack(self._take(layout.size))[0]

    def _long(self, length: int) -> int:
        if length > _MAX_INTEGER_BYTES:
            raise ArtifactError(f"{self._source}: has an integer of {length} bytes; a snapshot's have at most 8")
        return int.from_bytes(self._take(length), "little", signed=True)

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
        if not 0 <= number <= self.at:
            raise IndexError
        self._memo += [None] * (number + 1 - len(self._memo))
        self._memo[number] = self._stack[-1]

    def _count(self) -> None:
        self._containers += 1
        if self._containers > self._limits.containers:
            raise ArtifactError(
                f"{self._source}: holds more than {self._limits.containers} lists and dictionaries; "
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
