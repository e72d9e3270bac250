"""The source lines that assign an attribute, a global variable, or a variable of a closure."""

from __future__ import annotations

import ast
import inspect
import os
import sys
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any, Final

_STANDARD: Final = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
# Methods that make an attribute of their first argument's name.
_MAKERS: Final = frozenset({"add_state", "register_buffer", "register_parameter", "setattr"})
_EMPTY_MAKERS: Final = frozenset({"list", "dict", "set", "deque", "defaultdict", "OrderedDict"})
_MOST_BYTES: Final = 2_000_000


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an assignment is looked for; refers to no object.

    Attributes:
        file: path of the source.
        name: the attribute or the variable; None for a definition.
        scope: qualified name of the class or function.
        line: of the definition, the answer where no assignment is found; None without one.
    """

    file: str | None
    name: str | None
    scope: str = ""
    line: int | None = None
    kind: str = "attribute"
    bases: tuple[tuple[str | None, str], ...] = ()

    @classmethod
    def of_class(cls, owner: type) -> Place | None:
        """Return the definition of a class; None for a built-in one."""
        file = _file_of_module(owner.__module__)
        return None if file is None else cls(file=file, name=None, scope=owner.__qualname__, kind="class")

    @classmethod
    def of_attribute(cls, owner: type, name: Any) -> Place:
        """Return the place of an attribute of an instance or of the class itself."""
        bases = tuple((_file_of_module(base.__module__), base.__qualname__) for base in owner.__mro__[:-1])
        return cls(file=bases[0][0] if bases else None, name=str(name), bases=bases)

    @classmethod
    def of_global(cls, module: str, name: Any) -> Place:
        """Return the place of a module's variable."""
        return cls(file=_file_of_module(module), name=str(name), kind="global")

    @classmethod
    def of_function(cls, function: Any) -> Place:
        """Return the definition of a function."""
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        return cls(file=code and code.co_filename, name=None, line=code and code.co_firstlineno, kind="function")

    @classmethod
    def of_closure(cls, function: Any, variable: str) -> Place:
        """Return the place of a variable of the function around another."""
        code = function.__code__
        return cls(file=code.co_filename, name=variable, line=code.co_firstlineno, kind="closure")

    @classmethod
    def of_local(cls, code: CodeType) -> Place:
        """Return the place of the container among the local variables of a generator."""
        return cls(file=code.co_filename, name=None, line=code.co_firstlineno, kind="local")


def _file_of_module(name: str) -> str | None:
    return getattr(sys.modules.get(name), "__file__", None)


class Assignments:
    """Reads each source file once; keep it no longer than a search."""

    def __init__(self) -> None:
        self._trees: dict[str, tuple[ast.Module, list[str]] | None] = {}

    def first(self, places: Iterable[Place]) -> tuple[str | None, str | None]:
        """Return ``file:line`` and the text of the first assignment in the program's own code, else in a library's."""
        library: tuple[str | None, str | None] = None, None
        for place in places:
            for file, line in self._lines(place):
                parsed = self._tree(file)
                text = parsed[1][line - 1].strip() if parsed is not None and line <= len(parsed[1]) else None
                found = f"{_short(file)}:{line}", text
                if not is_library(file):
                    return found
                library = library if library[0] else found
        return library

    def _lines(self, place: Place) -> Iterator[tuple[str, int]]:
        if place.kind == "attribute":
            yield from self._attribute(place)
            return
        parsed = self._tree(place.file) if place.file else None
        if parsed is None or place.file is None:
            return
        tree = parsed[0]
        lines: Iterator[int]
        if place.kind == "global":
            lines = _assigned(tree, place.name or "")
        elif place.kind == "class":
            lines = (node.lineno for node in _scopes(tree, place.scope))
        else:
            lines = _in_function(tree, place)
        for line in lines:
            yield place.file, line

    def _attribute(self, place: Place) -> Iterator[tuple[str, int]]:
        name = place.name or ""
        for file, scope in place.bases:
            parsed = self._tree(file) if file else None
            if parsed is None or file is None:
                continue
            for node in _scopes(parsed[0], scope):
                for line in _made(node, name):
                    yield file, line
        # Assigned from outside the class, as in ``model.history = []``.
        files = dict.fromkeys([_file_of_module("__main__"), place.file])
        for file in files:
            parsed = self._tree(file) if file and not is_library(file) else None
            if parsed is not None and file is not None:
                for line in _made(parsed[0], name):
                    yield file, line

    def _tree(self, file: str) -> tuple[ast.Module, list[str]] | None:
        if file not in self._trees:
            self._trees[file] = None
            try:
                if os.stat(file).st_size <= _MOST_BYTES:  # noqa: PTH116 a string in, a string out
                    with tokenize.open(file) as opened:
                        text = opened.read()
                    self._trees[file] = ast.parse(text), text.splitlines()
            except (OSError, SyntaxError, ValueError, RecursionError):
                pass
        return self._trees[file]


def is_library(file: str) -> bool:
    """Return whether a source file is the standard library's or an installed package's."""
    return file.startswith(_STANDARD) or any(part in file for part in _INSTALLED)


def _short(file: str) -> str:
    """Return the directory and the name of a file."""
    return "/".join(file.rsplit("/", 2)[-2:])


def _scopes(tree: ast.AST, qualified: str) -> Iterator[ast.ClassDef]:
    """Yield the classes of a qualified name."""
    names = [part for part in qualified.split(".") if part != "<locals>"]
    pending: list[tuple[ast.AST, int]] = [(tree, 0)]
    while pending:
        node, depth = pending.pop()
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                pending.append((child, depth))
            elif child.name == names[depth]:
                if depth + 1 < len(names):
                    pending.append((child, depth + 1))
                elif isinstance(child, ast.ClassDef):
                    yield child


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        found = node.targets
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
        found = [node.target]
    else:
        return []
    return [
        part for target in found for part in (target.elts if isinstance(target, ast.Tuple | ast.List) else [target])
    ]


def _made(scope: ast.AST, name: str) -> Iterator[int]:
    """Yield the lines that assign an attribute: ``x.name = ...``, in a class's body, or by add_state and its like."""
    for node in _ordered(scope):
        for target in _targets(node):
            if isinstance(target, ast.Attribute) and target.attr == name:
                yield target.lineno
        if isinstance(node, ast.Call) and _called(node) in _MAKERS:
            named = [argument.value for argument in node.args[:2] if isinstance(argument, ast.Constant)]
            if name in named:
                yield node.lineno
    if isinstance(scope, ast.ClassDef):
        for node in scope.body:
            if any(isinstance(target, ast.Name) and target.id == name for target in _targets(node)):
                yield node.lineno


def _ordered(scope: ast.AST) -> list[ast.AST]:
    """Return the nodes of a scope in the order of lines, those of ``__init__`` first."""
    first = [node for node in ast.iter_child_nodes(scope) if getattr(node, "name", None) == "__init__"]
    nodes = [*(part for node in first for part in ast.walk(node)), *sorted(ast.walk(scope), key=_line)]
    return list(dict.fromkeys(nodes))


def _line(node: ast.AST) -> int:
    line: int = getattr(node, "lineno", 0)
    return line


def _called(node: ast.Call) -> str:
    name: str = getattr(node.func, "attr", "") or getattr(node.func, "id", "")
    return name


def _assigned(scope: ast.AST, name: str) -> Iterator[int]:
    """Yield the lines that assign a variable."""
    for node in sorted(ast.walk(scope), key=_line):
        if any(isinstance(target, ast.Name) and target.id == name for target in _targets(node)):
            yield _line(node)


def _in_function(tree: ast.AST, place: Place) -> Iterator[int]:
    """Yield the line of a closure's variable, of a generator's only container, or of the function itself."""
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        and node.lineno <= (place.line or 0) <= (node.end_lineno or 0)
    ]
    around.sort(key=lambda node: -node.lineno)
    if place.kind == "closure":
        for function in around:
            yield from _assigned(function, place.name or "")
            if any(argument.arg == place.name for argument in ast.walk(function) if isinstance(argument, ast.arg)):
                yield function.lineno
    elif place.kind == "local":
        own = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        for function in own:
            first = min([function.lineno, *(part.lineno for part in function.decorator_list)])
            if first == place.line:
                containers = [node for node in ast.walk(function) if isinstance(node, ast.Assign) and _is_empty(node)]
                if len(containers) == 1:
                    yield containers[0].lineno
    if place.line is not None:
        yield place.line


def _is_empty(node: ast.Assign) -> bool:
    value = node.value
    return isinstance(value, ast.List | ast.Dict | ast.Set) or (
        isinstance(value, ast.Call) and _called(value) in _EMPTY_MAKERS
    )
