from __future__ import annotations

import ast
import re
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

import lightning_memprof

pytestmark = pytest.mark.wheel

ROOT = Path(__file__).resolve().parents[2]
SITE_PACKAGES = Path(sysconfig.get_path("purelib"))
REQUIREMENT = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(\[[^]]*\])?(?P<versions>[^;]*)(;(?P<marker>.*))?$")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture(scope="module")
def distribution():
    return metadata.distribution("lightning-memprof")


@pytest.fixture(scope="module")
def constraints():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_the_tests_import_the_installed_wheel():
    assert Path(lightning_memprof.__file__).parent == SITE_PACKAGES / "lightning_memprof"


def test_helper_processes_import_the_installed_wheel(run_python):
    result = run_python("-c", "import lightning_memprof; print(lightning_memprof.__file__)")
    assert Path(result.stdout.strip()).parent == SITE_PACKAGES / "lightning_memprof"


def test_the_version_is_told_once(distribution):
    assert distribution.version == lightning_memprof.__version__


def test_the_wheel_holds_the_package_and_nothing_else(distribution):
    # The console script is the installer's, and so are INSTALLER, REQUESTED and the byte code.
    tops = {file.parts[0] for file in distribution.files if file.parts[0] != ".."}
    assert tops == {"lightning_memprof", f"lightning_memprof-{distribution.version}.dist-info"}


def test_the_wheel_holds_every_file_of_the_package(distribution):
    installed = {str(file) for file in distribution.files}
    package = ROOT / "lightning_memprof"
    source = {
        path.relative_to(ROOT).as_posix()
        for path in package.rglob("*")
        if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in path.relative_to(ROOT).parts)
    }
    assert source <= installed


def test_the_wheel_says_that_it_is_typed_and_carries_its_license(distribution):
    names = {str(file) for file in distribution.files}
    assert "lightning_memprof/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert distribution.metadata["License-Expression"] == "Apache-2.0"


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("console_scripts", "lightning-memprof", "lightning_memprof.__main__:main"),
        (
            "lightning.pytorch.callbacks_factory",
            "memprof",
            "lightning_memprof.integration.registration:lightning_callbacks",
        ),
        (
            "pytorch_lightning.callbacks_factory",
            "memprof",
            "lightning_memprof.integration.registration:pytorch_lightning_callbacks",
        ),
        ("lightning.pytorch.callbacks_factory", "memprof_trial", "lightning_memprof.trial.attach:lightning_callbacks"),
        ("pytest11", "lightning_memprof", "lightning_memprof.testing.plugin"),
    ],
)
def test_entry_points_are_there_and_load(distribution, group, name, value):
    (point,) = [point for point in distribution.entry_points if point.group == group and point.name == name]
    assert point.value == value
    loaded = point.load()
    assert callable(loaded) or loaded.__name__ == value


def test_the_command_is_installed(tmp_path, environment):
    command = Path(sysconfig.get_path("scripts")) / "lightning-memprof"
    result = subprocess.run(
        [command, "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "show" in result.stdout


def test_constraints_name_exact_versions_and_no_place(constraints):
    for line in constraints:
        assert re.fullmatch(r'[a-z0-9-]+==[0-9][0-9a-z.]*( ; python_(full_)?version >= "3\.\d+(\.\d+)?")?', line), line
    names = [line.split("==")[0] for line in constraints]
    assert len(names) == len(set(names))
    assert "torch==2.13.0" in constraints


def test_constraints_cover_every_requirement(distribution, constraints):
    pinned = {line.split("==")[0] for line in constraints}
    wanted = set()
    for requirement in distribution.requires or []:
        match = REQUIREMENT.match(requirement)
        assert match is not None, requirement
        wanted.add(normal(match["name"]))
    assert wanted - pinned == set()
    assert "hatchling" in pinned


@pytest.mark.slow
def test_everything_that_is_imported_is_required(distribution):
    providers = metadata.packages_distributions()
    required = {
        normal(match["name"])
        for match in map(REQUIREMENT.match, distribution.requires or [])
        if match is not None and match["marker"] is None
    }
    undeclared = {
        top
        for top in imported_packages()
        if top not in {*sys.stdlib_module_names, "lightning_memprof"}
        and not required & {normal(name) for name in providers.get(top, [])}
    }
    # lightning carries the first, and it is looked at only where the user's program has imported it; the second imports
    # the module that imports it.
    assert undeclared <= {"pytorch_lightning", "pytest"}


def imported_packages():
    for path in (ROOT / "lightning_memprof").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                yield node.module.split(".")[0]


def test_every_requirement_has_a_lower_bound_and_no_upper(distribution):
    for requirement in distribution.requires or []:
        match = REQUIREMENT.match(requirement)
        assert match is not None, requirement
        assert ">=" in match["versions"], requirement
        assert "<" not in match["versions"], requirement


def test_this_python_is_one_that_the_package_allows(distribution):
    assert distribution.metadata["Requires-Python"] == ">=3.10"
    assert sys.version_info >= (3, 10)
