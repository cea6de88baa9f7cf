"""The compiler does not watch structures that a call returns into memory or takes from it: no kernel may do that."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from embforge.codegen.build import source_of
from embforge.codegen.cli.common import load_spec
from embforge.codegen.machine import cuda_headers, find_compiler
from embforge.codegen.params import CudaParams
from embforge.codegen.plan import Plan
from embforge.codegen.targets.simt import IMAGE_FLAGS
from embforge.codegen.targets.simt_image import image_source

HEADERS = Path(__file__).parents[2] / "templates" / "simt"
CALL = re.compile(r"\s*(?:(?P<result>[^=]+) = )?(?P<function>[\w:<>, ]+) \((?P<arguments>.*)\);")
PROOF = """
struct Three { double x, y, z; };
__attribute__((noinline)) Three make(double x) { return {x, x, x}; }
__attribute__((noinline)) double sum(Three t) { return t.x + t.y + t.z; }
extern "C" __global__ void unwatched(Three* out) { out[threadIdx.x] = make(1.0); out[0].x = sum(out[1]); }
"""


def unwatched(text: str, directory: Path) -> list[str]:
    """Calls of a text that read or write memory behind the executor's back, as the compiler writes them down."""
    (directory / "image.cpp").write_text(image_source(text, "kernel.cu", "sm_90"))
    paths = [f"-I{HEADERS}", f"-isystem{cuda_headers()}"]
    command = [*find_compiler().command, *IMAGE_FLAGS, *paths, "-fdump-tree-tsan", "-c", "image.cpp", "-o", "image.o"]
    subprocess.run(command, cwd=directory, check=True)
    (dump,) = directory.glob("*.tsan*")
    found = []
    for line in dump.read_text().splitlines():
        call = CALL.match(line)
        if call is None or "__tsan" in line or "__sanitizer" in line:
            continue
        returned = re.match(r"\s*(\*|MEM|.*->|.*\[)", call["result"] or "")
        taken = re.search(r"(^|, )(\*|MEM)", call["arguments"])
        if returned or taken:
            found.append(line.strip())
    return found


@pytest.mark.parametrize("spec", ["dlrm", "mixed", "llm_vocab"])
def test_the_executor_sees_every_access(spec: str, tmp_path: Path) -> None:
    assert not unwatched(source_of(Plan("forward", "cuda", "sm_90", "int64", load_spec(spec), CudaParams())), tmp_path)


def test_this_test_can_fail(tmp_path: Path) -> None:
    assert unwatched(PROOF, tmp_path)
