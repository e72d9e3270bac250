"""What is to be checked on a GPU has its test in tests/gpu, which are skipped with the reason where there is none."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

GPU = Path(__file__).resolve().parents[1] / "gpu"
TOPICS = {
    "snapshots with their stacks": "test_a_snapshot_has_the_windows_allocations_with_python_stacks",
    "out of memory by really running out": "test_a_training_that_fills_the_device_is_explained",
    "statistics of the allocator": "test_every_mark_has_the_statistics_of_torch_and_the_peak_is_never_reset",
    "traces with kernels": "test_the_trace_holds_the_devices_kernels",
    "what recording costs": "test_what_recording_costs_on_the_device_is_said_in_absolute_times",
    "history off afterwards": "test_the_allocators_history_is_off_after_a_fit",
    "two streams, torch.compile, CUDA graphs": "test_the_training_is_the_same_and_its_kernels_are_recorded",
}


def functions() -> set[str]:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in GPU.glob("test_*.py")]
    return {node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("topic", TOPICS)
def test_every_topic_has_its_test(topic: str) -> None:
    assert TOPICS[topic] in functions()


def test_each_module_is_marked_so_that_it_is_skipped_without_an_accelerator() -> None:
    for path in GPU.glob("test_*.py"):
        assert "pytestmark = pytest.mark.gpu" in path.read_text(encoding="utf-8"), path.name
