from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Final

import pytest
import torch
from torch.distributed._tools import mem_tracker

import lightning_memprof
from lightning_memprof.capture import torch_internals
from lightning_memprof.capture.torch_internals import INTERNALS, expected, is_there, missing
from lightning_memprof.cli.doctor import diagnose

PACKAGE: Final = Path(lightning_memprof.__file__).parent
MODULE: Final = PACKAGE / "capture" / "torch_internals.py"
# Private names of Python and of Lightning.
NOT_TORCHS: Final = {
    *("_asdict", "_current_frames", "_exit", "_getframe", "_replace"),
    *("_batches_that_stepped", "_combined_loader", "_logger_connector", "_forward_redirection", "_should_accumulate"),
    *("_activation_checkpointing_kwargs", "_data_parallel_size", "_ddp_comm_hook", "_ddp_kwargs"),
    "_tensor_parallel_size",
    *("_delete_profilers", "_emit_nvtx", "_export_to_chrome", "_group_by_input_shapes", "_prepare_filename"),
    "_profiler_kwargs",
    *("_record_module_names", "_recording_map", "_sort_by_key", "_stats_to_str", "_table_kwargs"),
}


# The layers that import torch.
LAYERS: Final = ("capture", "compat", "demo", "estimation", "integration")


@pytest.fixture(scope="module")
def nodes() -> list[tuple[str, ast.AST]]:
    """Return every node of the syntax trees of the modules that import torch, with its place."""
    paths = [path for layer in LAYERS for path in sorted((PACKAGE / layer).rglob("*.py")) if path != MODULE]
    trees = [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in paths]
    return [(f"{path}:{getattr(node, 'lineno', 0)}", node) for path, tree in trees for node in ast.walk(tree)]


@pytest.mark.slow
def test_no_other_module_imports_private_names_of_torch(nodes: list[tuple[str, ast.AST]]) -> None:
    private = re.compile(r"torch(\.\w+)*\._[^_]")
    of_classes = {name for row in INTERNALS for owner in row.names if ":" in owner for name in row.names[owner].split()}
    found = []
    for place, node in nodes:
        if isinstance(node, ast.ImportFrom):
            found += [(place, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(place, alias.name) for alias in node.names]
        elif isinstance(node, ast.Attribute) and node.attr not in of_classes:
            found.append((place, ast.unparse(node)))
    assert [(place, name) for place, name in found if private.match(name)] == []


@pytest.mark.slow
def test_the_table_has_every_private_attribute_that_is_used(nodes: list[tuple[str, ast.AST]]) -> None:
    ours, used = set[str](), dict[str, str]()
    for place, node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            ours.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            ours.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            ours.add(node.id)
        elif isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
            used[node.attr] = place
    listed = {name for row in INTERNALS for names in row.names.values() for name in names.split()}
    assert {name: place for name, place in used.items() if name not in ours | listed | NOT_TORCHS} == {}


def test_this_version_of_torch_has_all() -> None:
    assert missing() == {}


def test_every_name_of_a_module_can_be_imported() -> None:
    for owner, name, _ in expected():
        if ":" not in owner:
            assert getattr(torch_internals, name) is getattr(importlib.import_module(owner), name)


@pytest.mark.slow
def test_a_missing_function_is_replaced_and_doctor_says_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    assert torch_internals._current_graph_task_id() == -1
    assert list(missing()) == ["torch._C._current_graph_task_id"]
    (line,) = [check for check in diagnose()["Collectors"] if check.name == "torch internals"]
    assert line.state == "no"
    assert line.text == (
        f"torch._C._current_graph_task_id is missing from torch {torch.__version__}: "
        "saved activations and RSS by module include what reentrant checkpointing recomputes"
    )


def test_a_missing_function_without_a_substitute_raises_where_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._autograd, "_get_sequence_nr")
    with pytest.raises(RuntimeError, match="see lightning-memprof doctor"):
        torch_internals._get_sequence_nr()


def test_an_attribute_of_instances_is_there_if_a_method_of_the_class_uses_it() -> None:
    tracker = "torch.distributed._tools.mem_tracker:MemTracker"
    assert is_there(tracker, "_track")  # a method
    assert is_there(tracker, "_WINFO")
    assert not is_there(tracker, "_renamed")


def test_a_missing_tracker_is_an_import_error_that_says_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mem_tracker, "MemTracker")
    with pytest.raises(ImportError, match="ModuleMemory and FSDPMemory are not available"):
        torch_internals.MemTracker  # noqa: B018 the access is what raises


@pytest.mark.slow
def test_doctor_counts_them_where_all_are_there() -> None:
    (line,) = [check for check in diagnose()["Collectors"] if check.name == "torch internals"]
    assert (line.state, line.text) == ("ok", f"all {len(list(expected()))} private APIs of torch are there")
