from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from findings import recovery
from lightning_memprof.account.snapshot.report import snapshot_report
from lightning_memprof.judge import Finding, Severity
from lightning_memprof.judge.rules.holders import nothing_in_snapshot
from lightning_memprof.units import GIB, MIB
from snapshots import (
    LINEAR,
    MODEL,
    MODEL_LINE,
    TRAIN,
    block,
    event,
    found,
    frame,
    segment,
    snapshot,
    write_snapshot,
)

LIGHTNING = frame("/venv/lib/python3.11/site-packages/lightning/pytorch/trainer/trainer.py", "fit")


def test_a_line_that_holds_half_of_the_peak_is_named(tmp_path):
    finding = found(tmp_path, snapshot([segment(block(0, 3 * GIB, MODEL), block(3 * GIB, GIB, TRAIN))], []))[
        "peak_holder"
    ]
    assert (finding.severity, finding.numbers["owner"]) == (Severity.INFO, MODEL_LINE)
    assert finding.title == f"75% of the live memory of cuda:0 is allocated by {MODEL_LINE}."
    assert finding.why.endswith("The history has no allocation, so the peak was not recorded; 4.00 GiB are reserved.")
    halves = [block(n * GIB, GIB, {**MODEL, "line": n}) for n in range(3)]
    assert "peak_holder" not in found(tmp_path, snapshot([segment(*halves)], []))


def holder_of(directory: Path, *frames: dict[str, Any], others: tuple[dict[str, Any], ...] = ()) -> Finding:
    """The finding of one recorded allocation, with blocks of other stacks."""
    small = [block(3 * GIB + n * MIB, MIB, frame) for n, frame in enumerate(others)]
    return found(
        directory,
        snapshot([segment(block(0, 3 * GIB, *frames), *small)], [event("alloc", 0, 3 * GIB, *frames)]),
    )["peak_holder"]


def native(node: str) -> dict[str, Any]:
    return {"filename": "??", "line": 0, "name": f"torch::autograd::{node}::apply(std::vector<at::Tensor>&&)"}


KV_CACHE = {"filename": "/venv/lib/python3.11/site-packages/vllm/worker/w.py", "line": 8, "name": "_allocate_kv_cache"}
OPTIMIZER = {"filename": "/venv/lib/python3.11/site-packages/torch/optim/optimizer.py", "line": 4, "name": "wrapper"}
MODULE = {"filename": "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", "line": 6, "name": "_call_impl"}


@pytest.mark.parametrize(
    ("frames", "others", "remedy"),
    [
        ((MODEL,), (native("AccumulateGrad"),), "checkpointing"),
        ((MODEL,), (), "no_grad"),
        ((LINEAR, MODULE, frame("/app/nca.py", "update")), (), "no_grad"),
        ((frame("/app/load.py", "to"), frame("/torch/nn/modules/module.py", "_apply")), (), "smaller_weights"),
        ((frame("/venv/lib/python3.11/site-packages/safetensors/torch.py", "load_file"),), (), "smaller_weights"),
        ((MODEL, MODULE, OPTIMIZER), (), "checkpointing"),
        ((KV_CACHE, TRAIN), (native("AccumulateGrad"),), "smaller_cache"),
        ((native("generated::DivBackward0"),), (), "smaller_batch"),
        ((native("AccumulateGrad"),), (), "free_gradients"),
        ((TRAIN, OPTIMIZER), (), "less_optimizer_state"),
    ],
)
def test_the_remedy_for_the_largest_line_is_that_of_its_stacks(tmp_path, frames, others, remedy):
    finding = holder_of(tmp_path, *frames, others=others)
    assert "of the peak of cuda:0" in finding.title
    assert finding.remedies[0].id == remedy


@pytest.mark.parametrize(("phase", "most"), [("_apply", 1.5), ("_call_impl", 3)])
def test_fewer_bytes_a_number_save_half_of_the_weights(tmp_path, phase, most):
    finding = holder_of(tmp_path, frame("/app/load.py", "to"), frame("/torch/nn/modules/module.py", phase))
    assert recovery(finding).max == most * GIB


@pytest.mark.parametrize(("outer", "how"), [((LIGHTNING,), "Trainer(strategy='fsdp')"), ((), "fully_shard(model)")])
def test_optimizer_states_are_sharded_as_the_program_does_it(tmp_path, outer, how):
    assert how in holder_of(tmp_path, TRAIN, OPTIMIZER, *outer).next_steps[-1]


def quiet(directory: Path, data: Any) -> Finding:
    path = write_snapshot(directory / "snapshot.pickle", data)
    return nothing_in_snapshot(snapshot_report(path))


def parts(*sizes: int) -> list[dict[str, Any]]:
    return [
        block(sum(sizes[:n]), size, *stack)
        for n, (size, stack) in enumerate(
            zip(sizes, ((), (TRAIN, OPTIMIZER), (native("ToCopyBackward0"),)), strict=True)
        )
    ]


def test_gradients_at_a_peak_in_the_optimizer_are_needed(tmp_path):
    ring = [event("alloc", 9 * GIB, GIB, TRAIN, OPTIMIZER, MODULE)]
    finding = quiet(tmp_path, snapshot([segment(*parts(GIB, GIB, GIB)), segment(block(9 * GIB, GIB))], ring))
    assert finding.remedies[0].id == "less_optimizer_state"


def test_a_line_with_little_of_a_peak_from_before_the_recording_is_no_start(tmp_path):
    ring = [event("alloc", 9 * GIB, 64 * MIB, MODEL)]
    data = snapshot([segment(block(0, 2 * GIB)), segment(block(9 * GIB, 64 * MIB))], ring)
    assert [remedy.id for remedy in quiet(tmp_path, data).remedies] == ["record_from_start"]
    data = snapshot([segment(block(0, GIB)), segment(block(9 * GIB, GIB))], [event("alloc", 9 * GIB, GIB, MODEL)])
    (step,) = quiet(tmp_path, data).next_steps
    assert step.startswith(f"At {MODEL_LINE}: ")
