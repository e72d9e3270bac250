"""Each finding that a CPU can show: a real training that has the fault, and a healthy twin that is silent."""

from __future__ import annotations

import ctypes
import gc
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from faults import WORK, Samples, Steady, Training, findings_of, findings_of_run, with_free_cores
from lightning_memprof import ExtendedPyTorchProfiler, Schedule
from lightning_memprof.capture.base import Collector, OnMark, RunContext
from lightning_memprof.cli.main import main
from lightning_memprof.collectors import Holders, HookTimings, Pulse, SavedTensors
from lightning_memprof.judge import Finding, Severity, facts
from lightning_memprof.schedule import Window
from lightning_memprof.units import MIB
from ranks import launch
from training import Perceptron, only_run

TWO = Schedule(wait=1, active=1)


@pytest.fixture(autouse=True, scope="module")
def free_cores() -> Iterator[None]:
    """Judge each training as on a machine with free cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facts, "run_ledger", with_free_cores)
        yield


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finding]:
    """The twin of all faults whose training is otherwise the same."""
    return findings_of(tmp_path_factory.mktemp("healthy"), Training(validation=Samples(1), collectors=None))


def above_info(found: dict[str, Finding]) -> dict[str, Finding]:
    return {rule: finding for rule, finding in found.items() if finding.severity > Severity.INFO}


def faults(found: dict[str, Finding]) -> set[str]:
    """Rules of the findings above info, but for the sleep that is a step's work."""
    return {rule for rule, finding in above_info(found).items() if (rule, finding.owner) != ("hot_line", WORK)}


def remedies(finding: Finding) -> list[str | None]:
    return [step["id"] for step in finding.steps]


def test_a_healthy_training_has_nothing_above_info(healthy: dict[str, Finding]) -> None:
    assert not faults(healthy)
    assert (next(iter(healthy)) == "nothing_found") == (not above_info(healthy))


class Wide(Steady):
    """Real work: no sleep."""

    seconds = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch.repeat(256, 1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3, fused=True)


class Tiny(Perceptron):
    """Its optimizer takes little of a step of a millisecond."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3, fused=True)


@pytest.mark.parametrize(
    "training",
    [
        pytest.param(lambda: Training(model=Wide(), data=Samples(24, width=256)), id="real work"),
        pytest.param(lambda: Training(model=Tiny(), steps=40), id="tiny steps"),
        pytest.param(lambda: Training(steps=6), id="few steps"),
        pytest.param(lambda: Training(options={"accumulate_grad_batches": 4}), id="accumulation"),
        pytest.param(
            lambda: Training(
                options={"max_epochs": 2, "enable_checkpointing": True}, steps=60, callbacks=(ModelCheckpoint(),)
            ),
            id="epochs",
        ),
    ],
)
def test_other_healthy_trainings_have_nothing_above_info(training: Any, tmp_path: Path) -> None:
    assert not faults(findings_of(tmp_path, replace(training(), collectors=None)))


def test_a_validation_alone_is_healthy_and_gets_no_advice_for_a_training(tmp_path: Path) -> None:
    found = findings_of(tmp_path, Training(collectors=None), stage="validate")
    assert not faults(found)
    advice = " ".join(step for finding in found.values() for step in finding.next_steps)
    assert "Train" not in advice.replace("Trainer(", "")


def test_9_steps_are_too_few_to_judge_a_slow_validation(tmp_path: Path) -> None:
    slow = Training(steps=3, options={"max_epochs": 3}, validation=Samples(6), collectors=None)
    found = findings_of(tmp_path, slow)
    assert next(iter(found)) == "nothing_found"
    assert "validation_bound" not in found
    assert not faults(found)


def test_a_slow_dataset_is_input_bound(tmp_path: Path, healthy: dict[str, Finding]) -> None:
    finding = findings_of(tmp_path, Training(data=Samples(24, seconds=0.02)))["input_bound"]
    assert finding.severity is Severity.CRITICAL
    assert finding.numbers["data_wait_share"] > 0.4
    pulse, hooks = finding.evidence
    assert (pulse.artifact, pulse.steps) == ("memprofiler/pulse.rank00000.csv", (0, 23))
    assert (hooks.window, hooks.steps) == (0, (8, 9))
    assert pulse.start_ns is not None
    assert hooks.start_ns is not None
    assert hooks.end_ns is not None
    assert pulse.start_ns < hooks.start_ns < hooks.end_ns
    assert "input_bound" not in healthy


class Looping(Steady):
    """Two hundred small parameters and little else."""

    seconds = 0.004

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.small = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(400))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + torch.stack(list(self.small)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3, **self.options)


def test_an_optimizer_that_loops_over_its_parameters_is_found(tmp_path: Path) -> None:
    finding = findings_of(tmp_path / "loop", Training(model=Looping(foreach=False)))["optimizer_bound"]
    assert "fused=True" in finding.next_steps[0]
    # Where so small a model's optimizer takes a third of the step it is named all the same, without this remedy.
    fused = findings_of(tmp_path / "fused", Training(model=Looping(fused=True))).get("optimizer_bound")
    assert fused is None or not any("fused=True" in step for step in fused.next_steps)


class Sleepy(pl.Callback):
    """Sleeps after every Nth batch."""

    def __init__(self, seconds: float, every: int = 1) -> None:
        self.seconds = seconds
        self.every = every

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step % self.every == 0:
            time.sleep(self.seconds)


def test_a_callback_that_takes_more_than_a_twentieth_of_a_step_is_named(
    tmp_path: Path, healthy: dict[str, Finding]
) -> None:
    finding = findings_of(tmp_path, Training(callbacks=(Sleepy(0.008),)))["callback_bound"]
    assert finding.numbers["action"] == "Sleepy.on_train_batch_end"
    assert finding.severity > Severity.INFO
    assert "callback_bound" not in healthy


def test_a_callback_that_is_slow_in_a_few_steps_counts_with_its_share_of_all(
    tmp_path: Path, healthy: dict[str, Finding]
) -> None:
    training = Training(callbacks=(Sleepy(0.15, every=6),), steps=36, schedule=Schedule(wait=9, warmup=1, active=3))
    found = findings_of(tmp_path, training)
    finding = found["callback_bound"]
    assert finding.numbers["action"] == "Sleepy.on_train_batch_end"
    assert finding.numbers["longest_ns"] >= 150_000_000
    assert "slow_steps" not in found or found["slow_steps"].severity is Severity.INFO
    # A busy machine holds up some step of any training, which is told as what it is.
    assert "slow_steps" not in healthy or healthy["slow_steps"].severity is Severity.INFO


def test_slow_steps_that_no_window_saw_are_told_by_their_phase(tmp_path: Path) -> None:
    class Slower(Steady):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.seconds = 0.2 if batch_idx % 7 == 6 else 0.015
            return super().training_step(batch, batch_idx)

    schedule = Schedule(wait=7, warmup=1, active=2)
    finding = findings_of(tmp_path, Training(model=Slower(), steps=40, schedule=schedule))["slow_steps"]
    assert finding.severity > Severity.INFO
    assert finding.numbers["cause"] == "forward"
    assert finding.numbers["period"] == 7
    assert "Schedule(steps=(6,), active=1)" in finding.next_steps[-1]


def test_a_validation_every_few_steps_is_told(tmp_path: Path, healthy: dict[str, Finding]) -> None:
    options = {"val_check_interval": 5}
    training = Training(steps=30, validation=Samples(12), options=options, schedule=Schedule(wait=8, active=2))
    found = findings_of(tmp_path, training)
    assert found["validation_bound"].severity > Severity.INFO
    assert found["validation_bound"].numbers["count_per_step"] == pytest.approx(1 / 5, rel=0.1)
    assert remedies(found["validation_bound"])[0] == "validate_per_epoch"
    assert "between_steps" not in found
    # Its only validation, at the end of the epoch, is worth knowing at most.
    assert "validation_bound" not in healthy or healthy["validation_bound"].severity is Severity.INFO


class SlowToSave(Steady):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        time.sleep(0.1)


def test_checkpoints_that_take_more_than_a_twentieth_are_found(tmp_path: Path) -> None:
    checkpoints = ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=4)
    options = {"enable_checkpointing": True}
    training = Training(
        model=SlowToSave(), callbacks=(checkpoints,), options=options, schedule=Schedule(wait=9, active=2)
    )
    found = findings_of(tmp_path / "often", training)
    finding = found["checkpoint_bound"]
    assert finding.numbers["longest_ns"] >= 100_000_000
    assert finding.numbers["share"] > 0.3
    assert "ModelCheckpoint(every_n_train_steps=1000)" in finding.next_steps[0]
    assert "callback_bound" not in found
    quick = Training(callbacks=(ModelCheckpoint(dirpath=tmp_path / "quick", every_n_train_steps=100),), options=options)
    assert "checkpoint_bound" not in faults(findings_of(tmp_path / "seldom", quick))


class SlowLogger(CSVLogger):
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        time.sleep(0.01)
        super().log_metrics(metrics, step)


class Logged(Steady):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def test_a_logger_that_takes_more_than_a_twentieth_is_found_and_called_seldom_it_is_not(tmp_path: Path) -> None:
    slow = {"logger": SlowLogger(tmp_path / "slow", name="", version="log")}
    finding = findings_of(tmp_path / "slow", Training(model=Logged(), options=slow))["logging_bound"]
    assert finding.numbers["action"] == "SlowLogger.log_metrics"
    assert finding.numbers["ns"] >= 10_000_000
    assert "log_less_often" in remedies(finding)
    seldom = {"logger": SlowLogger(tmp_path / "seldom", name="", version="log"), "log_every_n_steps": 1000}
    assert "logging_bound" not in findings_of(tmp_path / "seldom", Training(model=Logged(), options=seldom))


class Littered(Steady):
    """Goes through eight hundred thousand objects in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.objects = [[index] for index in range(800_000)]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        gc.collect()
        return super().training_step(batch, batch_idx)


def test_pauses_of_the_garbage_collector_are_found(tmp_path: Path, healthy: dict[str, Finding]) -> None:
    # One pause may wait for a core: it must not be a quarter of all. What else steps wait for decides the share.
    training = Training(model=Littered(), steps=60, schedule=Schedule(wait=5, warmup=1, active=3))
    finding = findings_of(tmp_path, training)["gc_pauses"]
    assert finding.numbers["ns"] >= 1_000_000
    assert finding.numbers["count_per_step"] >= 1
    assert remedies(finding)[0] == "find_collect"
    assert finding.evidence[-1].artifact.endswith("window000/rank00000.garbage.jsonl")
    assert "gc_pauses" not in healthy


def free_memory() -> None:
    """Give back what earlier tests of this process used, which new tensors would take, and forget its peak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    marks = Path("/proc/self/clear_refs")
    if marks.exists():
        marks.write_text("5", encoding="ascii")


class Keeping(Steady):
    """Keeps 4 MiB of every step."""

    seconds = 0.011
    keeps = True

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        outputs = torch.ones(1024, 1024) + batch.sum()
        if self.keeps:
            self.kept.append(outputs)
        return super().training_step(batch, batch_idx) + 0 * outputs[0, 0]


class Dropping(Keeping):
    keeps = False


class Bank(nn.Module):
    """Keeps 4 MiB of every step in a list of TorchScript, to whose tensors no Python object refers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: Any = torch.jit.Attribute([], list[torch.Tensor])

    def forward(self, row: torch.Tensor) -> int:
        self.rows.append(row + torch.ones(1024, 1024))
        return len(self.rows)


class Scripted(Steady):
    """Has a bank."""

    seconds = 0.011

    def __init__(self) -> None:
        super().__init__()
        self.bank = torch.jit.script(Bank())

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.bank(batch.sum())
        return super().training_step(batch, batch_idx)


def test_a_list_that_keeps_tensors_is_found_and_who_made_them(tmp_path: Path) -> None:
    free_memory()
    collectors: list[Any] = ["default", Holders(seconds=60)]
    training = Training(model=Keeping(), steps=60, collectors=collectors, schedule=Schedule(wait=20, active=3))
    finding = findings_of(tmp_path / "keeps", training)["memory_growth"]
    # What the C allocator gives back late comes on top.
    assert 3 * MIB < finding.numbers["bytes_per_step"] < 9 * MIB
    (survivor, *_) = finding.numbers["survivors"]
    assert survivor["operator"] in ("add", "ones", "fill_", "aten::add")
    assert survivor["bytes"] >= 4 * MIB
    assert "are still live" in finding.why
    # Lightning's steps vary in length: growth is seen when it is large enough, at the latest at the end.
    assert finding.numbers["holder"]["place"] == "Keeping.kept[...]"
    assert finding.numbers["holder"]["line"].startswith("integration/test_findings.py:")
    assert "Keeping.kept" in finding.title
    free_memory()
    banked = replace(training, model=Scripted())
    native = findings_of(tmp_path / "banked", banked)["memory_growth"]
    assert "bank" in native.title
    assert "native code" in native.why
    dropping = Training(model=Dropping(), steps=60, schedule=Schedule(wait=20, active=3))
    assert "memory_growth" not in findings_of(tmp_path / "drops", dropping)


class Stateful(Steady):
    """Parameters of 144 MiB, and an optimizer that keeps none or two more sets of them."""

    seconds = 0.0

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.net = nn.Sequential(nn.Linear(6144, 6144, bias=False))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), 1e-3)


def test_what_the_first_optimizer_step_adds_is_told(tmp_path: Path) -> None:
    def training(optimizer: Any) -> Training:
        return Training(
            model=Stateful(optimizer), data=Samples(5, width=6144), schedule=TWO, collectors=[Pulse(), SavedTensors()]
        )

    free_memory()
    found = findings_of(tmp_path / "adam", training(torch.optim.AdamW))
    finding = found["optimizer_state"]
    assert finding.severity is Severity.INFO
    assert finding.numbers["bytes"] == pytest.approx(2 * 144 * MIB, rel=0.01)
    assert finding.numbers["parameter_bytes"] == pytest.approx(144 * MIB, rel=0.01)
    assert "AdamW" in finding.why
    assert remedies(finding)[0] == "less_optimizer_state"
    assert "optimizer_state" not in findings_of(tmp_path / "sgd", training(torch.optim.SGD))


class Blocks(Steady):
    """Four blocks that keep 24 MiB each for backward, times ``rows / 4096``."""

    seconds = 0.0

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.net = nn.Sequential(
            *(nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256)) for _ in range(4)), nn.Linear(256, 1)
        )

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch.repeat(self.rows // 4, 1)).square().mean()


def test_a_peak_of_activations_is_told_with_what_checkpointing_would_save(tmp_path: Path) -> None:
    def training(rows: int) -> Training:
        return Training(
            model=Blocks(rows), data=Samples(3, width=256), schedule=TWO, collectors=[Pulse(), SavedTensors()]
        )

    free_memory()
    finding = findings_of(tmp_path / "large", training(32_768))["activation_peak"]
    assert finding.severity is Severity.INFO
    assert finding.numbers["bytes"] > 4 * 96 * MIB
    assert finding.numbers["checkpointed"] == "net.0-3"
    assert finding.numbers["saved_bytes"] > 128 * MIB
    assert remedies(finding)[0] == "checkpointing"
    assert "activation_peak" not in findings_of(tmp_path / "small", training(64))


class Dear(Collector):
    """Takes two milliseconds at every mark."""

    name = "dear"

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        yield lambda _mark: time.sleep(0.002)


def test_figures_that_rest_on_recorded_steps_are_told(tmp_path: Path, healthy: dict[str, Finding]) -> None:
    dear = [Pulse(), HookTimings(), Dear()]
    found = findings_of(tmp_path, Training(steps=16, schedule=Schedule(wait=0, warmup=0, active=16), collectors=dear))
    finding = found["profiler_overhead"]
    assert finding.severity > Severity.INFO
    assert finding.numbers["share"] > 0.2
    assert finding.title.startswith("Profiler overhead is")
    assert "dear takes the most" in finding.next_steps[1]
    # Our own marks lie between the phases, and nobody is told to log less for them.
    assert "between_steps" not in found
    assert healthy.get("profiler_overhead") is None or healthy["profiler_overhead"].severity is Severity.INFO


def test_a_rank_that_holds_more_memory_than_the_other_is_found(tmp_path: Path) -> None:
    directory = tmp_path / "ranks"
    assert launch("uneven_ranks.py", directory, world=2) == [0, 0], (directory / "out1").read_text()
    finding = findings_of_run(only_run(directory / "uneven"))["memory_imbalance"]
    assert finding.numbers["rank"] == 1
    assert finding.numbers["peak_bytes"] - finding.numbers["others_bytes"] == pytest.approx(400 * MIB, rel=0.2)
    assert finding.evidence[0].artifact == "memprofiler/pulse.rank00001.csv"
    assert "memory_imbalance" not in findings_of_run(only_run(directory / "even"))


class Clipping(Steady):
    """Looks at its gradients for longer than the rest of the step takes, or leaves clipping to the Trainer."""

    def configure_gradient_clipping(self, optimizer: Any, *limits: Any, **options: Any) -> None:
        time.sleep(self.seconds)


@pytest.mark.parametrize("model", [Clipping, Steady])
def test_a_module_that_clips_gradients_itself_is_named(tmp_path: Path, model: type[Steady]) -> None:
    found = findings_of(
        tmp_path, Training(model=model(), options={"gradient_clip_val": 1.0} if model is Steady else {})
    )
    assert ("hook_bound" in faults(found)) == (model is Clipping)
    if model is Clipping:
        assert found["hook_bound"].numbers["action"] == "Clipping.configure_gradient_clipping"
        assert "Clipping.configure_gradient_clipping" in found["hook_bound"].title
        assert "gradients_at_once" in remedies(found["hook_bound"])


class Guarded(Wide):
    """A deep network; its step is in a region of anomaly detection, or not."""

    def __init__(self, is_guarded: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)), nn.Linear(256, 1))
        self.automatic_optimization = False
        self.is_guarded = is_guarded

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        with torch.autograd.set_detect_anomaly(self.is_guarded):
            loss = self.net(batch.repeat(64, 1)).square().mean()
            self.manual_backward(loss)
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("is_guarded", [True, False])
def test_anomaly_detection_in_a_region_of_the_program_is_found(tmp_path: Path, is_guarded: bool) -> None:
    training = Training(model=Guarded(is_guarded), data=Samples(24, width=256), collectors=[Pulse(), SavedTensors()])
    found = findings_of(tmp_path, training)
    assert ("anomaly_detection" in found) == is_guarded
    if is_guarded:
        assert found["anomaly_detection"].next_steps[0].startswith("Remove torch.autograd.detect_anomaly()")


def shown(directory: Path, model: pl.LightningModule, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    """The findings on the page of a training with an operator trace, by rule."""
    options = {"profiler": ExtendedPyTorchProfiler()}
    findings_of(directory, Training(model=model, data=Samples(24, width=256), collectors=None, options=options))
    capsys.readouterr()
    assert main(["show", str(only_run(directory)), "--format", "json"]) == 0
    return {finding["rule"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}


class Frontend(nn.Module):
    """A product with constants of one type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("constants", torch.randn(256, 512, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.constants.dtype) @ self.constants  # type: ignore[operator, arg-type]


class Prepared(Wide):
    """Prepares its inputs without gradients, as a spectrum is."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.frontend = Frontend(dtype)
        self.net = nn.Sequential(nn.Linear(512, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        with torch.no_grad():
            prepared = self.frontend(batch.repeat(2048, 1)).mean(0, keepdim=True).float()
        return self.net(prepared).square().mean()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_float64_without_gradients_is_found_in_the_time_of_its_module(
    tmp_path: Path, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = shown(tmp_path, Prepared(dtype), capsys).get("double_precision")
    assert (finding is not None) == (dtype is torch.float64)
    if finding is not None:
        assert "frontend" in finding["title"]


class Described(Wide):
    """Writes its outputs as text, or not."""

    def __init__(self, is_text: bool) -> None:
        super().__init__()
        self.is_text = is_text

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        outputs = self.net(batch.repeat(256, 1))
        if self.is_text:
            str(outputs.detach().repeat(1, 3))
        return outputs.square().mean()


@pytest.mark.parametrize("is_text", [True, False])
def test_tensors_as_text_are_named_as_such(tmp_path: Path, is_text: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with torch._tensor_str.printoptions(threshold=10_000):
        finding = shown(tmp_path, Described(is_text), capsys).get("hot_line")
    found = {step["id"] for step in finding["remedies"]} if finding is not None else set()
    assert ("no_text" in found) == is_text
    if is_text and finding is not None:
        # A title cuts the name in front.
        assert "_step (test_findings.py" in finding["title"]
        assert "text" in finding["title"]


class Penalized(Wide):
    """Decomposes a matrix in each step for its largest singular value, or approximates that."""

    def __init__(self, is_exact: bool) -> None:
        super().__init__()
        self.is_exact = is_exact

    def stretch(self) -> torch.Tensor:
        matrix = torch.eye(700) + next(self.net.parameters()).sum()
        if self.is_exact:
            return torch.linalg.matrix_norm(matrix, ord=2)
        return (matrix @ matrix[0]).norm() / matrix[0].norm()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch.repeat(256, 1)).square().mean() + self.stretch()


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_hot_line_of_the_program_is_named(tmp_path: Path, is_exact: bool, capsys: pytest.CaptureFixture[str]) -> None:
    finding = shown(tmp_path, Penalized(is_exact), capsys).get("hot_line")
    assert (finding is not None and finding["title"].startswith("Penalized.stretch (test_findings.py:")) == is_exact
    if is_exact and finding is not None:
        assert "return torch.linalg.matrix_norm(matrix, ord=2)" in finding["why"]
        assert finding["remedies"][0]["id"] == "decompose_less"
