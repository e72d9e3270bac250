from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

RUN = Path(__file__).with_name("run.py")
METADATA = "Metadata-Version: 2.1\nName: torch\nVersion: 2.14.1\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def test_the_wheel_is_at_hand_where_pip_has_it_in_a_local_folder_or_index(tmp_path: Path) -> None:
    def ask(**settings: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        environment |= {"PIP_CONFIG_FILE": os.devnull, **settings}
        command = [sys.executable, str(RUN), "--is-at-hand"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    folder = tmp_path / "index" / "torch"
    folder.mkdir(parents=True)
    missing = ask(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(folder))
    assert (missing.returncode, missing.stdout.count("\n")) == (1, 1)
    assert "left out" in missing.stdout
    with zipfile.ZipFile(folder / "torch-2.14.1-py3-none-any.whl", "w") as wheel:
        for name, text in (("METADATA", METADATA), ("WHEEL", WHEEL), ("RECORD", "")):
            wheel.writestr(f"torch-2.14.1.dist-info/{name}", text)
    (folder / "index.html").write_text('<a href="torch-2.14.1-py3-none-any.whl">torch</a>', encoding="utf-8")
    assert ask(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(folder)).returncode == 0
    assert ask(PIP_INDEX_URL=folder.parent.as_uri()).returncode == 0
