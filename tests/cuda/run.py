"""``make test-cuda``: the tests of tests/gpu with a CUDA build of torch and simulated devices.

    python tests/cuda/run.py [ARGUMENTS OF PYTEST]
    python tests/cuda/run.py --is-at-hand       exit code 0 if pip has the wheel of torch in a local folder

Makes ``build/cuda``: an environment with PyPI's torch, without NVIDIA's libraries, the stand-ins for them, and
everything else from the environment that runs this script. Writes ``docs/measured/cuda.md``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
ENVIRONMENT: Final = ROOT / "build" / "cuda"
TORCH: Final = "torch==2.14.1"
SOURCES: Final = (Path(__file__), Path(__file__).with_name("stand_ins.py"), *Path(__file__).parent.glob("stand_ins/*"))


def main() -> int:
    if sys.argv[1:] == ["--is-at-hand"]:
        return 0 if is_at_hand() else 1
    stamp = ENVIRONMENT / "made"
    if not stamp.exists() or any(path.stat().st_mtime > stamp.stat().st_mtime for path in SOURCES):
        make()
        stamp.touch()
    # Threads that spin while they wait take the cores of the simulated device.
    environment = os.environ | {"LD_LIBRARY_PATH": str(libraries()), "OMP_WAIT_POLICY": "passive"}
    command = [str(ENVIRONMENT / "bin" / "python"), str(ROOT / "tests" / "compatibility" / "gpu.py"), *sys.argv[1:]]
    return subprocess.run(command, env=environment, check=False).returncode


def is_at_hand() -> bool:
    """Return whether pip takes the wheel from a folder of this machine; print one line if it does not."""
    options = ("-q", "--dry-run", "--no-deps", "--ignore-installed", "--retries", "0", "--report", "-")
    command = [sys.executable, "-m", "pip", "install", *options, TORCH]
    done = subprocess.run(command, env=unconstrained(), capture_output=True, text=True, check=False)
    urls = [row["download_info"]["url"] for row in json.loads(done.stdout)["install"]] if done.returncode == 0 else []
    found = any(url.startswith("file:") for url in urls)
    if not found:
        print(f"test-cuda left out: pip has no local wheel of {TORCH}", flush=True)
    return found


def unconstrained() -> dict[str, str]:
    """Return the environment without the constraints, which name the CPU build."""
    return {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}


def make() -> None:
    """Make the environment; the torch wheel is about 550 MB."""
    if shutil.which("gcc") is None:
        raise SystemExit("make test-cuda compiles C: install gcc")
    print(f"Making {ENVIRONMENT.relative_to(ROOT)}", flush=True)
    venv.create(ENVIRONMENT, clear=True, with_pip=True)
    pip = [str(ENVIRONMENT / "bin" / "pip"), "install", "-q", "--no-deps"]
    subprocess.run([*pip, TORCH, "nvidia-ml-py"], env=unconstrained(), check=True)
    (site,) = ENVIRONMENT.glob("lib/python3*/site-packages")
    # After torch's own folder on the path.
    others = [path for path in sys.path if Path(path).name == "site-packages"]
    (site / "others.pth").write_text("\n".join(others) + "\n", encoding="utf-8")
    script = str(Path(__file__).with_name("stand_ins.py"))
    subprocess.run([sys.executable, script, str(ENVIRONMENT)], env=unconstrained(), check=True)


def libraries() -> Path:
    (runtime,) = ENVIRONMENT.glob("lib/python3*/site-packages/nvidia/*/lib/libcudart.so.*")
    return runtime.parent


if __name__ == "__main__":
    raise SystemExit(main())
