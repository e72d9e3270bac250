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
from typing import Any, Final, NamedTuple

_STANDARD: Final = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
# Methods that make an attribute of their first argument's name.
_MAKERS: Final = frozenset({"add_state", "register_buffer", "register_parameter", "setattr"})
_EMPTY_MAKERS: Final = frozenset({"list", "dict", "set", "deque", "defaultdict", "OrderedDict"})
_LOCALS: Final = ".<locals>."
_MOST_BYTES: Final = 2_000_000

Scope = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an assignment is looked for; refers to no object.

    Attributes:
        name: a variable, or an attribute with a dot before its name; empty for the only container of a function.
        scopes: files, each with the names of the class or the function in it, in the order of the search; no names are
            the whole file.
        definition: file and line, the answer where no assignment is found; None without one.
    """

    name: str = ""
    scopes: tuple[tuple[str | None, Scope], ...] = ()
    definition: tuple[str, int] | None = None

    @classmethod
    def of_class(cls, owner: type) -> Place | None:
        """Return the definition of a class; None for a built-in one."""
        file, scope = _file_of_module(owner.__module__), _scope(owner.__qualname__)
        return None if file is None else cls(name=scope[-1], scopes=((file, scope[:-1]),))

    @classmethod
    def of_attribute(cls, owner: type, name: Any) -> Place:
        """Return the place of an attribute of an instance or of the class itself."""
        bases = [(_file_of_module(base.__module__), _scope(base.__qualname__)) for base in owner.__mro__[:-1]]
        # Assigned from outside the class, as in ``model.history = []``.
        files = dict.fromkeys([_file_of_module("__main__"), *(file for file, _ in bases[:1])])
        outside = [(file, ()) for file in files if file and not is_library(file)]
        return cls(name=f".{name}", scopes=(*bases, *outside))

    @classmethod
    def of_global(cls, module: str, name: Any) -> Place:
        """Return the place of a module's variable."""
        return cls(name=str(name), scopes=((_file_of_module(module), ()),))

    @classmethod
    def of_function(cls, function: Any) -> Place:
        """Return the definition of a function."""
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        return cls(definition=code and (code.co_filename, code.co_firstlineno))

    @classmethod
    def of_closure(cls, function: Any, variable: str) -> Place:
        """Return the place of a variable of a function around another."""
        code = function.__code__
        # Before Python 3.11 the name that a decorator may have changed.
        *around, _ = getattr(code, "co_qualname", function.__qualname__).split(_LOCALS)
        scopes = [_scope(_LOCALS.join(around[:depth])) for depth in range(len(around), 0, -1)]
        return cls(
            name=variable,
            scopes=tuple((code.co_filename, scope) for scope in scopes),
            definition=(code.co_filename, code.co_firstlineno),
        )

    @classmethod
    def of_local(cls, code: CodeType, qualified: str) -> Place:
        """Return the place of the container among the local variables of a generator."""
        definition = code.co_filename, code.co_firstlineno
        return cls(scopes=((code.co_filename, _scope(qualified)),), definition=definition)


class _Assignment(NamedTuple):
    """A line that assigns a name (an attribute's has a dot before it), and the class or function around it."""

    scope: Scope
    name: str
    line: int
    is_empty: bool = False


class Assignments:
    """Reads each source file once; keep it no longer than a search."""

    def __init__(self) -> None:
        self._files: dict[str | None, tuple[list[_Assignment], list[str]]] = {None: ([], [])}

    def first(self, places: Iterable[Place]) -> tuple[str | None, str | None]:
        """Return ``file:line`` and the text of the first assignment in the program's own code, else in a library's."""
        library: tuple[str | None, str | None] = None, None
        for place in places:
            for file, line in self._lines(place):
                _, text = self._file(file)
                found = f"{_short(file)}:{line}", text[line - 1].strip() if line <= len(text) else None
                if not is_library(file):
                    return found
                library = library if library[0] else found
        return library

    def _lines(self, place: Place) -> Iterator[tuple[str, int]]:
        name = place.name
        for file, scope in place.scopes:
            depth = len(scope)
            rows = [row for row in self._file(file)[0] if row.scope[:depth] == scope]
            rows = [row for row in rows if (row.name == name if name else row.is_empty)]
            # Attributes: those of ``__init__`` first, those of the class's body last.
            rows.sort(
                key=lambda row: (
                    row.scope[depth : depth + 1] != ("__init__",),
                    bool(scope) and row.scope == scope if name.startswith(".") else len(row.scope),
                    row.line,
                )
            )
            if file is not None and (name or len(rows) == 1):
                yield from ((file, row.line) for row in rows)
        if place.definition is not None:
            yield place.definition

    def _file(self, file: str | None) -> tuple[list[_Assignment], list[str]]:
        if file not in self._files:
            self._files[file] = [], []
            try:
                if file is not None and os.stat(file).st_size <= _MOST_BYTES:  # noqa: PTH116 a string in, a string out
                    with tokenize.open(file) as opened:
                        text = opened.read()
                    self._files[file] = list(_assignments(ast.parse(text))), text.splitlines()
            except (OSError, SyntaxError, ValueError, RecursionError):
                pass
        return self._files[file]


def is_library(file: str) -> bool:
    """Return whether a source file is the standard library's or an installed package's."""
    return file.startswith(_STANDARD) or any(part in file for part in _INSTALLED)


def _file_of_module(name: str) -> str | None:
    return getattr(sys.modules.get(name), "__file__", None)


def _scope(qualified: str) -> Scope:
    return tuple(part for part in qualified.split(".") if part != "<locals>")


def _short(file: str) -> str:
    """Return the directory and the name of a file."""
    return "/".join(file.rsplit("/", 2)[-2:])


def _assignments(tree: ast.Module) -> Iterator[_Assignment]:
    """Yield the assignments of a file, the names of its functions and classes and the arguments among them."""
    pending: list[tuple[ast.AST, Scope]] = [(tree, ())]
    while pending:
        node, scope = pending.pop()
        for child in ast.iter_child_nodes(node):
            within = scope
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                name = getattr(child, "name", "<lambda>")
                yield _Assignment(scope, name, child.lineno)
                within = (*scope, name)
                arguments = () if isinstance(child, ast.ClassDef) else ast.walk(child.args)
                yield from (_Assignment(within, arg.arg, child.lineno) for arg in arguments if isinstance(arg, ast.arg))
            is_empty = isinstance(child, ast.Assign) and _is_empty(child.value)
            for name, line in _assigned(child):
                # The variables of a class are attributes.
                own = f".{name}" if isinstance(node, ast.ClassDef) and name[0] != "." else name
                yield _Assignment(scope, own, line, is_empty)
            pending.append((child, within))


def _assigned(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the names that a node assigns, by ``=`` or by a method such as ``add_state``, each with its line."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
        targets = [node.target]
    elif isinstance(node, ast.Call) and _called(node) in _MAKERS:
        names = [argument.value for argument in node.args[:2] if isinstance(argument, ast.Constant)]
        yield from ((f".{name}", node.lineno) for name in names if isinstance(name, str))
    for target in targets:
        for part in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
            if isinstance(part, ast.Attribute):
                yield f".{part.attr}", part.lineno
            elif isinstance(part, ast.Name):
                yield part.id, part.lineno


def _called(node: ast.Call) -> str:
    name: str = getattr(node.func, "attr", "") or getattr(node.func, "id", "")
    return name


def _is_empty(value: ast.expr) -> bool:
    return isinstance(value, ast.List | ast.Dict | ast.Set) or (
        isinstance(value, ast.Call) and _called(value) in _EMPTY_MAKERS
    )
