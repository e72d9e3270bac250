"""Remedies on real trainers, loaders and optimizers."""

from __future__ import annotations

import gc
import itertools
import re
from collections import defaultdict

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lightning_memprof.errors import ConfigError
from lightning_memprof.judge import remedies as judge_remedies
from lightning_memprof.trial.change import RefusedError
from lightning_memprof.trial.changes import CHANGES, parse_change
from training import Noise, Perceptron, trainer


@pytest.mark.parametrize("kind", CHANGES, ids=lambda kind: kind.name)
def test_each_remedy_parses_its_own_example_and_shows_code(kind):
    text = f"{kind.name}={kind.example}" if kind.example else kind.name
    found = parse_change(text)
    assert (type(found), found.label) == (kind, text)
    assert "{value}" not in found.code


def test_an_unknown_remedy_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"--remedy faster: unknown; known are workers=4, .*, expandable_segments"):
        parse_change("faster")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("workers", "workers=4"),
        ("workers=0", "workers=4"),
        ("workers=many", "workers=4"),
        ("workers=²", "workers=4"),
        ("workers=100000", "workers=4"),
        ("fused_optimizer=1", "fused_optimizer"),
        ("precision=8-bit", "precision=bf16-mixed"),
        ("without_callback=a b", "without_callback=MyCallback"),
    ],
)
def test_an_invalid_value_names_a_valid_one(text, wanted):
    with pytest.raises(ConfigError, match=rf"--remedy {text}: must be as in {wanted}$"):
        parse_change(text)


CONSTANTS = [value for value in vars(judge_remedies).values() if isinstance(value, judge_remedies.Remedy)]
# A value for each field of a change.
FIELDS = {"owner": "Slow.on_train_batch_end", "object": "Slow", "kernels": "fused"}


def filled(remedy: judge_remedies.Remedy) -> judge_remedies.Remedy:
    fields = re.findall(r"\{(\w+)\}", remedy.text + remedy.in_torch + remedy.change)
    return remedy.filled(**{field: FIELDS.get(field, "8") for field in fields})


@pytest.mark.parametrize("remedy", [each for each in CONSTANTS if each.change], ids=lambda each: each.id)
def test_the_change_of_a_remedy_is_one_that_can_be_tried(remedy):
    assert parse_change(filled(remedy).change).label == filled(remedy).change


def test_most_remedies_are_advised_by_a_finding():
    advice = {
        remedy.change.format_map(defaultdict(str, kernels=kernels)).partition("=")[0]
        for remedy in CONSTANTS
        for kernels in ("fused", "foreach")
    }
    # People ask for it by name.
    assert {kind.name for kind in CHANGES} - advice == {"without_callback"}


def loader(workers: int = 0) -> DataLoader[torch.Tensor]:
    return DataLoader(Noise(8), batch_size=2, num_workers=workers)


def test_workers_read_the_same_batches_and_persist():
    plain, changed = loader(), loader()
    parse_change("workers=2").on_loader(changed)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(plain, changed, strict=True))
    assert changed._iterator is not None  # kept for the next epoch


def test_a_number_of_workers_keeps_a_prefetch_factor():
    given = DataLoader(Noise(8), num_workers=1, prefetch_factor=5)
    parse_change("workers=3").on_loader(given)
    assert (given.num_workers, given.prefetch_factor, given.persistent_workers) == (3, 5, False)


def test_accumulation_divides_batches_of_every_loader_with_a_batch_sampler():
    changed = loader()
    parse_change("accumulate=2").on_loader(changed)
    assert ([len(batch) for batch in changed], changed.batch_size) == ([1] * 8, 1)
    given = DataLoader(Noise(8), batch_sampler=BatchSampler(SequentialSampler(Noise(8)), 4, drop_last=False))
    parse_change("accumulate=4").on_loader(given)
    assert [len(batch) for batch in given] == [1] * 8
    with pytest.raises(RefusedError, match="the batch size is not that of a BatchSampler"):
        parse_change("accumulate=2").on_loader(DataLoader(Noise(8), batch_sampler=[[0, 1], [2, 3]]))


def test_accumulation_needs_lightnings_own_optimization(tmp_path):
    remedy, module = parse_change("accumulate=2"), Perceptron()
    run = trainer(tmp_path, accumulate_grad_batches=4)
    with pytest.raises(RefusedError, match="the Trainer has accumulate_grad_batches=4"):
        remedy.on_fit(run, module)
    module.automatic_optimization = False
    with pytest.raises(RefusedError, match="the module optimizes manually"):
        remedy.on_fit(run, module)


@pytest.mark.parametrize("text", ["persistent_workers", "prefetch=4"])
def test_settings_of_workers_need_workers(text):
    with pytest.raises(RefusedError, match="the DataLoader has no workers"):
        parse_change(text).on_loader(loader())
    given = loader(1)
    parse_change(text).on_loader(given)
    assert (given.persistent_workers, given.prefetch_factor) == (
        (True, 2) if text == "persistent_workers" else (False, 4)
    )


def test_optimizer_flags_exclude_each_other(tmp_path):
    run, module = trainer(tmp_path), Perceptron()
    run.strategy._optimizers = [torch.optim.AdamW(module.parameters(), foreach=True)]
    parse_change("fused_optimizer").on_start(run, module)
    (group,) = run.optimizers[0].param_groups
    assert (group["fused"], group["foreach"]) == (True, False)


def test_an_optimizer_without_the_implementation_is_refused_by_name(tmp_path):
    run, module = trainer(tmp_path), Perceptron()
    run.strategy._optimizers = [torch.optim.LBFGS(module.parameters())]
    with pytest.raises(RefusedError, match="LBFGS has no fused implementation"):
        parse_change("fused_optimizer").on_start(run, module)


def test_precision_replaces_the_default_plugin_only(tmp_path):
    run = trainer(tmp_path)
    parse_change("precision=bf16-mixed").on_fit(run, Perceptron())
    assert run.precision == "bf16-mixed"
    with pytest.raises(RefusedError, match="the Trainer has precision=bf16-mixed"):
        parse_change("precision=16-mixed").on_fit(run, Perceptron())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("pin_memory", "on the CPU"),
        ("precision=16-mixed", "needs a GPU"),
        ("static_graph", "SingleDeviceStrategy, not DDPStrategy"),
        ("expandable_segments", "not on a CUDA device"),
        ("without_callback=Other", "no callback of a class Other"),
        ("rare_callback=ModelSummary", "neither a callback nor the module is a ModelSummary with hooks in each batch"),
    ],
)
def test_a_remedy_that_does_not_apply_is_refused_with_its_reason(text, reason, tmp_path):
    with pytest.raises(RefusedError, match=reason):
        parse_change(text).on_fit(trainer(tmp_path), Perceptron())


def test_checkpointing_needs_blocks():
    with pytest.raises(RefusedError, match="no repeated blocks"):
        parse_change("checkpointing").on_model(Perceptron())


def test_a_callback_is_left_out_by_its_class(tmp_path):
    run = trainer(tmp_path, ModelCheckpoint(tmp_path), enable_checkpointing=True)
    parse_change("without_callback=ModelCheckpoint").on_fit(run, Perceptron())
    assert not any(isinstance(found, ModelCheckpoint) for found in run.callbacks)


def test_anomaly_detection_ends_and_logging_is_rarer(tmp_path):
    run = trainer(tmp_path, detect_anomaly=True)
    torch.autograd.set_detect_anomaly(True)
    parse_change("no_anomaly_detection").on_fit(run, Perceptron())
    parse_change("log_every=50").on_fit(run, Perceptron())
    assert not torch.is_anomaly_enabled()
    assert (run._detect_anomaly, run.log_every_n_steps) == (False, 50)


@pytest.mark.slow
def test_compiling_finds_the_modules_in_containers():
    class Blocks(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
            self.loss_function = nn.MSELoss()

    module = Blocks()
    parse_change("compile").on_model(module)
    assert changed_modules(module) == ["net", "blocks.0", "blocks.1"]


def test_compiling_tells_modules_apart_by_identity():
    class Odd(nn.Linear):
        hashes = itertools.count()

        def __eq__(self, _: object) -> bool:
            raise TypeError

        def __hash__(self) -> int:
            return next(self.hashes)

    module = Perceptron()
    module.net = Odd(8, 1)  # type: ignore[assignment]
    remedy = parse_change("compile")
    remedy.on_model(module)
    assert "in [self.net]: " in remedy.code[-1]


def changed_modules(model: nn.Module) -> list[str]:
    return [path for path, child in model.named_modules() if "forward" in vars(child)]


def test_the_code_to_paste_names_the_modules_of_the_training():
    class Stacked(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(8, 8)) for _ in range(3)]))
            self.heads = nn.ModuleDict({"a": nn.Linear(8, 1)})

    for name, names in (("compile", "self.net, self.heads['a']"), ("checkpointing", "*self.net[0]")):
        module, pasted, remedy = Stacked(), Stacked(), parse_change(name)
        remedy.on_model(module)
        *_, code = remedy.code
        assert f"in [{names}]: " in code
        exec("\n".join(remedy.code), {"torch": torch}, {"self": pasted})  # noqa: S102 what a user pastes
        assert changed_modules(module) == changed_modules(pasted) != []


def test_the_code_to_paste_names_the_optimizers_of_the_training(tmp_path):
    run, module = trainer(tmp_path), Perceptron()
    run.strategy._optimizers = [torch.optim.SGD(module.parameters(), 0.1), torch.optim.Adam(module.parameters())]
    remedy = parse_change("fused_optimizer")
    remedy.on_start(run, module)
    assert remedy.code == ("torch.optim.SGD(..., fused=True)", "torch.optim.Adam(..., fused=True)")


def test_a_rare_callback_and_a_module_with_such_hooks_run_in_one_of_50_batches(tmp_path):
    class Counting(Callback):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            self.seen.append(batch_idx)

    class Watching(Perceptron):
        calls = 0

        def on_after_backward(self) -> None:
            self.calls += 1

    counting, module = Counting(), Watching()
    run = trainer(tmp_path, counting, max_steps=104)
    remedies = [parse_change("rare_callback=Counting"), parse_change("rare_callback=Watching")]
    for remedy in remedies:
        remedy.on_fit(run, module)
    run.fit(module, DataLoader(Noise(104), batch_size=1))
    assert counting.seen == [0, 50, 100]
    assert module.calls == 3
    assert [remedy.code for remedy in remedies] == [
        ("if trainer.fit_loop.batch_idx % 50: return  # first in Counting.on_train_batch_end",),
        ("if self.trainer.fit_loop.batch_idx % 50: return  # first in Watching.on_after_backward",),
    ]


def test_channels_last_changes_the_layout_of_convolutions():
    module = Perceptron()
    module.conv = nn.Conv2d(3, 8, 3)
    parse_change("channels_last").on_model(module)
    assert module.conv.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.slow
@pytest.mark.usefixtures("thawed")
def test_frozen_objects_are_left_out_of_collections(tmp_path):
    try:
        parse_change("gc_freeze").on_start(trainer(tmp_path), Perceptron())
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_expandable_segments_keep_other_settings(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    given = parse_change("expandable_segments").environment()
    assert given == {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}
