"""finetuning-scheduler's ``memprofiler_cfg`` in real fits: its YAML, its files, its keys."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from torch import nn

from lightning_memprof.account.trace.operators import ensure_operator_tables
from lightning_memprof.cli.main import main
from lightning_memprof.compat.fts import (
    MemProfiler,
    MemProfilerCfg,
    MemProfilerCLI,
    MemProfilerFuncs,
    MemProfilerHooks,
    MemProfilerSchedule,
)
from lightning_memprof.integration.callback import MemProfilerCallback
from lightning_memprof.integration.settings import OutputOptions
from lightning_memprof.read.run.load import load_run
from recorded_rows import read_series
from training import Perceptron, loader, only_run, rows_of, trainer
from training import program as shared_program

CONFIGS = Path(__file__).parents[2] / "configs"
# As it stands in finetuning-scheduler's documentation.
ITS_YAML = """
memprofiler_cfg:
    enabled: true
    cuda_allocator_history: true
    track_fsdp_mem: true
    fsdp_mem_track_module_depth: 3
    fsdp_mem_tracker_tabulate: true
    fsdp_mem_tracker_root_module: 'model'
"""
PROGRAM = """
    import torch
    from lightning.pytorch.cli import LightningCLI
    from lightning_memprof.compat.fts import MemProfilerCLI, add_memprofiler_arguments
    from torch.distributed.fsdp import fully_shard

    class Sharded(Perceptron):
        def __init__(self):
            super().__init__()
            self.model, self.net = self.net, None

        def configure_model(self):
            if self.device_mesh is not None:
                for layer in (self.model[0], self.model[3], self.model):
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])

        def loss(self, batch):
            return self.model(batch).square().mean()

        def train_dataloader(self):
            return loader(12)

        def val_dataloader(self):
            return loader(1)

    class OwnCLI(LightningCLI):
        def add_arguments_to_parser(self, parser):
            add_memprofiler_arguments(parser)

    {cli}(Sharded, save_config_callback=None)
    """
COMMON = (
    "--trainer.max_steps=4", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false",
    "--trainer.enable_checkpointing=false", "--trainer.enable_model_summary=false",
    "--trainer.logger.class_path=CSVLogger", "--trainer.logger.init_args.save_dir=logs",
)  # fmt: skip
DEMO = f"--config={CONFIGS / 'memprofiler_demo.yaml'}"
HOOK_VALUES = {"rss_pre_forward", "rss_post_forward", "rss_diff", "npp_pre_forward", "npp_post_forward", "npp_diff"}

Run: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def program(tmp_path: Path, run_program: Run) -> Run:
    """Run a LightningCLI program with the given arguments in ``tmp_path``."""

    def run(
        *arguments: str, cli: str = "MemProfilerCLI", stage: str = "fit", code: int = 0
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / "train.py").write_text(shared_program(PROGRAM.format(cli=cli)))
        (tmp_path / "its.yaml").write_text(ITS_YAML)
        done = run_program("train.py", stage, *COMMON, *arguments, OMP_NUM_THREADS="1")
        assert done.returncode == code, done.stderr[-3000:]
        return done

    return run


def stats_of(run: Path, rank: int = 0) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((run / f"rank_{rank}_memory_stats.yaml").read_text())
    return found


def sharded_bytes(run: Path, rank: int) -> int:
    rows = read_series(run / f"window000/rank{rank:05d}.fsdp_memory.jsonl")
    (peak,) = [row for row in rows if row["kind"] == "peak"]
    return int(peak["categories"]["parameter"])


def test_the_demo_leaves_finetuning_schedulers_files_under_model_parallel_strategy(
    tmp_path: Path, program: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    done = program(DEMO)
    run = only_run(tmp_path)
    assert run.parent.name == "version_0"
    stats = stats_of(run)
    assert list(stats) == ["0.training_step.2.start", "0.training_step.2.end"]
    end = stats["0.training_step.2.end"]
    assert HOOK_VALUES | {"rss", "vms"} <= set(end)
    # Saved by the two linear layers, ReLU and dropout, less what is a parameter.
    assert end["npp_diff"] > 0
    assert end["rss_pre_forward"] > 0
    log = (run / "fsdp_mem_rank_0_training_step_2.log").read_text()
    assert "Sharded Param" in log
    assert "FSDPSequential" in log
    assert sharded_bytes(run, 0) == 4 * (8 * 16 + 16 + 16 + 1)
    assert done.stderr.count("the model is on cpu") == 1
    assert main(["show", str(run), "--all"]) == 0
    assert "training_step" in capsys.readouterr().out


def test_its_yaml_runs_unchanged_through_a_cli_of_ones_own(tmp_path: Path, program: Run) -> None:
    strategy = "--trainer.strategy.class_path=lightning.pytorch.strategies.ModelParallelStrategy"
    sizes = [f"--trainer.strategy.init_args.{name}_parallel_size=1" for name in ("data", "tensor")]
    program("--config=its.yaml", "--trainer.devices=1", strategy, *sizes, cli="OwnCLI")
    run = only_run(tmp_path)
    assert "0.training_step.2.end" in stats_of(run)
    assert (run / "fsdp_mem_rank_0_training_step_2.log").is_file()


def test_its_yaml_records_all_but_shards_where_nothing_is_sharded(
    tmp_path: Path, program: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    program("--config=its.yaml", "--trainer.strategy=auto")
    run = only_run(tmp_path)
    assert "0.training_step.2.end" in stats_of(run)
    reasons = {row["collector"]: row["reason"] for row in rows_of(run, "unavailable")}
    assert "does not use fully_shard" in reasons["fsdp_memory"]
    assert main(["show", str(run), "--all"]) == 0
    assert "does not use fully_shard" in " ".join(capsys.readouterr().out.split())


def test_every_recorded_call_has_its_keys_and_its_fsdp_report_and_the_profiler_its_trace(
    tmp_path: Path, program: Run
) -> None:
    program(
        DEMO, "--memprofiler_cfg.schedule.warmup_iters=2", "--memprofiler_cfg.schedule.max_iter=4",
        "--trainer.max_steps=6", f"--trainer.profiler={CONFIGS / 'pytorch_profiler.yaml'}",
    )  # fmt: skip
    run = only_run(tmp_path)
    edges = [f"0.training_step.{number}.{edge}" for number in (3, 4) for edge in ("start", "end")]
    assert list(stats_of(run)) == edges
    logs = sorted(path.name for path in run.glob("*.log"))
    assert logs == ["fsdp_mem_rank_0_training_step_3.log", "fsdp_mem_rank_0_training_step_4.log"]
    traces = list(run.parent.glob("fit-fts_extended_pytorch_profiler-0[[]Strategy]*.training_step.*.pt.trace.json.gz"))
    assert len(traces) == 2
    assert len(ensure_operator_tables(load_run(run)).files("table")) == 1
    assert rows_of(run, "error") == []


def test_the_profiler_fragment_alone_keeps_its_schedule(tmp_path: Path, program: Run) -> None:
    program("--trainer.max_steps=6", f"--trainer.profiler={CONFIGS / 'pytorch_profiler.yaml'}")
    run = only_run(tmp_path)
    assert [row["steps"] for row in rows_of(run, "window") if row["event"] == "close"] == [[3]]
    (trace,) = run.parent.glob("fit-fts_extended_pytorch_profiler-0[[]Strategy]*.pt.trace.json.gz")
    assert ".training_step." in trace.name
    assert len(ensure_operator_tables(load_run(run)).files("table")) == 1


def test_validate_with_the_same_configuration_runs(tmp_path: Path, program: Run) -> None:
    program(DEMO, stage="validate")
    assert not list(only_run(tmp_path).glob("*.log"))


# In this process.


class DerivedCLI(MemProfilerCLI):
    """Overrides without a call of the overridden, as Lightning allows it."""

    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.add_argument("--mine", type=int, default=1)


def test_a_cli_that_is_derived_keeps_the_arguments(tmp_path: Path) -> None:
    (tmp_path / "its.yaml").write_text(ITS_YAML)
    arguments = [f"--config={tmp_path / 'its.yaml'}", "--mine=2", "--trainer.logger=false"]
    cli = DerivedCLI(Perceptron, run=False, args=arguments, save_config_callback=None, seed_everything_default=False)
    (found,) = [entry for entry in cli.trainer.callbacks if isinstance(entry, MemProfiler)]
    expected = MemProfilerCfg(
        enabled=True, cuda_allocator_history=True, track_fsdp_mem=True, fsdp_mem_track_module_depth=3,
        fsdp_mem_tracker_tabulate=True, fsdp_mem_tracker_root_module="model",
    )  # fmt: skip
    assert found.memprofiler_cfg == cli.config_init.memprofiler_cfg == expected
    assert "memprofiler:" not in cli.parser.dump(cli.config)


def fit(
    directory: Path, cfg: MemProfilerCfg, model: nn.Module | None = None, *callbacks: Callback, **options: Any
) -> Path:
    model = Perceptron() if model is None else model
    trainer(directory, MemProfiler(cfg), *callbacks, **options).fit(model, loader(8))  # type: ignore[arg-type]
    return only_run(directory)


def test_each_function_counts_its_own_calls(tmp_path: Path) -> None:
    funcs = MemProfilerFuncs(default={"training_step", "loss", "optimizer_step"}, cpu={"configure_gradient_clipping"})
    schedule = MemProfilerSchedule(warmup_iters=2, max_iter=3)
    run = fit(tmp_path, MemProfilerCfg(enabled=True, collect_funcs=funcs, schedule=schedule), accumulate_grad_batches=2)
    stats = stats_of(run)
    for function in ("training_step", "loss", "optimizer_step", "configure_gradient_clipping"):
        assert {key.split(".")[2] for key in stats if f".{function}." in key} == {"3"}
    rows = [json.loads(line) for line in (run / "functions.rank00000.jsonl").read_text().splitlines()]
    # With two batches a step, the third step of the optimizer comes with the sixth batch.
    assert {row["step"] for row in rows if row["function"] == "training_step"} == {2}
    assert {row["step"] for row in rows if row["function"] == "optimizer_step"} == {5}


def test_training_is_the_same_with_all_of_it_and_the_modules_are_as_before(tmp_path: Path) -> None:
    hooks = MemProfilerHooks(pre_forward_hooks=[count], post_forward_hooks=[weigh])
    cfg = MemProfilerCfg(
        enabled=True, schedule=MemProfilerSchedule(warmup_iters=1, max_iter=5), memory_hooks=hooks,
        saved_tensors_funcs=[keep, "identity_lambda"], save_hook_attrs=["forwards", "process_bytes"],
    )  # fmt: skip
    bare, ours = Perceptron(), Perceptron()
    torch.manual_seed(0)
    trainer(tmp_path / "bare").fit(bare, loader(8))
    torch.manual_seed(0)
    run = fit(tmp_path / "ours", cfg, ours)
    assert all(
        torch.equal(expected, other) for expected, other in zip(bare.parameters(), ours.parameters(), strict=True)
    )
    assert [set(vars(module)) for module in ours.modules()] == [set(vars(module)) for module in bare.modules()]
    end = stats_of(run)["0.training_step.3.end"]
    assert {"forwards", "process_bytes"} <= set(end)
    assert rows_of(run, "error") == []


def keep(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def count(module: Any, *_: Any) -> None:
    module.forwards += 1


def weigh(module: Any, *_: Any) -> None:
    module.process_bytes = module.mem_info_handle().rss


def test_a_disabled_one_leaves_the_trainer_to_others(tmp_path: Path) -> None:
    idle = MemProfilerCfg()
    run = fit(tmp_path / "callback", idle, None, MemProfilerCallback(output=OutputOptions(summary=False)))
    assert [row["steps"] for row in rows_of(run, "window") if row["event"] == "close"] == [[2, 3]]
    assert fit(tmp_path / "profiler", idle, None, profiler="fts_extended").is_dir()
