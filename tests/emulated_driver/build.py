"""Builds the driver, and starts processes that see it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from embforge.codegen import cache
from embforge.codegen.machine import cuda_headers, find_compiler, package_version
from embforge.codegen.targets.cuda.arch import arch_named

HERE = Path(__file__).parent
TESTS = HERE.parent
SIMT = TESTS.parent / "templates" / "emulator"
FLAGS = ("-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror", "-fPIC", "-shared")
LINKED = ("-fvisibility=hidden", "-Wl,-z,defs", "-Wl,-soname,libcuda.so.1")
"""cuda-python asks for a library of this name and gets the one that is already loaded under it."""

CONSENT = "EMBFORGE_EMULATED_DRIVER"
"""A variable that describes the devices. The driver starts only if it is set."""
SIGNS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/proc/driver/nvidia/version")
"""Files of a real driver. On a machine that has one of them, the emulated driver refuses to start."""
LIBRARY = "EMBFORGE_EMULATED_LIBRARY"
"""Path of the library, for `__main__`."""


def driver_library() -> Path:
    """The driver, compiled once and kept in the tests' cache."""
    compiler = find_compiler()
    parts = {path.name: path.read_text(encoding="utf-8") for path in sorted(HERE.glob("*.[ch]*"))}
    parts["abi.h"] = (SIMT / "abi.h").read_text(encoding="utf-8")
    facts = {"compiler": compiler.version, "flags": " ".join(FLAGS + LINKED)}

    def compile_library(source: Path) -> bytes:
        with tempfile.TemporaryDirectory() as scratch:
            result = Path(scratch) / "driver"
            places = [f"-I{cuda_headers()}", f"-iquote{HERE}", f"-iquote{SIMT}"]
            command = [*compiler.command, *FLAGS, *places, str(source), *LINKED, "-ldl", "-o", str(result)]
            subprocess.run(command, check=True)
            return result.read_bytes()

    recipe = cache.Recipe(
        uri="emulated_driver",
        key=cache.key_of(parts | facts | {"headers": package_version("nvidia-cuda-runtime") or ""}),
        source=parts["library.cpp"],
        source_suffix=".cpp",
        binary_suffix=".bin",
        compile=compile_library,
    )
    return cache.fetch(recipe)[0].binary


def devices_of(arch: str) -> str:
    """What `CONSENT` says for devices of that architecture."""
    a = arch_named(arch)
    return f"arch={a.number} threads={a.threads} blocks={a.blocks} shared={a.shared_bytes} reserved={a.shared_reserved}"


def environment(arch: str = "sm_90") -> dict[str, str]:
    """The environment of a process that sees devices of that architecture."""
    return {
        **os.environ,
        CONSENT: devices_of(arch),
        LIBRARY: str(driver_library()),
        # Fills the bytes after a block with garbage, so that an argument narrower than the kernel takes is noticed.
        "PYTHONMALLOC": "debug",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


def run(module: str, *words: str, arch: str = "sm_90") -> subprocess.CompletedProcess[str]:
    """Runs `python -m emulated_driver MODULE WORDS` with devices of that architecture, and returns how it ended."""
    command = [sys.executable, "-m", "emulated_driver", module, *words]
    return subprocess.run(command, env=environment(arch), cwd=TESTS, capture_output=True, text=True, check=False)
