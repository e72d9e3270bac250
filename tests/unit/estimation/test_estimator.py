"""Estimates of programs and of models in Python, and what they say of bad input."""

from __future__ import annotations

import contextlib
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, Callback, StochasticWeightAveraging
from msgspec.structs import replace
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_memprof import estimate
from lightning_memprof.account.estimate import DEVICES, Alternative, Estimate, device_named, parse_bytes
from lightning_memprof.errors import ConfigError, MemprofError
from lightning_memprof.estimation import simulation
from lightning_memprof.estimation.changes import parse_change, repeated_blocks
from lightning_memprof.estimation.construction import LargeOnMeta
from lightning_memprof.estimation.estimator import estimate_program
from lightning_memprof.estimation.wanted import _USUAL, Wanted
from lightning_memprof.units import GIB, MIB

pytestmark = pytest.mark.slow

FORKS = pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="estimates need a platform that can fork"
)
PROGRAM = """
import sys
import torch, torchmetrics
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(256, 256)
    def training_step(self, batch):
        x = self.layer(batch[0])
        {step}
        return x.sum()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

{before}
loader = DataLoader(TensorDataset(torch.zeros({samples}, 256)), batch_size=8)
Trainer(accelerator="gpu", devices=2, precision="bf16-mixed").fit(Net(), loader)
print("after the fit")
"""


CUSTOM = """
@torch.library.custom_op("estimated::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2
"""
LIBRARY = """
library = torch.library.Library("unknown", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: x * 2, "CPU")
"""


class Net(LightningModule):
    """Two blocks of one class; Adam keeps two numbers for each parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(2)))

    def training_step(self, batch: Any) -> Any:
        return self.blocks(batch[0]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def loader(samples: int = 8) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(samples, 256)), batch_size=samples)


def program(folder: Path, *, step: str = "pass", before: str = "", samples: int = 8) -> list[str]:
    file = folder / "train.py"
    file.write_text(PROGRAM.format(step=step, before=before, samples=samples), encoding="utf-8")
    return [str(file)]


@FORKS
def test_parameters_gradients_and_state_are_those_of_the_model_and_the_process_is_as_before() -> None:
    model, state = Net(), torch.get_rng_state()
    before = dict(model.named_parameters())
    backend = torch._C._get_privateuse1_backend_name()
    found = estimate(model, loader(), device="H100 80GB", what_if=("none",))
    expected = 2 * (256 * 256 * 4 + 1024)
    assert (found.categories["parameter"], found.categories["gradient"]) == (expected, expected)
    assert found.categories["optimizer_state"] == 2 * expected
    assert sum(found.categories.values()) == found.allocated_bytes
    assert (found.fit, found.batch, found.batch_size) == ("fits", ["8x256 float32"], 8)
    assert all(dict(model.named_parameters())[name] is parameter for name, parameter in before.items())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch._C._get_privateuse1_backend_name() == backend
    assert "live" in found._repr_html_()


@FORKS
def test_changes_of_a_training_are_estimated_beside_it() -> None:
    found = estimate(Net(), loader(512), device="H100 80GB", what_if=("optimizer=sgd", "checkpointing", "accumulate=2"))
    by_name = {changed.change: changed for changed in found.alternatives}
    without_state = by_name["optimizer=sgd"].allocated_bytes
    assert without_state is not None
    assert without_state == found.allocated_bytes - found.categories["optimizer_state"]
    assert all(changed.fit == "fits" for changed in found.alternatives)


class Built(Net):
    """Makes its blocks when Lightning asks for them."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            self.blocks = Net().blocks


@FORKS
def test_blocks_that_configure_model_makes_are_checkpointed() -> None:
    built, usual = (
        estimate(model, loader(512), device="H100 80GB", what_if="checkpointing") for model in (Built(), Net())
    )
    (expected,), (found,) = usual.alternatives, built.alternatives
    assert found.problem == ""
    assert (found.allocated_bytes, built.allocated_bytes) == (expected.allocated_bytes, usual.allocated_bytes)


@FORKS
def test_the_largest_batch_fits_and_one_more_sample_does_not() -> None:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    limits: dict[str, Any] = {"device": "cpu", "device_memory": "16MiB", "what_if": ("none",)}
    found = estimate(Net(), loader(), trainer=trainer, batch_size="max", **limits)
    assert found.fit == "fits"
    assert found.batch_size is not None
    more = estimate(Net(), loader(), trainer=trainer, batch_size=found.batch_size + 1, **limits)
    assert more.fit == "does not fit"


@FORKS
def test_the_whole_band_of_the_largest_batch_fits_without_released_caches() -> None:
    found = estimate(Net(), loader(), device="L4", device_memory="1GiB", batch_size="max", what_if=("none",))
    assert found.device.usable_bytes is not None
    assert found.reserved.high_bytes < found.device.usable_bytes
    assert found.retries == 0


@FORKS
def test_a_program_ends_at_its_fit_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = estimate_program(program(tmp_path), Wanted(device="L4", what_if=("none",)))
    assert found.categories["parameter"] == 256 * 256 * 4 + 1024
    assert found.device.name == "NVIDIA L4"
    assert [file.name for file in tmp_path.iterdir()] == ["train.py"]
    assert "after the fit" not in capsys.readouterr().out
    assert found.called_at == "train.py:21"
    assert "first fit at train.py:21" in str(found)


@FORKS
@pytest.mark.parametrize(
    ("before", "runs"),
    [
        ("raise KeyError('early meta')", 1),
        ("open('early.meta.json')", 1),
        ("raise ValueError('early metadata')", 1),
        ("float(nn.Linear(256, 256).weight.sum())", 2),
        ("assert nn.Linear(256, 256).weight.isfinite().all()", 2),
    ],
)
def test_a_program_runs_a_second_time_only_where_it_needs_the_values_of_large_tensors(
    before: str, runs: int, tmp_path: Path
) -> None:
    line = program(tmp_path, before=f"open({str(tmp_path / 'runs')!r}, 'a').write('.'); {before}")
    with contextlib.nullcontext() if runs == 2 else pytest.raises(MemprofError, match="early"):
        estimate_program(line, Wanted(what_if=("none",)))
    assert (tmp_path / "runs").read_text(encoding="utf-8") == "." * runs


@FORKS
def test_of_the_changes_that_nobody_asked_for_those_that_save_are_shown(tmp_path: Path) -> None:
    class Plain(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters())

    shown, asked = (estimate(Plain(), loader(), device="L4", what_if=names) for names in ((), _USUAL))
    assert [changed.change for changed in asked.alternatives] == list(_USUAL)
    saving = [changed.change for changed in asked.alternatives if saved(changed, asked)]
    assert [changed.change for changed in shown.alternatives] == saving
    assert "optimizer=adamw8bit" not in saving


def saved(changed: Alternative, base: Estimate) -> bool:
    return changed.reserved is not None and changed.reserved.likely_bytes < base.reserved.likely_bytes


@FORKS
def test_each_change_says_whether_it_fits_and_the_verdict_whether_only_with_released_caches() -> None:
    found = estimate(Net(), loader(512), device="L4", device_memory="1GiB", what_if="optimizer=sgd")
    line = next(line for line in str(found).splitlines() if line.startswith("optimizer=sgd"))
    assert ", fits" in line
    assert "Fits: the peak is" in str(found)
    assert "Fits, barely: the peak is" in str(replace(found, retries=2))


@FORKS
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": "x = x[x > 0]"}, r"a shape depends on values at .*train\.py:14"),
        ({"step": "raise ValueError('mine')"}, r"simulated training failed at .*train\.py:14: ValueError: mine"),
        ({"step": "x = x * float(x.detach().numpy().sum())"}, r"array of NumPy at .*train\.py:14; \.cpu"),
        (
            {"step": "for _ in range(int(x.detach().float().cpu().numpy()[0, 0])): x = self.layer(x)"},
            r"a value that is read at .*train\.py:14",
        ),
        ({"step": "for _ in range(int(x.sum())): x = self.layer(x)"}, r"a value that is read at .*train\.py:14"),
        (
            {"step": "for _ in range(9): x = self.layer(x) if x.sum().item() > 0.1 else x"},
            r"a value that is read at .*train\.py:14",
        ),
        (
            {"step": "x = x * x.new_ones(int(x.sum()), 8, 1)"},
            r"a value that is read at .*train\.py:14",
        ),
        (
            {"step": "x = torch.ops.estimated.twice(x)", "before": CUSTOM},
            "operator estimated::twice at .*register_fake",
        ),
        (
            {"step": "x = torch.ops.unknown.twice(x)", "before": LIBRARY},
            r"operator unknown.twice.default at .*register_fake",
        ),
        ({"step": "x = x + torch.zeros(256, device='cuda')"}, r"moves tensors to CUDA at .*train\.py:14"),
        ({"step": "torch.zeros(256, device='cuda')"}, r"moves tensors to CUDA at .*train\.py:14"),
        ({"samples": 0}, "the loader has no batch"),
        ({"before": "import json; json.loads('')"}, r"failed before Trainer.fit at .*train\.py:19: JSONDecodeError"),
        ({"before": "raise KeyError('early')"}, r"failed before Trainer.fit at .*train\.py:19: KeyError: 'early'"),
        ({"before": "torch.zeros(2).cuda()"}, r"moves tensors to CUDA at .*train\.py:19; leave that to the Trainer"),
        ({"step": "x = x.cuda()"}, r"moves tensors to CUDA at .*train\.py:14; leave that to the Trainer"),
        ({"before": "sys.exit(3)"}, "ended with exit code 3 before Trainer.fit"),
        ({"before": "sys.exit()"}, "ended without Trainer.fit"),
    ],
)
def test_a_program_that_cannot_be_estimated_is_refused_in_a_line(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(MemprofError, match=message) as caught:
        estimate_program(program(tmp_path, **options), Wanted(what_if=("none",)))
    assert "\n" not in str(caught.value)


@FORKS
@pytest.mark.parametrize(
    "step",
    [
        "while not (x.sum() > 0).item(): x = x + 1",
        "while x.norm() > 1: x = x * 0.5",
        "while x.sum().item() < 5_000: x = x * 2",
    ],
)
def test_a_loop_that_waits_for_a_value_is_refused_after_many_reads(step: str, tmp_path: Path) -> None:
    with pytest.raises(MemprofError, match=r"train\.py:14 reads over 5,000 values in a step: a loop that waits"):
        estimate_program(program(tmp_path, step=step), Wanted(what_if=("none",)))


@FORKS
def test_many_values_may_be_read_in_a_loop_of_known_length(tmp_path: Path) -> None:
    reads = "x[0, 0].item(); [0, 0, 0][x[0, 0].item()]; (x[0, 0] > 0).item()"
    few, many = (
        estimate_program(program(tmp_path, step=f"for _ in range({count}): {reads}"), Wanted(what_if=("none",)))
        for count in (2, 400)
    )
    assert "is read from a tensor" in many.assumptions[-1]
    assert many.allocated_bytes == few.allocated_bytes


@FORKS
def test_a_fused_norm_saves_its_input_and_nothing_else() -> None:
    class Norms(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(nn.RMSNorm(256) for _ in range(4)))

    trainer = Trainer(accelerator="cpu", precision="bf16-true", logger=False, enable_checkpointing=False)
    found = estimate(Norms(), loader(512), trainer=trainer, device="L4", what_if=("none",))
    # The first input is the batch; 2 KiB are a number for each of the rows, 512 bytes the loss.
    assert max(found.live["activation"]) == 4 * 512 * 256 * 2 + 4 * 2048 + 512


@FORKS
def test_nothing_goes_on_after_a_killed_command(tmp_path: Path) -> None:
    endless = f"(__import__('pathlib').Path({str(tmp_path / 'pid')!r}).write_text(str(__import__('os').getpid())))"
    file = program(tmp_path, step=f"{endless}; exec('while True: pass')")[0]
    command = [sys.executable, "-m", "lightning_memprof", "estimate", "--what-if", "none", file]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as ours:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert ours.poll() is None
            time.sleep(0.05)
        child = psutil.Process(int((tmp_path / "pid").read_text()))
        ours.kill()
    assert psutil.wait_procs([child], timeout=60)[0] == [child]


@FORKS
@pytest.mark.parametrize(
    ("step", "assumed"),
    [
        ("print(x.mean().item())", ["1"]),
        ("x = x * x.mean().item(); assert not torch.isnan(x).any()", ["1", "False"]),
        # The condition decides memory, the number beside it does not.
        ("x.mean().item(); x = x * 2 if torch.isnan(x).any() else x", ["1", "False"]),
    ],
)
def test_values_that_a_program_reads_are_assumed_and_listed(step: str, assumed: list[str], tmp_path: Path) -> None:
    found = estimate_program(program(tmp_path, step=step), Wanted(what_if=("none",)))
    listed = [line.rpartition("; ")[2] for line in found.assumptions if "train.py:14" in line]
    assert listed == [f"{value} was assumed" for value in assumed]


@FORKS
def test_shapes_in_metrics_that_depend_on_values_are_assumed_and_listed(tmp_path: Path) -> None:
    labels = "y = torch.zeros(8, dtype=torch.long, device=x.device); f = torchmetrics.functional"
    metrics = [
        "f.f1_score(x, y, 'multiclass', num_classes=256, average='macro')",
        "f.accuracy(x.argmax(1), y, 'multiclass', num_classes=4)",
        "f.accuracy(x, y, 'multiclass', num_classes=256, ignore_index=0)",
        "torchmetrics.MetricCollection([torchmetrics.AUROC('binary')]).to(x.device)(x[:, 0].sigmoid(), y)",
    ]
    steps = ["pass", "; ".join([labels, *metrics])]
    usual, found = (
        estimate_program(program(tmp_path, step=step), Wanted(device="A100 40GB", what_if=("none",))) for step in steps
    )
    assert found.categories["parameter"] == usual.categories["parameter"]
    listed = [line for line in found.assumptions if line not in usual.assumptions]
    assert "train.py:14: shapes in a metric depend on values" in listed[0]


@FORKS
def test_a_machines_gpus_are_counted_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = estimate(Net(), loader(), device="L4", what_if=("none",))
    assert (found.ranks, found.strategy) == (2, "ddp")


@FORKS
def test_a_compiled_model_is_estimated_without_its_compiler_and_the_page_says_so(tmp_path: Path) -> None:
    before = "Net = lambda net=Net: torch.compile(net())"
    found = estimate_program(program(tmp_path, before=before), Wanted(what_if=("none",)))
    assert "torch.compile is ignored" in " ".join(found.assumptions)


@FORKS
def test_data_are_given_as_to_fit() -> None:
    class Data(LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader()

    found = [
        estimate(Net(), loader(), what_if=("none",)),
        estimate(Net(), Data(), what_if=("none",)),
        estimate(Net(), datamodule=Data(), what_if=("none",)),
    ]
    assert len({each.allocated_bytes for each in found}) == 1


@FORKS
def test_what_no_change_makes_fit_is_estimated_with_all_of_them() -> None:
    found = estimate(Net(), loader(), device="cpu", device_memory="1MiB")
    assert found.alternatives[-1].change == "all of these"
    # Adam counts the steps of each of the four parameters.
    assert found.batchless_bytes == 4 * 2 * (256 * 256 * 4 + 1024) + 4 * 4
    assert "alone need 2.01 MiB: no batch size" in str(found.document().next)


@FORKS
def test_a_batch_that_cannot_be_small_enough_is_refused_with_its_need() -> None:
    with pytest.raises(
        MemprofError, match=r"not even one sample .* 1\.00 MiB usable: it needs .* alone take 2\.01 MiB"
    ):
        estimate(Net(), loader(), device="cpu", device_memory="1MiB", batch_size="max")


@FORKS
def test_callbacks_that_need_more_later_are_named() -> None:
    class Unfreezing(BaseFinetuning):
        def freeze_before_training(self, pl_module: LightningModule) -> None:
            pass

        def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Any) -> None:
            pass

    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[StochasticWeightAveraging(0.1), Unfreezing()])
    found = estimate(Net(), loader(), trainer=trainer, what_if=("none",))
    assert [line.partition(" ")[0] for line in found.assumptions] == ["StochasticWeightAveraging", "Unfreezing"]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"device": "foo"}, "no such device is known"),
        ({"device": "a100"}, "several devices have this name"),
        ({"device_memory": "24"}, "a positive number and a unit"),
        ({"batch_size": "0"}, "must be a number of at least 1, or max"),
        ({"batch_size": "max", "device": "cpu"}, "needs --device or --device-memory"),
        ({"seq_len": "512,a"}, "must be one or several numbers"),
        ({"batch_shape": "8x"}, "must be a shape for each tensor"),
        ({"what_if": ("precision=8",)}, "the precision must be one of"),
        ({"what_if": ("optimizer=lion",)}, "the optimizer must be one of"),
        ({"what_if": ("accumulate=0",)}, "must be a number, as in accumulate=4"),
        ({"what_if": ("magic",)}, "unknown change"),
        ({"what_if": ("offload", "none")}, "what-if none: no other change"),
        ({"what_if": ("checkpointing+magic",)}, "what-if checkpointing\\+magic: unknown change"),
        ({"what_if": ("strategy=ring",)}, "unknown strategy"),
        ({"device": "RTX 4071"}, "no such device is known; did you mean .*RTX 4070"),
    ],
)
def test_a_wrong_option_is_refused_before_the_program_runs(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Wanted(**wanted)


def test_a_device_is_found_by_a_part_of_its_name() -> None:
    assert device_named("A100-40GB").name == "NVIDIA A100 40GB"
    assert device_named("rtx 3060").name == "NVIDIA GeForce RTX 3060"
    assert device_named("h100") is DEVICES["NVIDIA H100 80GB"]


def test_sizes_have_binary_or_decimal_units() -> None:
    assert (parse_bytes("--x", "24GiB"), parse_bytes("--x", "0.5 gb")) == (24 * GIB, 500_000_000)


def test_blocks_of_one_class_are_checkpointed_and_others_are_not() -> None:
    parse_change("checkpointing").prepare(model := Net())
    assert sum("forward" in vars(module) for module in model.modules()) == 2
    with pytest.raises(ConfigError, match="no blocks that repeat"):
        parse_change("checkpointing").prepare(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


class Block(nn.Module):
    """A block with two parts of one class."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(2, 2)) for _ in range(2))


class Tower(nn.Module):
    """Stages of blocks, of which the last one has one block."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.Sequential(Block(), Block()), nn.Sequential(Block())])


class Pair(nn.Module):
    """Two towers as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Tower(), Tower()


@pytest.mark.parametrize(("model", "expected"), [(Tower(), 3), (Pair(), 6), (Block(), 2)])
def test_blocks_are_the_outermost_modules_that_repeat_in_containers(model: nn.Module, expected: int) -> None:
    blocks = repeated_blocks(model)
    assert len(blocks) == expected
    assert len({type(block) for block in blocks}) == 1


def test_several_changes_at_once_are_one() -> None:
    change = parse_change("checkpointing+precision=bf16-mixed+accumulate=4+devices=2")
    assert change.is_checkpointed
    assert change.arguments({"precision": "32"})["precision"] == "bf16-mixed"
    assert (change.batch_divisor, change.trainer["devices"]) == (4, "2")
    assert change.arguments({"accumulate_grad_batches": 2})["accumulate_grad_batches"] == 8


class Reading(nn.Module):
    """Its constructor reads values of a small tensor, as stochastic depth does."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = torch.linspace(0, 1, 4).tolist()
        self.layer = nn.Linear(1024, 1024)
        self.small = nn.Parameter(torch.zeros(8))


def test_only_large_tensors_of_constructors_are_without_data() -> None:
    with LargeOnMeta():
        module, outside = Reading(), torch.zeros(2 * MIB)
    assert module.layer.weight.is_meta
    assert not module.small.is_meta
    assert not outside.is_meta
    assert module.rates[-1] == 1.0


@FORKS
def test_an_estimate_prints_as_the_page_and_names_its_next_command(tmp_path: Path) -> None:
    found = estimate(Net(), loader(), device="L4", what_if=("none",))
    assert str(found).startswith("verdict   Fits: the peak is")
    assert "commands" not in str(found)
    assert repr(found).startswith("Estimate('Net': fits, ")
    file = program(tmp_path)[0]
    of_program = estimate_program([file], Wanted(device="L4", what_if=("none",)))
    assert str(of_program.document().commands[-1]) == f"lightning-memprof run {file}"


@FORKS
@pytest.mark.parametrize("kind", ["callback", "weights"])
def test_a_callback_that_keeps_a_copy_of_the_parameters_is_named(kind: str) -> None:
    class Average(Callback):
        def on_fit_start(self, _: Any, pl_module: LightningModule) -> None:
            self.copy = [parameter.detach().clone() for parameter in pl_module.parameters()]

    class OfLightning(Callback):
        """Copies as WeightAveraging does, in a hook before the model is on its device."""

        def setup(self, _: Any, pl_module: LightningModule, stage: str) -> None:
            self.copy = AveragedModel(pl_module, device=pl_module.device)

    callback = Average() if kind == "callback" else OfLightning()
    trainer = Trainer(accelerator="cpu", callbacks=[callback], logger=False, enable_checkpointing=False)
    plain = estimate(Net(), loader(), device="cpu", what_if=("none",))
    found = estimate(Net(), loader(), trainer=trainer, device="cpu", what_if=("none",))
    assert found.allocated_bytes - plain.allocated_bytes >= plain.categories["parameter"]
    assert any(line.startswith(f"{type(callback).__name__} keeps 514 KiB") for line in found.assumptions)


@FORKS
def test_weights_that_are_tied_stay_tied_in_half_precision() -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            first, other = (block[0] for block in self.blocks)  # type: ignore[index]
            other.weight = first.weight

    trainer = Trainer(accelerator="cpu", precision="bf16-true", logger=False, enable_checkpointing=False)
    found = estimate(Tied(), loader(), trainer=trainer, device="L4", what_if=("none",))
    assert found.categories["parameter"] == 2 * 256 * 256 + 2 * 512


def test_a_missing_file_is_named_before_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from lightning_memprof.cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit(10 * ('torch' in sys.modules) + code)"
    )
    for words, message in (
        (["absent.py"], "absent.py: no such file"),
        (["fit", "--config=absent.yaml"], "absent.yaml: no such file"),
        (["--device", "H1000", "absent.py"], "absent.py: no such file"),
    ):
        ran = subprocess.run(
            [sys.executable, "-c", code, "estimate", *words], check=False, capture_output=True, text=True, cwd=tmp_path
        )
        assert (ran.returncode, len(ran.stderr.splitlines())) == (1, 1), ran.stderr
        assert message in ran.stderr


ARGUMENTS = "import argparse; argparse.ArgumentParser().parse_args()"
CLI = "from lightning.pytorch.cli import LightningCLI; LightningCLI(Net)"


@FORKS
@pytest.mark.parametrize(("before", "words"), [(ARGUMENTS, ["--devices", "8"]), (CLI, ["fit", "--devices=8"])])
def test_options_after_the_program_are_explained_where_it_refuses_them(
    tmp_path: Path, before: str, words: list[str]
) -> None:
    command = program(tmp_path, before=before)
    with pytest.raises(MemprofError, match=r"exit code 2 before Trainer\.fit; options of estimate come before"):
        estimate_program([*command, *words], Wanted(what_if=("none",)))


@FORKS
def test_what_a_program_prints_before_its_fit_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = program(tmp_path, before="print('loads', file=sys.stderr)")
    estimate_program([*command, "--devices", "8"], Wanted(what_if=("none",)))
    assert capsys.readouterr().err == "loads\n"


@FORKS
def test_the_states_of_metrics_move_with_the_model() -> None:
    class Measured(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()

        def training_step(self, batch: Any) -> Any:
            loss = super().training_step(batch)
            self.mean(loss)
            return loss

    assert estimate(Measured(), loader(), device="L4", what_if=("none",)).fit == "fits"


@FORKS
def test_each_batch_size_that_is_tried_is_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reads(Net):
        def training_step(self, batch: Any) -> Any:
            loss = super().training_step(batch)
            return loss * loss.item()

    runs: list[int] = []

    def counted(work: Any) -> Any:
        runs.append(1)
        return in_child(work)

    in_child = simulation._in_child
    monkeypatch.setattr(simulation, "_in_child", counted)
    tried: list[str] = []
    estimate(
        Reads(), loader(), device="cpu", device_memory="8MiB", batch_size="max", what_if=("none",),
        progress=lambda name, _done, _total: tried.append(name),
    )  # fmt: skip
    # The program's own size is simulated again with two other numbers.
    assert len(runs) == len(tried) + 2
