"""What a run writes: nothing of the secrets that its program was told, and nothing that the user's umask forbids."""

from __future__ import annotations

import gzip
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from waiting import wait_until

SUPPORT = Path(__file__).parents[1] / "support"
# None of them is a word that a run has otherwise.
SECRETS = {
    "MY_SERVICE_TOKEN": "tok-4f9a1c77e2b05d38",
    "WANDB_API_KEY": "wandb-91be02c4aa17f6",
    "AWS_SECRET_ACCESS_KEY": "aws/Zx81+qqLw902kfAA",
    "DB_PASSWORD": "correct-horse-battery",
    "HARMLESS": "but-nobodys-business-0815",
}
ON_THE_COMMAND_LINE = "cli-5d0c66b9f3e18a"

# All that a manifest has about the process: a new field is a decision, and gets a line in docs/reference/security.md.
RUN_ROW = {
    "kind", "time_ns", "schema_version", "stage", "rank", "local_rank", "node_rank", "world_size", "host", "pid",
    "strategy", "accelerator", "device", "root", "schedule", "collectors", "every_collector", "environment",
    "operator_table",
}  # fmt: skip
ENVIRONMENT = {
    "python", "torch", "lightning", "lightning_memprof", "platform", "cpu_count", "usable_cpus", "physical_cpus",
    "cpu_quota", "torch_threads", "device_name", "memory_bytes", "rss_at_start_bytes", "memory_limit_bytes",
    "device_memory_bytes",
}  # fmt: skip

Fit = Callable[..., Path]


@pytest.fixture(scope="module")
def fit(tmp_path_factory: pytest.TempPathFactory) -> Fit:
    """Give a function that trains in a process of its own and returns the log directory."""

    def run(umask: int, **variables: str) -> Path:
        directory = tmp_path_factory.mktemp("private")
        directory.chmod(0o777)
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
        done = subprocess.run(
            [sys.executable, str(SUPPORT / "private_fit.py"), str(directory), f"--token={ON_THE_COMMAND_LINE}"],
            env=kept | SECRETS | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SUPPORT), **variables},
            umask=umask, cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode == 0) == ("FAIL" not in variables), done.stderr[-3000:]
        root = directory / "version_0"
        if "FAIL" not in variables:
            _wait_for(root / "memprofiler" / "report.html")
        return root

    return run


def _wait_for(page: Path) -> None:
    wait_until(page.exists)
    assert page.exists(), sorted(page.parent.iterdir())
    # Its process has something to do after the page, and must be gone before the directory goes.
    time.sleep(0.5)


def contents(root: Path) -> dict[str, bytes]:
    """All that a run has written, as it is and as it is meant."""
    found = {}
    for path in root.rglob("*"):
        if path.is_file():
            raw = path.read_bytes()
            found[path.relative_to(root).as_posix()] = raw + (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else b"")
    return found


def told(content: bytes) -> list[str]:
    """Return which secrets are in it, in any of the ways that a file has text."""
    forms = {name: [value, json.dumps(value)[1:-1], value[4:]] for name, value in SECRETS.items()}
    forms["argument"] = [ON_THE_COMMAND_LINE]
    return [name for name, texts in forms.items() if any(text.encode() in content for text in texts)]


def modes(root: Path) -> dict[str, tuple[bool, int]]:
    """By name, whether it is a directory, and its rights."""
    every = [root, *root.rglob("*")]
    return {str(path): (path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in every}


def only_as(umask: int, root: Path) -> None:
    wrong = {
        name: oct(mode)
        for name, (is_directory, mode) in modes(root).items()
        if mode != (0o777 if is_directory else 0o666) & ~umask
    }
    assert not wrong


def test_no_secret_of_the_environment_or_the_command_line_is_in_any_file_and_all_have_the_umask(fit: Fit) -> None:
    root = fit(0o027)
    found = contents(root)
    names = " ".join(found)
    for kind in ("manifest", "pulse", ".trace.json.gz", "tfevents", "report.json", "report.html", "stats.pickle"):
        assert kind in names, names
    assert {name: secrets for name, content in found.items() if (secrets := told(content))} == {}
    only_as(0o027, root)


def test_an_exception_s_words_are_written_without_the_secrets_in_them(fit: Fit) -> None:
    root = fit(0o077, FAIL="1")
    found = contents(root)
    assert {name: secrets for name, content in found.items() if (secrets := told(content))} == {}
    rows = [json.loads(line) for line in found["memprofiler/manifest.rank00000.jsonl"].splitlines()]
    (end,) = (row for row in rows if row["kind"] == "end")
    (first,) = (row for row in rows if row["kind"] == "run")
    assert set(first) - {"triggers"} == RUN_ROW
    assert set(first["environment"]) == ENVIRONMENT
    assert set(first["schedule"]) == {"callable"}
    assert end["exception"] == "ConnectionError: 401 for https://me:***@example.org/?token=***"
    only_as(0o077, root)
