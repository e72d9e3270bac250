"""How exact estimates of memory are: trainings that others measured on GPUs, estimated here.

    MEMPROF_ESTIMATE_RUNS=runs.jsonl python tests/benchmarks/estimates.py
    python tests/benchmarks/estimates.py --runs runs.jsonl --packages build/models --only gpt2 VGG16

The file has a training on each line: ``model``, ``optimizer``, ``batch``, ``gpu``, ``gpu_total_bytes``, the
``ground_bytes`` that it used, and whether it ran out of memory (``oom``). It is not part of this repository (source:
the evaluation of xMem, MIT). Its models come from two packages that are not installed with the others:

    pip install --no-deps --target build/models torchvision==0.28.0 transformers==4.51.3 tokenizers==0.21.1 \
        safetensors regex 'huggingface_hub<1'
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import lightning.pytorch as pl
import torch
from estimate_devices import publish_devices
from part import Target, judged, publish, targets
from torch import nn

from lightning_memprof.account.estimate import device_of
from lightning_memprof.estimation.construction import LargeOnMeta
from lightning_memprof.estimation.simulation import simulate
from lightning_memprof.estimation.trainer import Fit
from lightning_memprof.units import MIB
from measured import progress, table

if TYPE_CHECKING:
    from lightning_memprof.account.estimate import Estimate

VARIABLE: Final = "MEMPROF_ESTIMATE_RUNS"
IMAGE: Final = (3, 86, 86)
TOKENS: Final = 128
CLOSE: Final = "too close to call"


class Measured(pl.LightningModule):
    """The measured loop: gradients are freed before the forward, and its variables live into the next step."""

    def __init__(self, net: nn.Module, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = net
        self.optimizer = optimizer
        self.variables: dict[str, Any] = {}

    def training_step(self, batch: Any) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.variables["batch"] = batch
        if isinstance(batch, dict):
            outputs = self.variables["outputs"] = self.net(**batch)
            loss = outputs.loss
        else:
            outputs = self.variables["outputs"] = self.net(batch[0])
            loss = nn.functional.cross_entropy(outputs, batch[1])
        self.variables["loss"] = loss
        self.manual_backward(loss)
        optimizer.step()
        if not isinstance(batch, dict):
            self.variables["predicted"] = outputs.max(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


class Repeated:
    """A loader of one batch."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        yield self.batch


def images() -> Mapping[str, Callable[[], nn.Module]]:
    """Give torchvision's models by the names of the runs."""
    # Its fake implementations of detection operators ask for operators that its CPU build may lack.
    sys.modules["torchvision._meta_registrations"] = ModuleType("torchvision._meta_registrations")
    from torchvision import models
    from torchvision.models.mobilenetv3 import MobileNetV3, _mobilenet_v3_conf

    def small(arch: str, last_channel: int) -> nn.Module:
        setting, _ = _mobilenet_v3_conf(arch)
        return MobileNetV3(setting, last_channel=last_channel, num_classes=10)

    names = ("VGG11", "VGG16", "VGG19", "ResNet50", "ResNet101", "ResNet152")
    found = {name: getattr(models, name.lower()) for name in names}
    return found | {
        "MobileNetV2": models.mobilenet_v2,
        "MobeNetV3Small": partial(small, "mobilenet_v3_small", 1024),
        "MobeNetV3Large": partial(small, "mobilenet_v3_large", 1280),
        "MnasNet": partial(models.MNASNet, alpha=1.0, num_classes=10),
        "ConvNeXtTiny": models.convnext_tiny,
        "ConvNeXtBase": models.convnext_base,
        "RegNetX400MF": models.regnet_x_400mf,
        "RegNetY400MF": models.regnet_y_400mf,
    }


def texts() -> Mapping[str, Callable[[], nn.Module]]:
    """Give transformers' models by the names of the runs; sizes as in their configurations on the hub."""
    import transformers as hf

    def make(model: str, config: str, attention: str | None = "sdpa", **sizes: Any) -> nn.Module:
        options = {} if attention is None else {"attn_implementation": attention}
        made: nn.Module = getattr(hf, model)._from_config(getattr(hf, config)(**sizes), **options)
        return made

    gpt = partial(make, "GPT2LMHeadModel", "GPT2Config")
    opt = partial(make, "OPTForCausalLM", "OPTConfig", dropout=0.1, word_embed_proj_dim=768)
    t5 = partial(
        make, "T5ForConditionalGeneration", "T5Config", None, vocab_size=32128, decoder_start_token_id=0, d_kv=64
    )
    off = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return {
        "distilbert/distilgpt2": partial(gpt, n_layer=6),
        "openai-community/gpt2": gpt,
        "cerebras/Cerebras-GPT-111M": partial(
            gpt, n_layer=10, n_embd=768, n_head=12, n_inner=3072, n_positions=2048, activation_function="gelu", **off
        ),
        "facebook/opt-125m": partial(
            opt, hidden_size=768, num_hidden_layers=12, ffn_dim=3072, num_attention_heads=12, vocab_size=50272
        ),
        "facebook/opt-350m": partial(
            opt, hidden_size=1024, num_hidden_layers=24, ffn_dim=4096, num_attention_heads=16, vocab_size=50272,
            word_embed_proj_dim=512, do_layer_norm_before=False,
        ),
        "EleutherAI/gpt-neo-125M": partial(
            make, "GPTNeoForCausalLM", "GPTNeoConfig", None, hidden_size=768, num_layers=12, num_heads=12,
            attention_types=[[["global", "local"], 6]], vocab_size=50257, max_position_embeddings=2048, window_size=256,
            resid_dropout=0.0, embed_dropout=0.0, attention_dropout=0.0,
        ),
        "T5-small": partial(t5, d_model=512, d_ff=2048, num_layers=6, num_heads=8),
        "t5-base": partial(t5, d_model=768, d_ff=3072, num_layers=12, num_heads=12),
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": partial(
            make, "Qwen2ForCausalLM", "Qwen2Config", vocab_size=151936, hidden_size=1536, intermediate_size=8960,
            num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2, tie_word_embeddings=False,
        ),
        "Qwen/Qwen3-4B": partial(
            make, "Qwen3ForCausalLM", "Qwen3Config", vocab_size=151936, hidden_size=2560, intermediate_size=9728,
            num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
        ),
        "meta-llama/Llama-3.2-3B-Instruct": partial(
            make, "LlamaForCausalLM", "LlamaConfig", vocab_size=128256, hidden_size=3072, intermediate_size=8192,
            num_hidden_layers=28, num_attention_heads=24, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
            rope_theta=500000.0,
        ),
        "google/gemma-2-2b-it": partial(make, "Gemma2ForCausalLM", "Gemma2Config", None),
    }  # fmt: skip


def optimizer_named(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    if name == "Adafactor":
        from transformers import Adafactor

        return partial(Adafactor, lr=1e-3, relative_step=False)
    return partial(getattr(torch.optim, name), lr=1e-3)


@dataclass(frozen=True)
class Compared:
    """A measured run and its estimate.

    Attributes:
        run: the line of the file.
        estimate: of the same training.
        seconds: how long that took.

    """

    run: Mapping[str, Any]
    estimate: Estimate
    seconds: float

    @property
    def is_text(self) -> bool:
        return bool(self.run["library"] != "torchvision")

    @property
    def deviation(self) -> float:
        """The estimate above the truth, as a share of it; of a run without memory there is no truth."""
        return float(self.estimate.reserved.likely_bytes / self.run["ground_bytes"] - 1)

    @property
    def is_covered(self) -> bool:
        band = self.estimate.reserved
        return bool(band.low_bytes <= self.run["ground_bytes"] <= band.high_bytes)


def compare(run: Mapping[str, Any], models: Mapping[str, Callable[[], nn.Module]]) -> Compared:
    began = time.monotonic()
    try:
        with LargeOnMeta():
            net = models[run["model"]]()
    except (NotImplementedError, RuntimeError):
        net = models[run["model"]]()
    samples = run["batch"]
    ids = torch.zeros(samples, TOKENS, dtype=torch.long)
    batch: Any = {"input_ids": ids, "attention_mask": ids, "labels": ids}
    if run["library"] == "torchvision":
        batch = (torch.empty(samples, *IMAGE, device="meta"), torch.empty(samples, dtype=torch.long, device="meta"))
    fit = Fit(
        trainer={},
        model=Measured(net, optimizer_named(run["optimizer"])),
        data={"train_dataloaders": Repeated(batch)},
        program=run["model"],
    )
    device = device_of(run["gpu"], run["gpu_total_bytes"], "the measurement")
    return Compared(run, simulate(fit, device), time.monotonic() - began)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def goals(found: Sequence[Compared]) -> Iterable[Target]:
    measured = [each for each in found if not each.run["oom"]]
    for name, is_text, most_median, most_p95 in (("transformers", True, 0.005, 0.05), ("CNNs", False, 0.025, 0.10)):
        deviations = [abs(each.deviation) for each in measured if each.is_text is is_text]
        if deviations:
            middle, high = median(deviations), percentile(deviations, 0.95)
            yield Target(f"{name}: median deviation {most_median:.1%} or less", f"{middle:.2%}", middle <= most_median)
            yield Target(f"{name}: 95th percentile {most_p95:.0%} or less", f"{high:.1%}", high <= most_p95)
    close = sum(each.estimate.fit == CLOSE for each in found)
    wrong = sum(
        (each.estimate.fit == "does not fit") != each.run["oom"] for each in found if each.estimate.fit != CLOSE
    )
    yield Target("fits or does not fit: none wrong", f"{wrong} of {len(found) - close}", wrong == 0)
    yield Target("too close to call: 5% of runs or fewer", f"{close} of {len(found)}", close <= 0.05 * len(found))
    covered = sum(each.is_covered for each in measured)
    enough = covered >= 0.9 * len(measured)
    yield Target("the band contains the truth in 90% of runs or more", f"{covered} of {len(measured)}", enough)
    low = [each for each in measured if each.estimate.reserved.high_bytes < 0.97 * each.run["ground_bytes"]]
    yield Target("no truth more than 3% above the band", f"{len(low)} of {len(measured)}", not low)


def fragment(found: Sequence[Compared], *, trial: bool) -> str:
    heading = ["model", "optimizer", "batch", "measured, MiB", "estimated, MiB", "band, MiB", "deviation", "verdict"]
    rows = [
        [
            each.run["model"], each.run["optimizer"], str(each.run["batch"]), f"{each.run['ground_bytes'] / MIB:,.0f}",
            f"{each.estimate.reserved.likely_bytes / MIB:,.0f}",
            f"{each.estimate.reserved.low_bytes / MIB:,.0f}-{each.estimate.reserved.high_bytes / MIB:,.0f}",
            "out of memory" if each.run["oom"] else f"{each.deviation:+.1%}", each.estimate.fit,
        ]
        for each in found
    ]  # fmt: skip
    times = [each.seconds for each in found]
    speed = f"An estimate took {median(times):.1f} s in the median, {max(times):.1f} s at most."
    return "\n\n".join([targets(judged(list(goals(found)), trial=trial)), speed, table(heading, rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=os.environ.get(VARIABLE), help=f"default: ${VARIABLE}")
    parser.add_argument("--packages", default="build/models", help="where the models' packages are (%(default)s)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parts of the models' names")
    parser.add_argument("--quick", action="store_true", help="every tenth run; nothing is judged, nothing written")
    options = parser.parse_args()
    if options.only is None:
        publish_devices(trial=options.quick)
    if options.runs is None:
        print(f"Estimates were not compared: {VARIABLE} names no file of measured runs.")
        return
    runs = [json.loads(line) for line in Path(options.runs).read_text(encoding="utf-8").splitlines()]
    if options.only:
        runs = [run for run in runs if any(name in run["model"] for name in options.only)]
    runs = runs[::10] if options.quick else runs
    # Not in PYTHONPATH: Lightning would import torchvision first, whole.
    sys.path.append(options.packages)
    models = {**images(), **texts()}
    found = []
    with progress() as bar:
        task = bar.add_task("estimates", total=len(runs))
        for run in runs:
            found.append(compare(run, models))
            bar.update(task, advance=1, refresh=True)
    trial = options.quick or options.only is not None
    publish({"estimate": fragment(found, trial=trial)}, trial=trial)


if __name__ == "__main__":
    main()
