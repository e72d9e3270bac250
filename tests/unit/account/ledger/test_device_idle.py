from __future__ import annotations

from trace_events import AUTOGRAD, call, causes, event, kernel, report


def test_idle_time_is_what_the_launching_thread_did_meanwhile(tmp_path):
    found = causes(
        tmp_path,
        kernel(0, 10),
        event("user_annotation", "enumerate(DataLoader)#_Loader.__next__", 5, 30),
        event("cpu_op", "aten::stack", 12, 20),  # of the loader
        call(30, 36, name="cudaStreamSynchronize"),
        call(36, 40, name="cudaMalloc"),
        event("python_function", "<built-in function collect>", 42, 45),
        event("cpu_op", "aten::mm", 50, 60),
        call(58, 62, 1),
        kernel(65, 70, 1),
    )
    assert found == {
        "idle_data": 20,
        "idle_synchronization": 6,
        "idle_allocator": 4,
        "idle_gc_pauses": 3,
        "idle_python": 7,
        "idle_operators": 8,
        "idle_launch": 7,
    }


def test_a_kernel_that_starts_long_after_its_launch_was_queued(tmp_path):
    found = causes(tmp_path, kernel(0, 10), call(4, 6, 1), kernel(100, 110, 1))
    assert found == {"idle_launch": 16, "idle_queue": 74}


def test_before_a_thread_of_autograd_begins_the_training_thread_tells(tmp_path):
    found = causes(
        tmp_path,
        event("user_annotation", "ProfilerStep#0", 0, 50),
        kernel(0, 10),
        event("cpu_op", "aten::loss", 12, 20),
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 30, 40, AUTOGRAD),
        call(38, 39, 1, AUTOGRAD),
        kernel(40, 50, 1),
    )
    assert found == {"idle_operators": 16, "idle_python": 12, "idle_launch": 2}


def test_a_wait_costs_the_gap_behind_it_unless_the_next_kernel_was_queued(tmp_path):
    found = report(
        tmp_path,
        call(0, 1, 1),
        call(2, 3, 2),
        event("cpu_op", "aten::item", 4, 41),
        call(5, 40, name="cudaStreamSynchronize"),
        call(50, 51, 3),
        kernel(10, 20, 1),
        kernel(22, 38, 2),  # queued before the wait
        kernel(60, 70, 3),
    ).synchronizations
    assert [(each.name, each.count, each.total_ns, each.gap_ns) for each in found] == [
        ("aten::item", 1, 35_000, 22_000)
    ]


def test_without_calls_of_the_runtime_no_cause_of_idle_time_is_made_up(tmp_path):
    assert causes(tmp_path, event("cpu_op", "aten::mm", 20, 30), kernel(0, 10), kernel(65, 70)) == {}
