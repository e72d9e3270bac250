from __future__ import annotations

from typing import Any

import pytest

from findings import recovery
from lightning_memprof.judge import Severity
from lightning_memprof.judge.finding import Recovery
from lightning_memprof.units import GIB, MIB
from snapshots import (
    MODEL,
    MODEL_LINE,
    START_US,
    TRAIN,
    History,
    block,
    event,
    failed,
    found,
    frame,
    freed,
    segment,
    snapshot,
    unused,
)


def pieces(count: int, used: int, free: int, *, at: int = 0) -> list[dict[str, Any]]:
    """Blocks in use with as many free ones between them."""
    size = used + free
    return [
        piece for n in range(count) for piece in (block(at + n * size, used, MODEL), unused(at + n * size + used, free))
    ]


def healthy_step() -> dict[str, Any]:
    """A step's activations are made and freed; what is kept holds on; a second segment was needed."""
    ring = [event("segment_alloc", 4 * GIB, GIB)]
    ring += [event("alloc", 4 * GIB + n * 256 * MIB, 256 * MIB, MODEL if n % 2 else TRAIN) for n in range(4)]
    ring += [ring_event for n in range(4) for ring_event in freed(4 * GIB + n * 256 * MIB, 256 * MIB)]
    return snapshot([segment(block(0, GIB, TRAIN)), segment(unused(4 * GIB, GIB))], ring)


def test_a_healthy_step_has_no_finding_above_info(tmp_path):
    assert {finding.severity for finding in found(tmp_path, healthy_step()).values()} <= {Severity.INFO}


def test_a_request_that_fits_into_no_piece_is_called_fragmented_with_the_setting_that_helps(tmp_path):
    ring = [event("alloc", 0, 100 * MIB, MODEL), failed(500 * MIB, 10 * MIB)]
    data = snapshot([segment(*pieces(10, 100 * MIB, 80 * MIB))], ring, conf="max_split_size_mb:64")
    finding = found(tmp_path, data)["out_of_memory"]
    assert finding.severity is Severity.CRITICAL
    assert finding.title == "Allocation of 500 MiB failed on cuda:0: its free memory is fragmented."
    assert "800 MiB were unused in pieces of at most 80.0 MiB; 10.0 MiB were free on the device" in finding.why
    assert "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64,expandable_segments:True" in finding.next_steps[0]
    assert (finding.numbers["cause"], finding.numbers["bytes"]) == ("fragmented", 500 * MIB)
    assert finding.numbers["peak_bytes"] == 1000 * MIB
    (evidence,) = finding.evidence
    assert (evidence.rank, evidence.start_ns, evidence.end_ns) == (3, *[(START_US + 1000) * 1000] * 2)


def test_a_request_to_a_full_device_names_who_holds_the_most(tmp_path):
    data = snapshot([segment(block(0, GIB, MODEL), block(GIB, 9, TRAIN))], [failed(GIB, MIB)])
    finding = found(tmp_path, data)["out_of_memory"]
    assert (finding.numbers["cause"], finding.severity) == ("full", Severity.CRITICAL)
    assert f"{MODEL_LINE} had 1.00 GiB live." in finding.why
    assert finding.next_steps[0] == f"Look at {MODEL_LINE}: it has the most live bytes."


def test_a_full_device_whose_small_rest_would_have_sufficed_is_full(tmp_path):
    data = snapshot([segment(block(0, GIB, MODEL), unused(GIB, 30 * MIB))], [failed(500 * MIB, 480 * MIB)])
    assert found(tmp_path, data)["out_of_memory"].numbers["cause"] == "full"


def test_a_request_that_no_process_could_have_is_too_large_and_one_that_was_caught_is_a_warning(tmp_path):
    ring = [failed(100 * GIB, GIB), event("alloc", 0, 9, MODEL)]
    finding = found(tmp_path, snapshot([segment(block(0, 9))], ring))["out_of_memory"]
    assert (finding.numbers["cause"], finding.severity) == ("too large", Severity.WARNING)
    assert "and was caught" in finding.title


@pytest.mark.parametrize("is_expandable", [True, False])
def test_a_setting_that_is_in_effect_is_no_advice(tmp_path, is_expandable):
    ring = [event("alloc", 0, 100 * MIB, MODEL), failed(500 * MIB, 10 * MIB)]
    data = snapshot(
        [segment(*pieces(10, 100 * MIB, 80 * MIB), is_expandable=is_expandable)],
        ring,
        conf="max_split_size_mb:64,expandable_segments:True",
    )
    assert found(tmp_path, data)["out_of_memory"].remedies[0].id == "few_shapes"


LIGHTNING = frame("/venv/lib/python3.11/site-packages/lightning/pytorch/trainer/trainer.py", "fit")
TRAINING_STEP = frame("/home/a/model.py", "training_step")
BACKWARD = frame("/venv/lib/python3.11/site-packages/torch/autograd/graph.py", "_engine_run_backward")


@pytest.mark.parametrize(
    ("stack", "advice"),
    [
        ((), ("an optimizer step after 2", "torch.autocast")),
        ((TRAINING_STEP, LIGHTNING), ("accumulate_grad_batches=2", "Trainer(precision='bf16-mixed')")),
        ((BACKWARD, TRAIN), ("an optimizer step after 2", "torch.autocast")),
        ((MODEL, LIGHTNING), ("shorter inputs", "Trainer(precision='bf16-true')")),
        ((MODEL, TRAIN), ("shorter inputs", "model.to(torch.bfloat16)")),
    ],
    ids=["unknown", "Lightning", "training", "prediction", "inference"],
)
def test_a_request_to_a_full_device_is_answered_for_the_program_that_the_stacks_tell(tmp_path, stack, advice):
    ring = [event("alloc", 0, GIB, *stack), {**failed(GIB, MIB), "frames": []}]
    *_, smaller, fewer = found(tmp_path, snapshot([segment(block(0, GIB))], ring))["out_of_memory"].next_steps
    assert advice[0] in smaller
    assert advice[1] in fewer
    assert ("Trainer" in smaller + fewer) == ("Trainer" in advice[1])


KEPT = frame("/home/a/train.py", "log_loss", 97)
KEPT_LINE = "/home/a/train.py(97): log_loss"


def kept_in_steps(steps: int, size: int, *outer: dict[str, Any]) -> History:
    """A block of forward is freed in each step, and one is not."""
    history = History()
    for _ in range(steps):
        history.free(history.allocate(GIB, MODEL, TRAIN, *outer), history.allocate(MIB))
        history.allocate(size, KEPT, TRAIN, *outer)
    return history


def test_blocks_that_pile_up_step_by_step_are_named_with_what_frees_them(tmp_path):
    finding = found(tmp_path, kept_in_steps(10, 64 * MIB).data())["memory_growth"]
    assert finding.severity is Severity.CRITICAL
    assert finding.title == f"Memory of cuda:0 grows by 64.0 MiB per step in {KEPT_LINE}."
    assert finding.why.startswith("640 MiB in 10 blocks of 10 steps are live at the end of the recorded history, 40%")
    (step,) = finding.next_steps
    assert f"keeps the tensors of {KEPT_LINE}" in step
    assert ".item()" in step
    assert (recovery(finding).min, recovery(finding).max) == (512 * MIB, 576 * MIB)


def test_blocks_that_pile_up_are_neither_saved_activations_nor_a_batch_that_is_too_large(tmp_path):
    history = kept_in_steps(20, 256 * MIB)
    history.events.append(failed(GIB, 0))
    findings = found(tmp_path, history.data())
    assert findings["memory_growth"].severity is Severity.CRITICAL
    for rule in ("out_of_memory", "peak_holder"):
        assert findings[rule].next_steps == findings["memory_growth"].next_steps


def test_pieces_at_the_peak_are_a_warning_where_they_forced_new_segments(tmp_path):
    ring = [event("segment_alloc", 64 * GIB, GIB), event("alloc", 64 * GIB, GIB, MODEL)]
    held = [segment(*pieces(20, 100 * MIB, 100 * MIB)), segment(block(64 * GIB, GIB))]
    finding = found(tmp_path, snapshot(held, ring))["fragmentation"]
    assert (finding.severity, finding.numbers["forced_segments"], finding.numbers["pieces"]) == (
        Severity.WARNING,
        1,
        20,
    )
    assert finding.title == "40% of reserved memory of cuda:0 is in unused pieces at the peak."
    assert finding.recovers == Recovery(
        unit="bytes", min=GIB, max=2000 * MIB, whole=GIB + 4000 * MIB, of="the reserved memory"
    )
    assert "expandable_segments:True" in finding.next_steps[0]


def test_pieces_that_forced_nothing_are_worth_knowing_only(tmp_path):
    held = [segment(*pieces(20, 100 * MIB, 100 * MIB), is_expandable=True)]
    finding = found(tmp_path, snapshot(held, [event("alloc", 0, 100 * MIB, MODEL)]))["fragmentation"]
    assert finding.severity is Severity.INFO
    assert "expandable" not in " ".join(finding.next_steps)
    assert recovery(finding).min == 0


def test_unused_memory_is_found_without_a_history_too(tmp_path):
    finding = found(tmp_path, snapshot([segment(*pieces(10, 100 * MIB, 100 * MIB))], []))["fragmentation"]
    assert finding.title == "50% of reserved memory of cuda:0 is unused, all between live blocks."
    assert finding.severity is Severity.WARNING
    assert "expandable_segments:True" in finding.next_steps[0]
    assert recovery(finding).max == 1000 * MIB
    cached = [segment(*pieces(10, 100 * MIB, 20 * MIB)), segment(unused(64 * GIB, GIB))]
    finding = found(tmp_path, snapshot(cached, []))["fragmentation"]
    assert "16% of this between live blocks" in finding.title
    assert finding.severity is Severity.INFO
    assert "empty_cache()" in finding.next_steps[0]
    whole = [segment(block(0, GIB, MODEL)), segment(unused(64 * GIB, GIB))]
    assert found(tmp_path, snapshot(whole, []))["fragmentation"].title.endswith("none of this between live blocks.")
    assert "fragmentation" not in found(tmp_path, snapshot([segment(*pieces(10, 400 * MIB, 100 * MIB))], []))


def test_pieces_after_the_peak_are_what_backward_leaves_and_no_finding(tmp_path):
    ring = [event("alloc", n * 200 * MIB + 100 * MIB, 100 * MIB, MODEL) for n in range(20)]
    ring += [ring_event for n in range(20) for ring_event in freed(n * 200 * MIB + 100 * MIB, 100 * MIB)]
    assert "fragmentation" not in found(tmp_path, snapshot([segment(*pieces(20, 100 * MIB, 100 * MIB))], ring))
