from __future__ import annotations

import json

import msgspec
import pytest

from lightning_memprof.account.parts import PARTS, PHASE_PARTS, Part, phase_label
from lightning_memprof.artifacts.series import PHASES


def test_each_phase_of_the_pulse_is_a_part_that_names_it() -> None:
    assert tuple(PHASE_PARTS) == PHASES
    assert all(part.phase == phase for phase, part in PHASE_PARTS.items())
    assert [phase_label(phase) for phase in ("callbacks", "other", "between_steps", None)] == [
        Part.CALLBACK.label, Part.UNTRACKED.label, "between steps", "?",
    ]  # fmt: skip


def test_a_part_is_its_name_in_files_and_sentences() -> None:
    part = Part.DATA_WAIT
    assert f"{part}" == str(part) == part == "data_wait"
    assert json.dumps(part) == '"data_wait"'
    assert msgspec.json.encode({part: part}) == b'{"data_wait":"data_wait"}'
    assert [each.number for each in PARTS] == list(range(len(PARTS)))


@pytest.mark.parametrize("idle", [True, False])
def test_labels_differ_within_the_host_and_the_device_at_work_and_within_an_idle_device(idle: bool) -> None:
    labels = [part.label for part in Part if (part.group == "device idle") is idle]
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (Part.GC_PAUSES, "GC pauses take"),
        (Part.RANK_WAIT, "waiting for other ranks takes"),
        (Part.FORWARD, "forward takes"),
    ],
)
def test_the_verb_of_a_label_agrees_with_it(part: Part, words: str) -> None:
    assert part.takes == words
