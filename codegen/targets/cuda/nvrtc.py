"""NVRTC through cuda.core: CUDA source to cubin, with no GPU and no driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from embforge.codegen.errors import CompileError, ToolchainError
from embforge.codegen.machine import package_version
from embforge.codegen.targets.compiler_log import numbered_log
from embforge.codegen.targets.cuda.packages import cuda_module

FLAGS: dict[str, Any] = {"std": "c++17", "fma": False, "lineinfo": True}
"""Contraction and fast math are off: this is part of the semantics. Profilers and our own counts use line numbers."""
CONTEXT_LINES = 3


def compile_cubin(source: Path, arch: str) -> bytes:
    """The cubin of a source file for one architecture.

    `CompileError`: NVRTC refused it; the message holds its log, the source lines that it names and the file's path.
    `ToolchainError`: the cuda packages are not installed.
    """
    core = cuda_core()
    text = source.read_text(encoding="utf-8")
    # Line information holds the file's name: one that is the same on every machine keeps binaries reproducible.
    name = f"/embforge/{source.name}"
    options = core.ProgramOptions(arch=arch, name=name, **FLAGS)
    program = core.Program(text, "c++", options)
    try:
        return bytes(program.compile("cubin").code)
    except Exception as error:  # cuda.core's NVRTCError is not public; other errors are raised as they are
        if "NVRTC" not in type(error).__name__:
            raise
        log = numbered_log(str(error).replace(name, str(source)), text, str(source), CONTEXT_LINES)
        raise CompileError(f"NVRTC could not compile {source}\n{log}") from error
    finally:
        program.close()


def nvrtc_version() -> tuple[int, int]:
    """Major and minor version of the NVRTC in use. `ToolchainError` if there is none."""
    error, major, minor = cuda_module("cuda.bindings.nvrtc").nvrtcVersion()
    if int(error) != 0:
        raise ToolchainError(f"NVRTC does not report its version ({error}); reinstall nvidia-cuda-nvrtc")
    return int(major), int(minor)


def nvrtc_fingerprint(arch: str) -> dict[str, str]:
    """Labelled facts that decide a cubin in addition to its source."""
    # The versions of wheels: to ask NVRTC itself would load it, which takes half a second before every cache lookup.
    compiler = package_version("nvidia-cuda-nvrtc") or "{}.{}".format(*nvrtc_version())
    headers = package_version("nvidia-cuda-runtime") or "of the compiler"
    return {
        "compiler": f"nvrtc {compiler}",
        "headers": headers,
        "arch": arch,
        "flags": repr(sorted(FLAGS.items())),
    }


def installed_nvrtc() -> tuple[int, int] | None:
    """Major and minor version of the NVRTC package, without loading it; None if it is not installed."""
    version = package_version("nvidia-cuda-nvrtc") or package_version("nvidia-cuda-nvrtc-cu12")
    if version is None:
        return None
    major, minor = (int(part) for part in version.split(".")[:2])
    return major, minor


def check_driver(driver_version: tuple[int, int], compiler_version: tuple[int, int]) -> None:
    """`ToolchainError` if the driver cannot load cubins of this NVRTC, whose major version exceeds the driver's."""
    driver, compiler = driver_version[0], compiler_version[0]
    if compiler > driver:
        raise ToolchainError(
            f"NVRTC {compiler}.{compiler_version[1]} makes kernels that this driver, for CUDA "
            f"{driver}.{driver_version[1]}, cannot load; update the driver to one for CUDA {compiler}, or install "
            f"cuda-bindings and nvidia-cuda-nvrtc of version {driver}.x, or uninstall NVRTC here and deploy the "
            f"kernels that `embforge gen` makes where NVRTC {driver}.x is installed"
        )


def cuda_core() -> Any:
    """The module cuda.core. `ToolchainError` names the extra if it is not installed."""
    return cuda_module("cuda.core")
