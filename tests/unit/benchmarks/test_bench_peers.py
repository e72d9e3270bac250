"""The peers are installed in the versions of `peers.txt`, beside the tests' own, and bring nothing with them."""

from __future__ import annotations

import re
import runpy
import sys
import zipfile
from pathlib import Path

import pytest

MAKER = Path(__file__).parents[2] / "benchmarks" / "make_peers.py"


def wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    """Write a distribution without content."""
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.mark.slow
def test_a_peer_that_the_tests_pin_otherwise_is_installed_and_brings_no_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version, *requires in (("peer", "2.3.3", "torch"), ("peer", "3.1.1"), ("torch", "9.9")):
        wheel(tmp_path, name, version, *requires)
    pins = tmp_path / "constraints.txt"
    pins.write_text("peer==3.1.1\n")
    for variable in ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"):
        monkeypatch.setenv(variable, str(pins))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    maker = runpy.run_path(str(MAKER))
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "peers"))
    assert maker["install_alone"](Path(sys.executable), "peer==2.3.3") == 0
    assert sorted(path.name for path in (tmp_path / "peers").iterdir()) == ["peer-2.3.3.dist-info"]
    # What builds them keeps to the tests' versions.
    assert maker["install"](Path(sys.executable), "peer==2.3.3") != 0


def test_every_peer_is_pinned_and_none_is_a_torch() -> None:
    lines = (MAKER.parent / "peers.txt").read_text(encoding="utf-8").splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    assert wanted
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in wanted)
    assert not {"torch", "torchvision", "lightning"} & {line.split("==")[0] for line in wanted}
