"""The compiler does not watch structures that a call returns into memory or takes from it: no kernel may do that."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from embforge.cli.common import load_spec
from embforge.codegen.build import source_of
from embforge.codegen.machine import cuda_headers, find_compiler
from embforge.codegen.params import CudaBackwardParams, CudaParams
from embforge.codegen.plan import Plan
from embforge.codegen.rules import builtin
from embforge.codegen.rules.rule import Rule, Update
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.codegen.targets.simt.image import image_source
from embforge.codegen.targets.simt.toolchain import IMAGE_FLAGS

HEADERS = Path(__file__).parents[2] / "templates" / "emulator"
CALL = re.compile(r"\s*(?:(?P<result>[^=]+) = )?(?P<function>[\w:<>, ]+) \((?P<arguments>.*)\);")
PROOF = """
struct Three { double x, y, z; };
__attribute__((noinline)) Three make(double x) { return {x, x, x}; }
__attribute__((noinline)) double sum(Three t) { return t.x + t.y + t.z; }
extern "C" __global__ void unwatched(Three* out) { out[threadIdx.x] = make(1.0); out[0].x = sum(out[1]); }
"""


def unwatched(text: str, directory: Path) -> list[str]:
    """Calls in a text that read or write memory unseen by the executor, as the compiler's dump has them."""
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


SPEC = CollectionSpec(
    (
        TableSpec("a", 100, 8),
        TableSpec("b", 100, 48, "bf16"),
        TableSpec("c", 100, 33, "fp8_e4m3"),
        TableSpec("d", 100, 16, "fp8_e5m2"),
    ),
    (
        FeatureSpec("x", "a", "mean", weighted=True),
        FeatureSpec("y", "b", "none"),
        FeatureSpec("z", "a", "max"),
        FeatureSpec("s", "b", "concat", hotness=4),
        FeatureSpec("e", "c"),
        FeatureSpec("n", "d"),
    ),
    name="seen",
)
"""A spec that reaches every part of the templates with few buckets; `make soak` has the example specs."""
OPS = [("forward", None), ("forward_train", None), ("backward", builtin.lamb()), ("reduce", None)]


@pytest.mark.parametrize(
    ("op", "rule"), [*OPS, ("weight_gradient", None)], ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_executor_sees_every_access(op: str, rule: Rule | None, tmp_path: Path) -> None:
    params = CudaParams() if op.startswith("forward") else CudaBackwardParams()
    update = None if rule is None else Update(rule)
    assert not unwatched(source_of(Plan(op, "cuda", "sm_90", "int64", SPEC, params, update)), tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("spec", ["dlrm", "mixed", "llm_vocab"])
@pytest.mark.parametrize("op", ["forward", "forward_train"])
def test_the_executor_sees_every_access_of_examples(op: str, spec: str, tmp_path: Path) -> None:
    assert not unwatched(source_of(Plan(op, "cuda", "sm_90", "int64", load_spec(spec), CudaParams())), tmp_path)


def test_an_access_that_the_compiler_does_not_watch_is_found(tmp_path: Path) -> None:
    assert unwatched(PROOF, tmp_path)
