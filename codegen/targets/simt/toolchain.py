"""The SIMT target: the text that NVRTC compiles for a GPU, compiled by the host's C++ compiler and run on its CPU.

A binary, called an image, is a shared library with the interface of `templates/emulator/abi.h`: the kernels, and the
executor that gives them CUDA's execution model and checks what they do. The executor is the same in all images; it is
compiled once and kept in the cache.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

from embforge.codegen import cache
from embforge.codegen.errors import CompileError, ToolchainError
from embforge.codegen.kernel import KernelPlan
from embforge.codegen.machine import HEADER_PACKAGES, Compiler, cuda_headers, find_compiler, package_version
from embforge.codegen.target import target_named
from embforge.codegen.targets import Toolchain
from embforge.codegen.targets.compiler_log import numbered_log
from embforge.codegen.targets.cuda.arch import DEFAULT_ARCH
from embforge.codegen.targets.cuda.toolchain import CUDA
from embforge.codegen.targets.simt.image import image_source

P = TypeVar("P", bound=KernelPlan)

SYSTEMS = ("linux",)
PROCESSORS = ("x86_64", "aarch64")
"""The processors for which the executor has fibres."""
OLDEST_GCC = 11
"""The first version that distinguishes volatile accesses from others (tsan-distinguish-volatile)."""

COMMON = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-strict-aliasing")
RUNTIME_FLAGS = (*COMMON, "-O2")
IMAGE_FLAGS = (
    *COMMON,
    "-O1",
    "-g1",
    # Every access to memory and every basic block calls a function of the executor, not of the sanitizer's library.
    "-fsanitize=thread",
    "-fsanitize-coverage=trace-pc",
    "-fsanitize=bounds,alignment,integer-divide-by-zero",
    "-fno-threadsafe-statics",
    "-fstack-clash-protection",
    "--param",
    "tsan-distinguish-volatile=1",
    # Keep basic blocks in the order of the source: lanes of a warp that took different branches meet again where the
    # branches of the source end.
    "-fno-reorder-blocks",
    "-fno-reorder-blocks-and-partition",
    "-fno-crossjumping",
    "-fno-guess-branch-probability",
    "-fno-tree-ch",
    "-fno-thread-jumps",
    "-fno-tree-dominator-opts",
    # Keep shared variables in the order of the source, each after the gap that marks its begin.
    "-fno-toplevel-reorder",
)
LINK_FLAGS = ("-shared", "-Wl,-z,defs", "-Wl,--build-id=none")


def twin_of(plan: P) -> P:
    """The plan that a plan emulates: it runs the twin's text with the twin's symbols, grids and buffers."""
    return plan.on(target_named(plan.target).text_of)


def compile_image(text: str, name: str, arch: str = DEFAULT_ARCH) -> bytes:
    """The image of any CUDA text.

    `name`: the name of the file that messages about its lines give. `arch`: the architecture that the image reports.
    `CompileError` shows the compiler's log and numbered lines. `ToolchainError`: there is no compiler, there are no
    CUDA headers, or the executor does not run on this machine.
    """
    compiler = _compiler()
    runtime = _runtime(compiler)
    with _workplace() as directory:
        # The file has the name that its lines are said to come from, because addr2line confuses different names.
        (directory / name).write_text(image_source(text, name, arch), encoding="utf-8")
        flags = [*IMAGE_FLAGS, *_paths(directory)]
        _run(compiler, [*flags, "-x", "c++", "-c", name, "-o", "image.o"], directory, text, name)
        _run(compiler, ["image.o", str(runtime), *LINK_FLAGS, "-o", "image.so"], directory, text, name)
        return (directory / "image.so").read_bytes()


def image_fingerprint(arch: str) -> dict[str, str]:
    """Labelled facts that decide an image in addition to its text."""
    compiler = _compiler()
    flags = [*compiler.command[1:], *IMAGE_FLAGS, *LINK_FLAGS]
    return {"arch": arch, "flags": " ".join(flags), **_runtime_fields(compiler)}


def _compiler() -> Compiler:
    if sys.platform not in SYSTEMS or platform.machine() not in PROCESSORS:
        raise ToolchainError(
            f"target simt runs on Linux on {' and '.join(PROCESSORS)} with g++, not on {sys.platform} on "
            f"{platform.machine()}; use target cpu, or `embforge gen` to compile for GPUs"
        )
    compiler = find_compiler()
    if "clang" in compiler.version:
        raise ToolchainError(
            f"target simt needs g++, whose checks it is built on, and found {compiler.version}; install g++, or set "
            "CXX=g++ if it is installed"
        )
    number = re.search(r"\)\s+(\d+)\.", compiler.version)  # g++ (vendor) 12.2.0
    if number and int(number[1]) < OLDEST_GCC:
        raise ToolchainError(
            f"target simt needs g++ {OLDEST_GCC} or newer, and found {compiler.version}; install a newer one, or set "
            "CXX to one that is installed"
        )
    return compiler


@contextmanager
def _workplace() -> Iterator[Path]:
    """A directory to compile in, with links to the headers, so that no path of this machine gets into a binary."""
    with tempfile.TemporaryDirectory(prefix="embforge-") as scratch:
        directory = Path(scratch)
        (directory / "simt").symlink_to(_simt_directory().absolute())
        (directory / "cuda").symlink_to(cuda_headers().absolute())
        yield directory


def _paths(hidden: Path) -> list[str]:
    return ["-Isimt", "-isystemcuda", f"-ffile-prefix-map={hidden}=."]


def _runtime(compiler: Compiler) -> Path:
    """The executor's object file, from the cache."""

    def compile_runtime(source: Path) -> bytes:
        with _workplace() as directory:
            words = [*RUNTIME_FLAGS, *_paths(source.parent), "-c", str(source), "-o", "runtime.o"]
            _run(compiler, words, directory, source.read_text(encoding="utf-8"), source.name)
            return (directory / "runtime.o").read_bytes()

    recipe = cache.Recipe(
        uri="simt_runtime",
        key=cache.key_of(_runtime_fields(compiler)),
        source=(_simt_directory() / "runtime.cpp").read_text(encoding="utf-8"),
        source_suffix=".cpp",
        binary_suffix=".o",
        compile=compile_runtime,
    )
    return cache.fetch(recipe)[0].binary


def _runtime_fields(compiler: Compiler) -> dict[str, str]:
    directory = _simt_directory()
    sources = {str(p.relative_to(directory)): p.read_text("utf-8") for p in directory.rglob("*") if p.is_file()}
    return {
        "compiler": compiler.version,
        "machine": platform.machine(),
        "runtime_flags": " ".join([*compiler.command[1:], *RUNTIME_FLAGS]),
        "headers": next(filter(None, map(package_version, HEADER_PACKAGES)), ""),
        "executor": cache.key_of(sources),
    }


def _simt_directory() -> Path:
    return Path(str(files("embforge.templates") / "emulator"))


def _run(compiler: Compiler, words: list[str], directory: Path, text: str, name: str) -> None:
    command = [*compiler.command, *words]
    answer = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise CompileError(
            f"{compiler.version} could not make a SIMT image of {name}\ncommand: {' '.join(command)}\n"
            + numbered_log(answer.stderr, text, name)
        )


def _compile(plan: KernelPlan, source: Path) -> bytes:
    return compile_image(source.read_text(encoding="utf-8"), f"{twin_of(plan).uri}.cu", plan.arch)


def _fingerprint(plan: KernelPlan) -> dict[str, str]:
    return image_fingerprint(plan.arch)


SIMT = Toolchain(
    sources={op: source.of_twin("cuda") for op, source in CUDA.sources.items()},
    compile=_compile,
    fingerprint=_fingerprint,
    resources=lambda plan, binary: [],
)
