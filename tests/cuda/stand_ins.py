"""Build stand-ins for the CUDA libraries that a CUDA build of torch links to, into an environment.

    python tests/cuda/stand_ins.py ENVIRONMENT

The environment has torch without its dependencies. The symbols that torch needs are read from its libraries: those
that ``stand_ins/*.c`` implements do what the README says, every other one returns its library's code for "not
supported" and, with FAKE_CUDA_VERBOSE set, names itself on first use. CUDA's version is that of the wheel.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent / "stand_ins"
# Symbols without a version, by the beginning of their name; the first that fits counts.
UNVERSIONED: Final = (
    ("nccl", "libnccl.so.2"),
    ("cuFile", "libcufile.so.0"),
    ("cusparseLt", "libcusparseLt.so.0"),
    ("nvshmem", "libnvshmem_host.so.3"),
    ("cu", "libcuda.so.1"),
)
NVML: Final = "libnvidia-ml.so.1"
SOURCES: Final = {
    "libcudart.so": ("cudart.c",),
    "libcublas.so": ("cublas.c",),
    "libcublasLt.so": ("cublas.c", "-DLT"),
    "libcuda.so": ("driver.c",),
    "libcupti.so": ("cupti.c",),
    "libnvidia-ml.so": ("nvml.c",),
    "libnccl.so": ("nccl.c",),
    "libcudnn.so": ("cudnn.c",),
}
# Each library's own code for "not supported".
UNSUPPORTED: Final = {
    "libcudart.so": 801,
    "libcuda.so": 801,
    "libcudnn.so": 3000,
    "libcupti.so": 15,
    "libcusolver.so": 9,
    "libcublas.so": 15,
    "libcublasLt.so": 15,
    "libcusparse.so": 10,
    "libnccl.so": 3,
    "libnvrtc.so": 11,
    "libcufft.so": 16,
}
STUB_HEAD: Final = """#include <stdio.h>
#include <stdlib.h>
static long stub(const char *name, int *named, long code) {
    if (!*named && getenv("FAKE_CUDA_VERBOSE")) fprintf(stderr, "%s has no implementation: %ld\\n", name, code);
    return *named = 1, code;
}
"""
STUB: Final = '__attribute__((weak)) long {0}(void) {{ static int named; return stub("{0}", &named, {1}); }}\n'
ERROR_TEXT: Final = '__attribute__((weak)) const char *{0}(void) {{ return "error of a stand-in"; }}\n'
HEADERS: Final = ("nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-cuda-cupti")
# CUDA 12 has no wheel of the runtime's internal headers alone: the compiler's (40 MB) has them.
HEADERS_12: Final = ("nvidia-cuda-runtime-cu12", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-cupti-cu12")


def main() -> None:
    environment = Path(sys.argv[1])
    (site,) = environment.glob("lib/python3*/site-packages")
    build = environment / "stand_ins"
    build.mkdir(exist_ok=True)
    needed = needed_symbols(site / "torch" / "lib")
    needed.setdefault(NVML, {})
    version = cuda_version(site)
    include = headers(environment, build, version)
    target = site / "nvidia" / f"cu{version.partition('.')[0]}" / "lib"
    target.mkdir(parents=True, exist_ok=True)
    # The others are linked to the runtime.
    for soname in sorted(needed, key=lambda name: not name.startswith("libcudart")):
        build_library(soname, needed[soname], build, include, target)
    print(target)


def needed_symbols(libraries: Path) -> dict[str, dict[str, str]]:
    """Return the symbols that torch needs, by library, each with its version or an empty one."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for path in sorted(libraries.glob("*.so")):
        for name in re.findall(r"NEEDED.*\[(lib(?:cu|nc|nv)[^\]]*)\]", output("readelf", "-d", str(path))):
            found[name].update()
        for line in output("nm", "-D", "--undefined-only", str(path)).splitlines():
            name, _, version = line.split()[1].partition("@")
            if version.startswith(("libcu", "libnv")):
                found[version][name] = version
            elif version == "NVSHMEM":
                found["libnvshmem_host.so.3"][name] = version
            elif not version and (library := next((lib for start, lib in UNVERSIONED if name.startswith(start)), None)):
                found[library].setdefault(name, "")
    return found


def cuda_version(site: Path) -> str:
    """Return CUDA's version of the torch wheel, as in ``13.0``."""
    text = (site / "torch" / "version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda[^=]*= '([\d.]+)'", text, re.MULTILINE)
    if found is None:
        raise SystemExit("this torch is no CUDA build")
    return found[1]


def headers(environment: Path, build: Path, version: str) -> Path:
    """Return the folder of CUDA's headers, from the wheels that have them (13 MB)."""
    names = [f"{name}=={version}.*" for name in (HEADERS_12 if version.startswith("12.") else HEADERS)]
    wheels, include = build / "wheels", build / "include"
    output(str(environment / "bin" / "pip"), "download", "-q", "--no-deps", "-d", str(wheels), *names)
    for path in wheels.glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                _, found, rest = name.partition("/include/")
                if found and rest and not rest.endswith("/"):
                    (include / rest).parent.mkdir(parents=True, exist_ok=True)
                    (include / rest).write_bytes(wheel.read(name))
    return include


def build_library(soname: str, symbols: dict[str, str], build: Path, include: Path, target: Path) -> None:
    """Compile what is implemented and stubs for the rest: weak symbols, which an implementation replaces."""
    plain = soname[: soname.index(".so") + 3]
    stubs = build / f"{plain}.stubs.c"
    code = UNSUPPORTED.get(plain, 1)
    texts = ((ERROR_TEXT if name.endswith("ErrorString") else STUB).format(name, code) for name in sorted(symbols))
    stubs.write_text(STUB_HEAD + "".join(texts), encoding="utf-8")
    source, *flags = SOURCES.get(plain, ("",))
    objects = []
    for path in (stubs, HERE / source) if source else (stubs,):
        objects.append(str(build / f"{plain}.{path.stem}.o"))
        output("gcc", "-c", "-O1", "-fPIC", "-w", f"-I{HERE}", f"-I{include}", *flags, str(path), "-o", objects[-1])
    script = build / f"{plain}.map"
    versions = sorted({version for version in symbols.values() if version})
    script.write_text("".join(f"{version} {{ global: *; }};\n" for version in versions), encoding="utf-8")
    link = ["gcc", "-shared", f"-Wl,-soname,{soname}", *objects, "-o", str(target / soname), "-ldl", "-lpthread"]
    link += [f"-Wl,--version-script={script}"] if versions else []
    if not plain.startswith("libcudart"):
        (runtime,) = target.glob("libcudart.so.*")
        link += ["-Wl,-rpath,$ORIGIN", str(runtime)]
    output(*link)


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
