"""From CUDA text to an image: kernels are found, lines are kept, and binaries depend on nothing but their inputs."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from embforge.cli.common import load_spec
from embforge.codegen.build import build, source_of
from embforge.codegen.errors import CompileError, ToolchainError
from embforge.codegen.machine import Compiler
from embforge.codegen.params import CudaParams
from embforge.codegen.plan import Plan
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.codegen.targets.simt import toolchain as simt
from embforge.codegen.targets.simt.image import KernelText, device_code, image_source, kernels_in
from embforge.launch.simt.abi import load_image

TEXT = """\
// __global__ void in_a_comment(int) {
/* namespace in_a_comment { */
constexpr int WIDTH = 8;
__global__ void plain(float* out) { if (out) { out[0] = 1; } }
namespace a { namespace b {
constexpr int THREADS = 64;
extern "C" __global__ void __launch_bounds__(THREADS * (1 + 1), 4) bound(int n, const char* s = "__global__ (") {}
template <int N> __global__ void of_a_template(float* out) {}
struct Pair { int x, y; };
}
__global__ __launch_bounds__(WIDTH < 9 ? 256 : 128) void
other(const float* const in) {}
}
extern "C" __global__ void last() {}
"""
PLAN = Plan(
    "forward", "simt", "sm_90", "int64", CollectionSpec([TableSpec("t", 10, 4)], [FeatureSpec("f", "t")]), CudaParams()
)


def test_kernels_are_found_with_namespace_and_launch_bounds() -> None:
    assert kernels_in(TEXT) == (
        KernelText("plain", "", "1024"),
        KernelText("bound", "a::b", "THREADS * (1 + 1)"),
        KernelText("other", "a", "WIDTH < 9 ? 256 : 128"),
        KernelText("last", "", "1024"),
    )


def test_an_image_lists_its_kernels_and_its_architecture(tmp_path: Path) -> None:
    path = tmp_path / "image.so"
    path.write_bytes(simt.compile_image(TEXT, "kernels.cu", "sm_86"))
    image = load_image(path)
    assert image.arch == "sm_86"
    assert {k.name: k.max_threads for k in image.kernels.values()} == {
        "plain": 1024,
        "bound": 128,
        "other": 256,
        "last": 1024,
    }
    assert image.kernels["bound"].argument_bytes == (4, 8)
    assert load_image(path) is image and load_image(tmp_path / "." / "image.so") is image


@pytest.mark.parametrize("spec", ["dlrm", "mixed", "llm_vocab"])
def test_every_line_keeps_its_file_and_number(spec: str) -> None:
    """Except lines of the primitives, which the executor replaces by its own."""
    plan = replace(PLAN, spec=load_spec(spec))
    text = source_of(plan)
    file, number, seen = "", 0, {}
    for line in image_source(text, "kernel.cu", "sm_90").split("\n"):
        if found := re.fullmatch(r'#line (\d+) "(.*)"', line):
            file, number = found[2], int(found[1])
            continue
        if file == "kernel.cu":
            seen[number] = line
        number += 1
    lines = text.split("\n")
    same = [n for n, line in seen.items() if n <= len(lines) and line == lines[n - 1]]
    (replaced,) = set(seen) - set(same)
    assert seen[replaced] == '#include "primitives.h"' and lines[replaced - 1].startswith("// ==== primitives")
    left_out = "\n".join(lines[n - 1] for n in range(1, len(lines) + 1) if n not in seen)
    assert "asm" in left_out and "asm" not in "\n".join(seen.values())


def test_text_is_that_of_cuda_and_code_leaves_out_what_is_not_run() -> None:
    twin = replace(PLAN, target="cuda")
    assert source_of(PLAN) == source_of(twin) and PLAN.symbol == twin.uri != PLAN.uri
    hinted = replace(PLAN, params=CudaParams(cache_hint="default"))
    assert source_of(hinted) != source_of(PLAN)
    codes = {device_code(source_of(p)).replace(p.symbol, "") for p in (PLAN, hinted)}
    assert len(codes) == 1
    assert len({*codes, device_code(source_of(replace(PLAN, params=CudaParams(block=128))))}) == 2
    assert device_code("int x;\n") == "int x;\n"


def test_a_compile_error_is_shown_at_its_line() -> None:
    with pytest.raises(CompileError) as error:
        simt.compile_image("// ==== primitives\nasm\n// ==== end of primitives\n\nint x = nonsense;\n", "wrong.cu")
    assert "wrong.cu:5:" in str(error.value) and ">     5 | int x = nonsense;" in str(error.value)


def test_images_do_not_depend_on_the_machine() -> None:
    image = simt.compile_image(TEXT, "kernels.cu")
    assert image == simt.compile_image(TEXT, "kernels.cu")
    for path in (Path(__file__).parents[3], Path.home(), shutil.which("g++"), "embforge-"):
        assert str(path).encode() not in image


def test_images_depend_on_the_executor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = simt.image_fingerprint("sm_90")
    copy = tmp_path / "simt"
    shutil.copytree(simt._simt_directory(), copy)
    monkeypatch.setattr(simt, "_simt_directory", lambda: copy)
    assert simt.image_fingerprint("sm_90") == before
    nested = next(path for path in copy.rglob("*") if path.is_file() and path.parent != copy)
    for path in (copy / "memory.h", copy / "runtime.cpp", nested):
        text = path.read_text()
        path.write_text(text + "// changed\n")
        assert simt.image_fingerprint("sm_90") != before
        path.write_text(text)
    assert simt.image_fingerprint("sm_80") != before


def test_the_executor_is_compiled_once(fresh_cache: Path) -> None:
    for plan in (PLAN, replace(PLAN, id_dtype="int32")):
        assert not build(plan).cached and build(plan).cached
    assert len(list((fresh_cache / "kernels" / "simt_runtime").glob("*/kernel.o"))) == 1


def test_without_a_compiler_or_headers_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "no-such-compiler")
        with pytest.raises(ToolchainError, match="no C\\+\\+ compiler: no-such-compiler"):
            simt.compile_image(TEXT, "kernels.cu")
    with monkeypatch.context() as patch:
        patch.setattr("embforge.codegen.machine.HEADER_PACKAGES", ("nvidia-no-such-headers",))
        with pytest.raises(ToolchainError, match=r"none of nvidia-no-such-headers.*pip install 'embforge\[cuda\]'"):
            simt.compile_image(TEXT, "kernels.cu")
    for version, refused in (
        ("g++ (Ubuntu 9.4.0-1ubuntu1~20.04.2) 9.4.0", True),
        ("g++ (GCC) 10.2.1 20210130 (Red Hat 10.2.1-11)", True),
        ("g++ (GCC) 11.4.1 20230605 (Red Hat 11.4.1-2)", False),
        ("g++ (Debian 12.2.0-14) 12.2.0", False),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(simt, "find_compiler", lambda version=version: Compiler("g++", version, ("g++",)))
            if not refused:
                assert simt._compiler().version == version
                continue
            with pytest.raises(ToolchainError, match=r"needs g\+\+ 11 or newer, and found " + re.escape(version)):
                simt.compile_image(TEXT, "kernels.cu")
    with monkeypatch.context() as patch:
        patch.setattr(simt, "SYSTEMS", ("elsewhere",))
        with pytest.raises(ToolchainError, match="runs on Linux on x86_64 and aarch64 with g\\+\\+"):
            simt.compile_image(TEXT, "kernels.cu")
