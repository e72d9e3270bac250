"""The documentation's code runs, its lists are complete, and its links lead somewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml

import sample_outputs

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *(page for page in sorted(DOCS.rglob("*.md")) if "measured" not in page.parts)]
# Imports and a model that the README assumes.
PRELUDE = """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning_memprof import Schedule
model, datamodule = BoringModel(), BoringDataModule()
"""
SHORT = {"PL_TRAINER_MAX_STEPS": "6", "PL_TRAINER_LIMIT_VAL_BATCHES": "0", "PL_TRAINER_ENABLE_PROGRESS_BAR": "False"}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def test_every_command_is_listed_and_described_on_the_page_of_the_command_line() -> None:
    help_ = subprocess.run(
        [sys.executable, "-m", "lightning_memprof", "--help"], capture_output=True, text=True, check=True
    ).stdout
    commands = set(re.findall(r"^    (\w+)  ", help_.partition("COMMAND\n")[2].partition("\n\n")[0], re.MULTILINE))
    assert {"show", "report", "run"} <= commands
    page = DOCS / "reference" / "command-line.md"
    assert set(re.findall(r"^lightning-memprof (\w+)", blocks(page, "shell")[0], re.MULTILINE)) == commands
    assert set(re.findall(r"^`(\w+)`\n: ", page.read_text(), re.MULTILINE)) == commands


def test_the_python_of_each_page_runs_from_top_to_bottom(tmp_path: Path, run_program: Callable[..., Any]) -> None:
    pages = {str(page.relative_to(ROOT)): blocks(page, "python") for page in PAGES}
    (tmp_path / "pages.py").write_text(
        dedent(f"""
        import os, traceback
        for page, blocks in {json.dumps({page: found for page, found in pages.items() if found})}.items():
            names = {{"__name__": page}}
            try:
                for block in [{PRELUDE!r}, *blocks]:
                    exec(compile(block, "<" + page + ">", "exec"), names)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            print(page)
        """)
    )
    done = run_program("pages.py", **SHORT)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_yaml_of_each_page_is_accepted(tmp_path: Path, run_program: Callable[..., Any]) -> None:
    files = []
    for page in PAGES:
        for index, block in enumerate(blocks(page, "yaml")):
            content = yaml.safe_load(block)
            # Options for LIGHTNING_MEMPROF are those of the callback itself.
            if not {"trainer", "memprofiler_cfg"} & set(content):
                callback = {"class_path": "lightning_memprof.MemProfilerCallback", "init_args": content}
                content = {"trainer": {"callbacks": [callback]}}
            file = tmp_path / f"{page.stem}-{index}.yaml"
            file.write_text(yaml.safe_dump(content))
            files.append(file.name)
    (tmp_path / "accept.py").write_text(
        dedent(f"""
        import sys
        sys.path.insert(0, {str(ROOT / "docs" / "examples")!r})
        from lightning.pytorch.demos.boring_classes import BoringModel
        from lightning_memprof.compat.fts import MemProfilerCLI
        for name in {json.dumps(files)}:
            print(name)
            MemProfilerCLI(BoringModel, run=False, args=["--config", name])
        """)
    )
    done = run_program("accept.py")
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-2000:]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_tests_that_the_security_page_names_exist() -> None:
    text = (DOCS / "reference" / "security.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:unit|property|browser|integration)/[\w/]+(?:\.py)?)`", text)
    assert named
    assert [path for path in named if not (ROOT / "tests" / path).exists()] == []


@pytest.mark.parametrize("page", sorted((DOCS / "contributing").glob("*.md")), ids=lambda page: page.name)
def test_the_modules_that_a_page_names_exist_and_no_list_is_long(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [
        path for path in re.findall(r"`(lightning_memprof/[\w/]+(?:\.py)?)", text) if not (ROOT / path).exists()
    ] == []
    assert max(map(int, re.findall(r"^(\d+)\. `", text, re.MULTILINE)), default=0) <= 8


@pytest.mark.parametrize("page", sample_outputs.OUTPUTS)
def test_the_sample_output_of_a_page_is_what_the_code_prints(page: str) -> None:
    with sample_outputs.produced() as directory:
        output = sample_outputs.OUTPUTS[page][1](directory.resolve()).rstrip("\n")
    assert sample_outputs.block_of(page)[1] == output, "python tests/support/sample_outputs.py"
