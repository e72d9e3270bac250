"""finetuning-scheduler's ``memprofiler_cfg``: every field arrives, every name resolves or is named."""

from __future__ import annotations

import copy
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from pytorch_lightning.cli import LightningArgumentParser
from torch import nn

from lightning_memprof.capture.base import Collector
from lightning_memprof.capture.collectors.functions import CallRange, FunctionMemory
from lightning_memprof.capture.sources.saved_hooks import checked_unpack
from lightning_memprof.capture.tracker.collectors import FSDPMemory
from lightning_memprof.compat.fts import (
    MemProfiler,
    MemProfilerCfg,
    MemProfilerFuncs,
    MemProfilerHooks,
    MemProfilerSchedule,
    add_memprofiler_arguments,
    collectors_for,
    dirpath_for,
    identity,
    resolve,
    saved_tensors_pair,
    schedule_for,
)
from lightning_memprof.errors import ConfigError
from lightning_memprof.schedule import Action, Schedule
from training import Perceptron, trainer

NPP = "fts_examples.profiling.npp_hooks"


def functions_of(cfg: MemProfilerCfg) -> FunctionMemory:
    (found,) = [collector for collector in collectors_for(cfg) if isinstance(collector, FunctionMemory)]
    return found


def fsdp_of(cfg: MemProfilerCfg) -> FSDPMemory | None:
    return next((collector for collector in collectors_for(cfg) if isinstance(collector, FSDPMemory)), None)


def names(collectors: list[Collector]) -> set[str]:
    return {collector.name for collector in collectors}


def test_the_defaults_are_those_of_finetuning_scheduler() -> None:
    assert asdict(MemProfilerCfg()) == {
        "enabled": False,
        "collect_funcs": {
            "default": {"training_step"}, "cpu": set(), "cuda": set(), "cuda_allocator_history": set(), "fsdp": set(),
        },
        "cuda_allocator_history": False,
        "track_fsdp_mem": False,
        "fsdp_mem_track_module_depth": 2,
        "fsdp_mem_tracker_tabulate": False,
        "fsdp_mem_tracker_units": "MiB",
        "fsdp_mem_tracker_root_module": "",
        "dump_memorystats_pickle": False,
        "dump_memorystats_yaml": True,
        "schedule": {"warmup_iters": 1, "max_iter": None},
        "save_dir": None,
        "enable_memory_hooks": True,
        "enable_saved_tensors_hooks": True,
        "memory_hooks": {
            "pre_forward_hooks": [f"{NPP}._hook_npp_pre_forward"],
            "post_forward_hooks": [f"{NPP}._hook_npp_post_forward"],
            "reset_state_hooks": [f"{NPP}._reset_memory_hooks_state"],
        },
        "saved_tensors_funcs": [f"{NPP}._npp_hook", "identity_lambda"],
        "save_hook_attrs": [
            "rss_pre_forward", "rss_post_forward", "rss_diff", "npp_pre_forward", "npp_post_forward", "npp_diff",
        ],
        "retain_hooks_for_funcs": {"training_step"},
    }  # fmt: skip


def test_an_enabled_default_is_one_call_of_training_step_with_all_that_is_measured_around_it() -> None:
    cfg = MemProfilerCfg(enabled=True)
    assert names(collectors_for(cfg)) == {"pulse", "host", "oom", "functions"}
    found = functions_of(cfg)
    assert tuple(found.functions) == ("training_step",)
    assert found.calls == CallRange(2, 2)
    assert (found.memory_hooks, found.saved_tensors_hooks, found.user_hooks) == (True, True, None)
    assert (found.dump_yaml, found.dump_pickle, bool(found.allocator_snapshots)) == (True, False, False)


@pytest.mark.parametrize(
    ("schedule", "expected", "calls"),
    [
        (MemProfilerSchedule(), Schedule(wait=0, warmup=1, active=1, repeat=1), CallRange(2, 2)),
        (MemProfilerSchedule(warmup_iters=2, max_iter=4), Schedule(wait=0, warmup=2, active=2), CallRange(3, 4)),
        (MemProfilerSchedule(warmup_iters=0), Schedule(wait=0, warmup=0, active=1), CallRange(1, 1)),
    ],
)
def test_the_calls_after_warmup_iters_up_to_max_iter_are_recorded(
    schedule: MemProfilerSchedule, expected: Schedule, calls: CallRange
) -> None:
    cfg = MemProfilerCfg(enabled=True, schedule=schedule)
    assert schedule_for(cfg) == expected
    assert functions_of(cfg).calls == calls
    recorded = [step + 1 for step in range(20) if schedule_for(cfg)(step) in (Action.RECORD, Action.RECORD_AND_SAVE)]
    assert recorded == list(range(calls.first, calls.last + 1))


def test_where_fsdp_memory_is_tracked_every_call_has_a_window() -> None:
    schedule = MemProfilerSchedule(warmup_iters=2, max_iter=4)
    found = schedule_for(MemProfilerCfg(enabled=True, schedule=schedule, track_fsdp_mem=True))
    saved = [step + 1 for step in range(20) if found(step) is Action.RECORD_AND_SAVE]
    assert saved == [3, 4]
    assert found(4) is Action.NONE


@pytest.mark.parametrize("given", [{"warmup_iters": 2, "max_iter": 2}, {"max_iter": 0}, {"warmup_iters": -1}])
def test_a_schedule_that_records_nothing_is_refused(given: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="schedule"):
        MemProfilerSchedule(**given)


def test_default_is_added_to_each_set_of_functions() -> None:
    funcs = MemProfilerFuncs(
        default={"training_step"}, cpu={"encode"}, cuda={"decode"}, cuda_allocator_history={"sample"}, fsdp={"encode"}
    )
    cfg = MemProfilerCfg(enabled=True, collect_funcs=funcs, cuda_allocator_history=True)
    found = functions_of(cfg)
    assert tuple(found.functions) == ("decode", "encode", "sample", "training_step")
    assert found.allocator_snapshots == ("sample", "training_step")


def test_without_a_default_only_what_is_named_is_collected() -> None:
    funcs = MemProfilerFuncs(default=[], cpu=["validation_step"])  # type: ignore[arg-type]  # lists, as in YAML
    assert tuple(functions_of(MemProfilerCfg(enabled=True, collect_funcs=funcs)).functions) == ("validation_step",)
    funcs = MemProfilerFuncs(default=set(), fsdp={"training_step"})
    cfg = MemProfilerCfg(enabled=True, track_fsdp_mem=True, collect_funcs=funcs)
    assert names(collectors_for(cfg)) & {"functions", "fsdp_memory"} == {"fsdp_memory"}


def test_the_fsdp_fields_arrive() -> None:
    assert fsdp_of(MemProfilerCfg(enabled=True)) is None
    found = fsdp_of(
        MemProfilerCfg(
            enabled=True, track_fsdp_mem=True, fsdp_mem_track_module_depth=3, fsdp_mem_tracker_tabulate=True,
            fsdp_mem_tracker_units="KiB", fsdp_mem_tracker_root_module="model",
        )
    )  # fmt: skip
    assert found is not None
    assert (found.depth, found.tabulate, found.units, found.root_module) == (3, True, "KiB", "model")


def test_fsdp_memory_of_another_function_is_said_not_to_be_tracked() -> None:
    funcs = MemProfilerFuncs(default=set(), fsdp={"validation_step"})
    with pytest.warns(UserWarning, match="not in validation_step"):
        assert fsdp_of(MemProfilerCfg(enabled=True, track_fsdp_mem=True, collect_funcs=funcs)) is None


@pytest.mark.parametrize(
    "asked",
    [
        {"cuda_allocator_history": True},
        {"collect_funcs": MemProfilerFuncs(cuda={"decode"})},
        {"collect_funcs": MemProfilerFuncs(cuda_allocator_history={"decode"})},
    ],
)
def test_cuda_memory_of_a_model_on_a_cpu_is_one_warning_and_the_rest_is_recorded(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    training, model = trainer(tmp_path), Perceptron()
    vars(model)["decode"] = model.forward
    training.strategy.connect(model)
    with pytest.warns(UserWarning, match="the model is on cpu: everything else is recorded") as warned:
        settings = MemProfiler(MemProfilerCfg(enabled=True, **asked)).settings(training)
    assert len(warned) == 1
    (found,) = [collector for collector, _ in settings.collectors if isinstance(collector, FunctionMemory)]
    assert "training_step" in found.functions
    assert not found.allocator_snapshots


def test_the_dumps_and_switches_arrive() -> None:
    found = functions_of(
        MemProfilerCfg(
            enabled=True, dump_memorystats_pickle=True, dump_memorystats_yaml=False, enable_memory_hooks=False,
            enable_saved_tensors_hooks=False, retain_hooks_for_funcs={"a", "b"},
        )
    )  # fmt: skip
    assert (found.dump_pickle, found.dump_yaml) == (True, False)
    assert (found.memory_hooks, found.saved_tensors_hooks, found.user_hooks) == (False, False, None)


@pytest.mark.parametrize(
    ("save_dir", "root"),
    [(None, None), ("out", "out"), ("out/memprofiler", "out"), (Path("/data/memprofiler"), "/data")],
)
def test_save_dir_is_the_run_directory_where_it_has_its_name(save_dir: str | Path | None, root: str | None) -> None:
    assert dirpath_for(MemProfilerCfg(save_dir=save_dir)) == root


@pytest.mark.parametrize(
    "name",
    [
        f"{NPP}._hook_npp_pre_forward",
        f"{NPP}._hook_npp_post_forward",
        f"{NPP}._reset_memory_hooks_state",
        f"{NPP}._npp_hook",
        "fts_examples.npp_hooks._npp_hook",
        "identity_lambda",
    ],
)
def test_its_own_names_are_not_imported(name: str) -> None:
    assert resolve(name) is None


def _npp_hook(x: Any) -> Any:
    return x


def test_a_dotted_name_and_a_callable_resolve_and_its_own_functions_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_npp_hook, "__module__", NPP)
    assert resolve(_npp_hook) is None
    assert resolve("torch.nn.functional.relu") is nn.functional.relu
    assert resolve(nn.functional.relu) is nn.functional.relu


@pytest.mark.parametrize(
    "name", ["no_such_package.hook", "torch.nn.no_such_hook", "hook", "torch.nn.", "", "math.pi", f"{NPP}.other"]
)
def test_a_name_that_does_not_resolve_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match="memprofiler_cfg names") as raised:
        MemProfiler(MemProfilerCfg(enabled=True, memory_hooks=MemProfilerHooks(pre_forward_hooks=[name])))
    assert repr(name) in str(raised.value)


def test_what_is_switched_off_is_not_resolved() -> None:
    wrong = MemProfilerHooks(pre_forward_hooks=["no_such_package.hook"])
    MemProfiler(MemProfilerCfg(memory_hooks=wrong))
    MemProfiler(MemProfilerCfg(enabled=True, memory_hooks=wrong, enable_memory_hooks=False))
    MemProfiler(
        MemProfilerCfg(enabled=True, saved_tensors_funcs=["no_such_package.pack"], enable_saved_tensors_hooks=False)
    )


def count(module: Any, *_: Any) -> None:
    module.calls += 1


def see(module: Any, *_: Any) -> None:
    module.seen = module.mem_info_handle().rss


def test_the_users_hooks_stand_beside_ours() -> None:
    hooks = MemProfilerHooks(pre_forward_hooks=[f"{NPP}._hook_npp_pre_forward", count], post_forward_hooks=[see])
    attributes = ["rss_diff", "calls", "seen"]
    found = functions_of(MemProfilerCfg(enabled=True, memory_hooks=hooks, save_hook_attrs=attributes))
    assert found.memory_hooks
    users = found.user_hooks
    assert users is not None
    assert (users.pre_forward, users.post_forward) == ((count,), (see,))
    assert tuple(users.save_attributes) == ("calls", "seen")


def test_its_reset_sets_the_attributes_to_0_on_every_module_for_the_users_hooks() -> None:
    found = functions_of(MemProfilerCfg(enabled=True, memory_hooks=MemProfilerHooks(pre_forward_hooks=[count])))
    assert found.user_hooks is not None
    model = nn.Sequential(nn.Linear(2, 2))
    (reset,) = found.user_hooks.reset_state
    reset(model, ["calls", "seen"])
    assert [(vars(module)["calls"], vars(module)["seen"]) for module in model.modules()] == [(0, 0), (0, 0)]


def test_hooks_that_replace_ours_keep_the_names_of_ours() -> None:
    hooks = MemProfilerHooks(pre_forward_hooks=[count], post_forward_hooks=[see])
    found = functions_of(MemProfilerCfg(enabled=True, memory_hooks=hooks))
    assert not found.memory_hooks
    assert found.user_hooks is not None
    assert "npp_diff" in found.user_hooks.save_attributes


def pack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


@pytest.mark.parametrize(
    ("funcs", "pair"),
    [
        ([f"{NPP}._npp_hook", "identity_lambda"], None),
        ([pack, double], (pack, double)),
        ([pack, "identity_lambda"], (pack, checked_unpack)),
        ([f"{NPP}._npp_hook", double], (identity, double)),
    ],
)
def test_the_users_pack_and_unpack_functions_arrive(funcs: list[Any], pair: tuple[Any, Any] | None) -> None:
    assert saved_tensors_pair(funcs) == pair
    found = functions_of(MemProfilerCfg(enabled=True, saved_tensors_funcs=funcs, enable_memory_hooks=False))
    assert found.saved_tensors_hooks
    assert (None if found.user_hooks is None else found.user_hooks.saved_tensors_funcs) == pair


@pytest.mark.parametrize("funcs", [[pack], [pack, pack, pack], "identity_lambda"])
def test_what_is_no_pair_of_pack_and_unpack_is_refused(funcs: Any) -> None:
    with pytest.raises(ConfigError, match="saved_tensors_funcs"):
        saved_tensors_pair(funcs)


@pytest.mark.parametrize("value", ["training_step", ["net.forward"], [1]])
def test_what_is_no_set_of_names_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"collect_funcs\.cpu"):
        MemProfilerFuncs(cpu=value)


def test_a_disabled_callback_holds_nothing_and_anything_else_is_refused() -> None:
    idle = MemProfiler(MemProfilerCfg())
    assert idle.steps_aside(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must be a MemProfilerCfg"):
        MemProfiler({"enabled": True})  # type: ignore[arg-type]


def test_the_callback_can_be_copied_and_pickled() -> None:
    hooks = MemProfilerHooks(pre_forward_hooks=["torch.nn.functional.relu"])
    pair: list[Any] = ["torch.nn.functional.relu", "identity_lambda"]
    callback = MemProfiler(MemProfilerCfg(enabled=True, memory_hooks=hooks, saved_tensors_funcs=pair))
    through_pickle = pickle.loads(pickle.dumps(callback))  # noqa: S301 made just now
    for other in (copy.deepcopy(callback), through_pickle):
        assert other.memprofiler_cfg == callback.memprofiler_cfg


def test_the_parser_of_lightnings_other_package_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"import LightningCLI from lightning\.pytorch\.cli"):
        add_memprofiler_arguments(LightningArgumentParser())


def test_a_parser_that_is_not_lightnings_makes_the_callback() -> None:
    parser = ArgumentParser(exit_on_error=False)
    add_memprofiler_arguments(parser)
    arguments = ["--memprofiler_cfg.enabled=true", "--memprofiler_cfg.collect_funcs.cpu=[encode]"]
    made = parser.instantiate_classes(parser.parse_args(arguments))
    assert isinstance(made.memprofiler, MemProfiler)
    assert made.memprofiler.memprofiler_cfg == made.memprofiler_cfg
    assert made.memprofiler_cfg.collect_funcs.cpu == {"encode"}
    assert "memprofiler" not in parser.dump(parser.parse_args(arguments)).split()


@pytest.mark.parametrize(("field", "value"), [("fsdp_mem_tracker_units", "XB"), ("fsdp_mem_track_module_depth", 0)])
def test_a_value_of_the_fsdp_report_that_means_nothing_is_named_with_its_field(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"memprofiler_cfg.*{field}.*{value}.*must be"):
        collectors_for(MemProfilerCfg(enabled=True, track_fsdp_mem=True, **{field: value}))
