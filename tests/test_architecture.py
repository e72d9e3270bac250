from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lightning_memprof"

LONG_LINES = 400
FUNCTION_LINES = 60
PUBLIC_METHODS = 12
PARAMETERS = 6
KEYWORD_FIELDS = 3
MIRRORED_LINES = 60
ONE_IMPORTER_MODULES = 20
# The entry points import the callback, or a trial, when the environment asks for it.
LAZY_IMPORTS = {
    ("integration/registration.py", "integration/callback.py"),
    ("trial/attach.py", "trial/program.py"),
}
# Modules with a single importer, each with the reason why it is not part of it.
ONE_IMPORTER = {
    "read/snapshot/restricted_pickle.py": "reads pickles of unknown origin and executes nothing",
    "account/trace/host.py": "pass over the host's events, beside those of device and idle time",
    "capture/function_rows.py": "file format of function memory",
    "capture/named_snapshots.py": "the callback's snapshots and regions, without lightning",
    "trial/batches.py": "looks for the largest batch by runs; the command parses options and prints",
    "estimation/simulation.py": "one simulation in a child process; the estimator decides which",
    "capture/watchdog.py": "interrupts a collector, by a thread and a signal",
    "capture/tracker/sharded_tracker.py": "imports torch's FSDP classes, which are loaded when they are used",
    "integration/driver.py": "actions to phases and points; the attachment is the life of a run",
    "integration/loop_run.py": "calls to phases and points; the program has the face",
    "integration/curves.py": "curves through loggers, a feature of its own",
    "report/export/memory_viz.py": "one format per module",
    "report/export/stacks.py": "one format per module",
    "report/perfetto.py": "a server; only one command starts it",
    "timeline/merge.py": "merges any sources; the command finds them and prints",
    "timeline/rewrite.py": "the second reading of a source, beside the first in plan.py",
    "testing/budgets.py": "imports numpy and the analysis; pytest imports the plugin in every session",
    "tensorboard/pages.py": "runs in a separate process",
}
# Folders in which every module has one importer by design.
ONE_BY_DESIGN = {
    "judge/": "the rules of a domain per module, listed in one place",
    "account/ledger/": "a ledger per module",
    "capture/collectors/": "a collector per module; the public namespace resolves it",
    "cli/": "a command per module, listed in one place",
    "report/charts/": "a chart per module, listed in one place",
    "report/printers/": "a format per module",
    "report/sections/": "a section per module, listed in one place",
}
# Modules above MIRRORED_LINES without a test file of their own name; may only become fewer.
UNMIRRORED = 73
# Modules above LONG_LINES; may only become fewer.
LONG_MODULES = 25

TOP_LEVEL = {
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "configs",
    "constraints.txt",
    "docs",
    "lightning_memprof",
    "pyproject.toml",
    "tests",
}
# Each owns one switch of the interpreter that torch gives no handle for, or the live runs, to which they belong.
STATE_OWNERS = {
    "capture/collectors/allocator_history.py",
    "capture/collectors/oom.py",
    "capture/collectors/operator_trace.py",
    "capture/collectors/saved_tensors.py",
    "integration/live_run.py",
}
# Calls whose value cannot change.
IMMUTABLE_CALLS = {
    "MappingProxyType",
    "NewType",
    "ParamSpec",
    "TypeVar",
    "frozenset",
    "getLogger",
    "logger_of",
    "namedtuple",
    "compile",
    "tuple",
}
# Calls whose value is there to be changed: Final does not excuse these, nor a container that starts empty.
STATEFUL_CALLS = {
    "ContextVar",
    "Counter",
    "Lock",
    "OrderedDict",
    "RLock",
    "WeakKeyDictionary",
    "WeakSet",
    "WeakValueDictionary",
    "array",
    "bytearray",
    "count",
    "cycle",
    "defaultdict",
    "deque",
    "dict",
    "list",
    "local",
    "set",
}

MODULES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


@cache
def lightning_methods() -> frozenset[str]:
    """The names whose signatures are Lightning's and not ours."""
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.profilers import PyTorchProfiler

    return frozenset(name for name in [*dir(Callback), *dir(PyTorchProfiler)] if not name.startswith("__"))


def is_integration(name: str) -> bool:
    return name.startswith("integration/")


def functions(node: ast.AST, owner: ast.ClassDef | None = None) -> Iterator[tuple[Function, ast.ClassDef | None]]:
    """Every function below ``node`` with the class whose method it is, if any."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield child, owner
            yield from functions(child)
        elif isinstance(child, ast.ClassDef):
            yield from functions(child, child)
        else:
            yield from functions(child, owner)


def parameters(function: Function, owner: ast.ClassDef | None) -> int:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    static = "staticmethod" in map(ast.unparse, function.decorator_list)
    bound = int(owner is not None and not static and bool(positional))
    variable = sum(argument is not None for argument in (arguments.vararg, arguments.kwarg))
    return len(positional) - bound + len(arguments.kwonlyargs) + variable


def inherits_lightning_signature(name: str, function: Function, owner: ast.ClassDef | None) -> bool:
    if not is_integration(name) or owner is None:
        return False
    if function.name == "__init__":
        return any(ast.unparse(base).endswith("PyTorchProfiler") for base in owner.bases)
    return function.name in lightning_methods()


def changeable(value: ast.expr, *, constant: bool) -> bool:
    """Whether a value at module level is state; ``constant`` is whether its name is annotated Final."""
    match value:
        case ast.Dict(keys=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
            return not (constant and elements)
        case ast.ListComp() | ast.DictComp() | ast.SetComp():
            return not constant
        case ast.GeneratorExp():
            return True
        case ast.Call(func=function):
            called = ast.unparse(function).rpartition(".")[2]
            return called in STATEFUL_CALLS if constant else called not in IMMUTABLE_CALLS
        case ast.Tuple(elts=elements):
            return any(changeable(element, constant=constant) for element in elements)
        case ast.BinOp(left=left):  # `frozenset | set` is what its left side is
            return changeable(left, constant=constant)
        case ast.IfExp(body=body, orelse=orelse):
            return changeable(body, constant=constant) or changeable(orelse, constant=constant)
    return False


def module_state(module: ast.Module) -> Iterator[ast.stmt]:
    """The assignments at module level that make something changeable."""
    pending: list[ast.stmt] = list(module.body)
    while pending:
        match pending.pop():
            case ast.If(body=body, orelse=orelse) | ast.For(body=body, orelse=orelse):
                pending += [*body, *orelse]
            case ast.With(body=body):
                pending += body
            case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=finalbody):
                pending += [*body, *orelse, *finalbody, *(line for handler in handlers for line in handler.body)]
            case ast.Assign(targets=targets, value=value) as statement:
                if changeable(value, constant=False) and [ast.unparse(target) for target in targets] != ["__all__"]:
                    yield statement
            case ast.AnnAssign(target=target, annotation=annotation, value=value) as statement if value is not None:
                constant = "Final" in ast.unparse(annotation)
                if changeable(value, constant=constant) and ast.unparse(target) != "__all__":
                    yield statement


def check_none(found: list[str] | dict[str, int], rule: str = "") -> None:
    lines = [f"{where}: {count}" for where, count in found.items()] if isinstance(found, dict) else found
    assert not found, "\n".join([rule, *lines])


def test_the_package_is_there():
    assert {"__init__.py", "errors.py", "schedule.py"} <= set(MODULES)


def test_long_modules_become_fewer():
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    long = {name: length for name, length in lengths.items() if length > LONG_LINES}
    assert len(long) <= LONG_MODULES, f"{len(long)} modules have more than {LONG_LINES} lines: {long}"


def imports_of(name: str) -> set[str]:
    """The modules of the package that a module imports, those that only a type checker imports included."""
    found: set[str] = set()
    for node in ast.walk(tree(name)):
        match node:
            case ast.ImportFrom(module=str() as module, names=names):
                parts = module.split(".")
                if parts[0] == PACKAGE.name:
                    base = "/".join(parts[1:])
                    candidates = {f"{base}/{alias.name}.py".lstrip("/") for alias in names} & MODULES.keys()
                    # `from package import name`: the name is a module, or the package itself defines it.
                    named = {f"{base}.py", f"{base}/__init__.py".lstrip("/")} & MODULES.keys()
                    found |= candidates or named
            case ast.Import(names=names):
                found |= {
                    f"{alias.name.removeprefix(PACKAGE.name + '.').replace('.', '/')}.py" for alias in names
                } & MODULES.keys()
    return found - {name}


def test_no_module_imports_itself_through_others():
    graph = {name: imports_of(name) for name in MODULES if name != "__init__.py"}
    for name, imported in LAZY_IMPORTS:
        graph[name].discard(imported)
    for package in [name for name in graph if name.endswith("/__init__.py")]:
        # A package that offers the names of its modules is imported after them.
        graph[package] -= {module for module in graph[package] if module.startswith(package[: -len("__init__.py")])}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_a_module_with_one_importer_has_a_reason_to_be_one():
    importers: dict[str, set[str]] = {name: set() for name in MODULES}
    for name in MODULES:
        for imported in imports_of(name):
            importers[imported].add(name)
    # The root resolves public names when they are used, and the console script is in the package's metadata.
    entries = ({"__init__.py"}, {"__main__.py"})
    single = {
        name
        for name, users in importers.items()
        if len(users) == 1 and users not in entries and not name.endswith("__init__.py") and not is_by_design(name)
    }
    assert len(single) < ONE_IMPORTER_MODULES
    assert single <= ONE_IMPORTER.keys(), "merge them into their importers, or give a reason"
    assert ONE_IMPORTER.keys() <= single, "they have more importers, or none: remove their reasons"


def is_by_design(name: str) -> bool:
    return any(name.startswith(folder) for folder in ONE_BY_DESIGN)


def test_structs_and_dataclasses_with_many_fields_are_built_with_keywords():
    fields: dict[str, int] = {}
    for name in MODULES:
        for node in ast.walk(tree(name)):
            if not isinstance(node, ast.ClassDef) or any(option.arg == "array_like" for option in node.keywords):
                continue  # a row that is an array is read in its order
            kinds = map(ast.unparse, (*node.decorator_list, *node.bases))
            if any(kind.startswith(("dataclass", "msgspec.Struct")) for kind in kinds):
                count = sum(isinstance(line, ast.AnnAssign) for line in node.body)
                fields[node.name] = min(count, fields.get(node.name, count))  # two classes may have one name
    found = [
        f"{name}:{node.lineno} {node.func.id}"
        for name in MODULES
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        # A single value, or another class's values spread out, are read without counting.
        if fields.get(node.func.id, 0) > KEYWORD_FIELDS
        and len(node.args) > 1
        # Cells, columns and tables are read in their order; the rest is still to be written with keywords.
        and not name.startswith(("report/", "judge/", "account/ranks/", "read/run/", "account/steps/"))
    ]
    check_none(found)


def test_no_loop_variable_is_called_one():
    found = []
    for name in MODULES:
        for node in ast.walk(tree(name)):
            targets = [node.target] if isinstance(node, (ast.For, ast.comprehension)) else []
            found += [
                f"{name}:{part.lineno}"
                for target in targets
                for part in ast.walk(target)
                if isinstance(part, ast.Name) and part.id == "one"
            ]
    check_none(found)


def test_no_more_modules_are_without_a_test_file_of_their_own():
    unit = ROOT / "tests" / "unit"
    missing = {
        name
        for name, path in MODULES.items()
        if Path(name).name != "__init__.py"
        and len(path.read_text(encoding="utf-8").splitlines()) > MIRRORED_LINES
        and not (unit / Path(name).with_name(f"test_{Path(name).name}")).exists()
    }
    assert len(missing) <= UNMIRRORED, sorted(missing)


def test_functions_are_short():
    lengths = {
        f"{name}:{function.lineno} {function.name}": (function.end_lineno or 0) - function.lineno + 1
        for name in MODULES
        for function, _ in functions(tree(name))
    }
    check_none({where: length for where, length in lengths.items() if length > FUNCTION_LINES})


def test_classes_have_few_public_methods():
    found: dict[str, int] = {}
    for name in MODULES:
        methods: dict[ast.ClassDef, set[str]] = {}
        for function, owner in functions(tree(name)):
            hook = is_integration(name) and function.name in lightning_methods()
            if owner is not None and not function.name.startswith("_") and not hook:
                methods.setdefault(owner, set()).add(function.name)
        found |= {f"{name} {owner.name}": len(own) for owner, own in methods.items() if len(own) > PUBLIC_METHODS}
    check_none(found)


def test_functions_have_few_parameters():
    counts = {
        f"{name}:{function.lineno} {owner.name + '.' if owner else ''}{function.name}": parameters(function, owner)
        for name in MODULES
        for function, owner in functions(tree(name))
        if not inherits_lightning_signature(name, function, owner)
    }
    check_none({where: count for where, count in counts.items() if count > PARAMETERS})


def test_no_global_statement():
    found = [
        f"{name}:{node.lineno}" for name in MODULES for node in ast.walk(tree(name)) if isinstance(node, ast.Global)
    ]
    check_none(found)


def test_no_state_at_module_level_but_in_its_owners():
    found = [
        f"{name}:{statement.lineno} {ast.unparse(statement)[:80]}"
        for name in MODULES
        if name not in STATE_OWNERS
        for statement in module_state(tree(name))
    ]
    check_none(found)


@pytest.mark.parametrize(
    ("source", "state"),
    [
        ("A = []", True),
        ("A: dict[str, int] = {'a': 1}", True),
        ("A: Final = {}", True),
        ("A: Final = collections.defaultdict(list)", True),
        ("A: Final = (1, [])", True),
        ("A = Schedule()", True),
        ("A = B = {x for x in y}", True),
        ("try:\n    pass\nexcept OSError:\n    A = []", True),
        ("A = (1, 'b')", False),
        ("A = frozenset({1}) | {2}", False),
        ("A = MappingProxyType({'a': 1})", False),
        ("A: Final = [x for x in y]", False),
        ("A: Final = (None,) * len(B)", False),
        ("A: Final = struct.Struct('<q')", False),
        ("__all__ = ['a']", False),
        ("log = logging.getLogger(__name__)", False),
        ("def f():\n    a = []", False),
    ],
)
def test_what_counts_as_state(source, state):
    assert bool(list(module_state(ast.parse(source)))) is state


def test_what_counts_as_a_parameter():
    source = "class A:\n def f(self, a, /, b, *c, d, **e): ...\n @staticmethod\n def g(a): ...\ndef h(a, *, b=1): ..."
    assert [parameters(function, owner) for function, owner in functions(ast.parse(source))] == [5, 1, 2]


def test_the_top_level_holds_only_what_it_should():
    git = subprocess.run(
        ["git", "ls-files", "--cached"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    tracked = {line.split("/", 1)[0] for line in git.stdout.splitlines()}
    # An unpacked source archive is no repository: there, what lies there counts, less what builds leave.
    names = tracked or {path.name for path in ROOT.iterdir()} - {"PKG-INFO", "build", "dist"}
    assert {name for name in names if not name.startswith(".")} - TOP_LEVEL == set()


@pytest.mark.parametrize("module", ["lightning_memprof", "lightning_memprof.cli.main"])
def test_import_loads_neither_torch_nor_lightning(module, run_python):
    result = run_python("-X", "importtime", "-c", f"import {module}")
    assert result.returncode == 0, result.stderr[-2000:]
    loaded = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time:")}
    assert module in loaded
    assert {name for name in loaded if name.split(".")[0] in {"torch", "lightning", "pytorch_lightning"}} == set()


@pytest.mark.parametrize(
    "module", ["lightning_memprof.cli.main", "lightning_memprof.report", "lightning_memprof.read.run.load"]
)
def test_reading_works_where_torch_and_lightning_cannot_be_imported(module, run_python):
    blocked = "import sys; sys.modules.update(dict.fromkeys(['torch', 'lightning', 'pytorch_lightning']))"
    result = run_python("-c", f"{blocked}; import {module}")
    assert result.returncode == 0, result.stderr[-2000:]


# Programs that these run have lightning.pytorch alone, whatever they import.
ONE_LIGHTNING = ("demo/", "estimation/", "trial/")


def test_what_is_true_of_one_package_of_lightning_decides_nothing():
    """A class or an enum imported from ``lightning`` is not compared: objects of ``pytorch_lightning`` have another."""
    modules = [name for name in MODULES if not name.startswith(ONE_LIGHTNING)]
    check_none([f"{name}: {line}" for name in modules for line in lightning_comparisons(tree(name))])


def lightning_comparisons(module):
    """Yield the comparisons, and calls of isinstance and issubclass, with what is imported from Lightning."""
    imports = [node for node in ast.walk(module) if isinstance(node, ast.Import | ast.ImportFrom)]
    from_lightning = [node for node in imports if "lightning" in ast.unparse(node).replace(".", " ").split()]
    names = {alias.asname or alias.name.split(".")[0] for node in from_lightning for alias in node.names}
    for node in ast.walk(module):
        compared = []
        if isinstance(node, ast.Compare):
            compared = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"isinstance", "issubclass"}:
            compared = node.args[1:]
        parts = [part for value in compared for part in getattr(value, "elts", [value])]
        if any(ast.unparse(part).partition(".")[0] in names for part in parts):
            yield ast.unparse(node)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from lightning.pytorch import Callback\nisinstance(x, (int, Callback))", 1),
        ("from lightning.pytorch.trainer.states import TrainerStatus as S\nx.status is S.RUNNING", 1),
        ("import lightning.pytorch as pl\nissubclass(kind, pl.Callback)", 1),
        ("from lightning.pytorch import Callback\nclass A(Callback):\n    y: Callback = Callback.y", 0),
        ("from lightning_memprof import Callback\nisinstance(x, Callback)", 0),
    ],
)
def test_what_counts_as_a_comparison(source, found):
    assert len(list(lightning_comparisons(ast.parse(source)))) == found


def test_public_modules_alone_list_their_names():
    """Elsewhere an underscore says what is private."""
    listed = {
        name for name in MODULES if any("__all__" in ast.unparse(node).partition("=")[0] for node in tree(name).body)
    }
    assert not [name for name in listed if "/" in name and not name.endswith("__init__.py") and "compat/" not in name]


def test_templates_of_sentences_are_literals():
    found = [
        f"{name}:{node.lineno}"
        for name in MODULES
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "phrase"
        # A path or a name of the program may have braces: it is a value.
        and not isinstance(node.args[0], ast.Constant)
    ]
    check_none(found)
