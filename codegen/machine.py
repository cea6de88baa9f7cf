"""Facts about this machine: instruction set, C++ compiler, packages, switches. Never imports torch or cuda."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from embforge.codegen.errors import ToolchainError

X86_NEEDS: dict[str, frozenset[str]] = {
    "avx512": frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma", "f16c"}),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
}
"""CPU flags (Linux spelling) that each instruction set needs, the best first."""

COMPILERS = ("g++", "clang++", "c++")
HEADER_PACKAGES = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: its path, its version and the command that runs it."""

    path: str
    """The path of the program, for display."""
    version: str
    """The first line of `--version`. It is part of every CPU kernel's key, because a path says nothing."""
    command: tuple[str, ...]
    """The words of the command: the path, then the other words of a CXX such as `ccache g++`."""


def switched_on(variable: str, *, default: bool) -> bool:
    """Whether an environment variable is on: 0, false, no and off mean no, any other value means yes."""
    value = os.environ.get(variable, "").strip().lower()
    return value not in ("0", "false", "no", "off") if value else default


def host_isa() -> str:
    """The best instruction set of this machine that kernels can use: avx512, avx2, neon, or if it has none, generic."""
    if platform.machine().lower() in ("arm64", "aarch64"):
        return "neon"
    flags = _x86_flags()
    return next((isa for isa, needs in X86_NEEDS.items() if needs <= flags), "generic")


def runs_here(isa: str) -> bool:
    """Whether this machine can run kernels for an instruction set."""
    return isa in ("generic", host_isa()) or (isa in X86_NEEDS and X86_NEEDS[isa] <= _x86_flags())


def find_compiler(command: str | None = None) -> Compiler:
    """The C++ compiler: `command`, or `CXX`, or the first of g++, clang++ and c++ on the search path.

    A command may be several words, such as `ccache g++`. If there is no compiler or it does not run, `ToolchainError`
    names the remedy.
    """
    wanted = command or os.environ.get("CXX")
    commands = [_words(wanted)] if wanted else [(name,) for name in COMPILERS]
    words = next(((path, *rest) for name, *rest in commands if (path := shutil.which(name))), None)
    if words is None:
        raise ToolchainError(
            f"no C++ compiler: {wanted or ', '.join(COMPILERS)} not found; install one (Debian: apt install g++; "
            "macOS: xcode-select --install), or point CXX to one, or use backend='reference'"
        )
    return Compiler(words[0], _first_line(words), words)


def package_version(name: str) -> str | None:
    """The version of an installed distribution, which is not imported; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cuda_headers() -> Path:
    """The directory of NVIDIA's CUDA headers, from their wheel; without a wheel, `ToolchainError` names the remedy."""
    for name in HEADER_PACKAGES:
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        for file in package.files or ():
            if file.name == "cuda_fp16.h":
                return Path(str(package.locate_file(file))).parent
    raise ToolchainError(
        f"NVIDIA's CUDA headers are not installed: none of {', '.join(HEADER_PACKAGES)} holds cuda_fp16.h; "
        f"pip install 'embforge[cuda]' (from a clone: pip install '.[cuda]')"
    )


def cpu_model() -> str:
    """The machine's name of its processor."""
    for line in _cpuinfo():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _x86_flags() -> frozenset[str]:
    if sys.platform == "darwin":
        answer = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.features", "machdep.cpu.leaf7_features"],
            capture_output=True,
            text=True,
            check=False,
        )
        return frozenset(answer.stdout.lower().split())
    for line in _cpuinfo():
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def _words(command: str) -> tuple[str, ...]:
    if shutil.which(command):  # a path may contain spaces
        return (command,)
    try:
        return tuple(shlex.split(command)) or (command,)
    except ValueError as error:
        raise ToolchainError(f"the C++ compiler {command!r} is not a command ({error}); set CXX to one") from None


@cache
def _first_line(command: tuple[str, ...]) -> str:
    answer = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    if answer.returncode or not answer.stdout:
        raise ToolchainError(
            f"the C++ compiler {shlex.join(command)} does not run: {answer.stderr.strip() or 'no output'}; "
            "point CXX to one that does"
        )
    return answer.stdout.splitlines()[0].strip()


@cache
def _cpuinfo() -> tuple[str, ...]:
    path = Path("/proc/cpuinfo")
    return tuple(path.read_text().splitlines()) if path.exists() else ()
