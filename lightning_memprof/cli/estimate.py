"""``lightning-memprof estimate``: the memory of a training run before it starts."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentError
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jsonargparse import ArgumentParser, Namespace

from lightning_memprof.artifacts.naming import ESTIMATE
from lightning_memprof.cli.command import Command, add_format, quiet_lightning, say, write_document
from lightning_memprof.cli.progress import counting
from lightning_memprof.errors import ConfigError
from lightning_memprof.units import quoted

if TYPE_CHECKING:
    from lightning_memprof.read.run.model import Run


_DESCRIPTION: Final = """\
Estimate the memory of a training run without a GPU: run the program up to its
Trainer.fit, then a few steps of the fit on tensors without data.

  SCRIPT ARGS...        the program; options after SCRIPT are the program's,
                        except --device, --device-memory, --what-if and
                        --batch-size max
  -m MODULE ARGS...     the program as a module, as with python -m
  fit ARGS...           a LightningCLI without a script, with --config FILE
"""


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--device", metavar="NAME", help="a GPU such as 'H100 80GB', or cpu")
    parser.add_argument("--device-memory", metavar="SIZE", help="the memory of the GPU, as in 24GiB")
    parser.add_argument("--batch-size", metavar="N", help="samples per batch, or max: as many as fit")
    parser.add_argument("--seq-len", metavar="N[,N]", help="tokens per sample; one row for each number")
    parser.add_argument("--batch-shape", metavar="SHAPES", help="shapes of the batch's tensors, as in 8x3x64x64,8")
    parser.add_argument("--devices", metavar="N", help="number of GPUs that train together")
    parser.add_argument("--strategy", metavar="NAME", help="strategy of several GPUs: ddp, fsdp or fsdp2")
    parser.add_argument("--rank", metavar="N", default="0", help="the rank to estimate, or all: stages of a pipeline")
    parser.add_argument(
        "--what-if",
        metavar="CHANGE",
        action="append",
        help="also estimate with a change, such as precision=bf16-mixed; may be repeated",
    )
    parser.add_argument("--output", "-o", metavar="FILE", help="also write an HTML page")
    parser.add_argument(
        "--against", metavar="RUN", help="compare with a recorded run of the program, on the run's page"
    )
    add_format(parser)
    parser.add_argument("--all", action="store_true", help="all sections instead of the one-screen page")


def _execute(options: Namespace) -> int:
    if not options.program:
        raise ArgumentError(None, "estimate: name a program, as in: lightning-memprof estimate train.py")
    output = None if options.output is None else Path(options.output)
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {output.parent}")
    # The program runs in this process, and may change its working directory.
    output = output and output.absolute()
    from lightning_memprof.estimation.program import require_program
    from lightning_memprof.estimation.wanted import Wanted

    require_program(options.program)
    from lightning_memprof.read.run.load import load_run
    from lightning_memprof.report.charts.steps import live_chart
    from lightning_memprof.report.printers.html import render_document
    from lightning_memprof.report.printers.json import encode

    run = None if options.against is None else load_run(options.against)
    wanted = Wanted(
        device=options.device or (None if run is None else _device_of(run)),
        device_memory=options.device_memory,
        batch_size=options.batch_size,
        seq_len=options.seq_len,
        batch_shape=options.batch_shape,
        what_if=tuple(options.what_if or ()),
        devices=options.devices,
        strategy=options.strategy,
        rank=options.rank,
    )
    from msgspec.structs import replace

    from lightning_memprof.estimation.estimator import estimate_program

    with counting("the program") as progress, redirect_stdout(sys.stderr), quiet_lightning():
        estimate = estimate_program(options.program, replace(wanted, progress=progress))
    document = estimate.document()
    if run is not None:
        forecast = json.dumps(encode(estimate))
        (run.directory / ESTIMATE).write_text(forecast, encoding="utf-8")
        command = f"lightning-memprof show {quoted(options.against)} --section memory"
        say(f"memprof: estimated and measured peak: {command}", sys.stderr)
    if output is not None:
        output.write_text(render_document(document, [live_chart(estimate.live)]), encoding="utf-8")
    write_document(document, options.format, partial(encode, estimate), is_full=options.all)
    return 0


def _device_of(run: Run) -> str | None:
    """Return the name of a run's device; None where the table of devices does not have it."""
    from lightning_memprof.account.estimate import device_named

    facts = run.lead.facts
    name = "cpu" if facts.is_cpu else str(facts.environment.get("device_name"))
    try:
        return device_named(name).name
    except ConfigError:
        return None


COMMAND: Final = Command(
    summary="estimate the memory of a training run before it starts",
    description=_DESCRIPTION,
    add_options=_add_options,
    execute=_execute,
    usage="lightning-memprof estimate [options] SCRIPT ARGS...",
)
