"""Bugs put into generated kernels: each is reported as the kind of bug that it is, with its block, thread and line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from embforge.codegen.build import source_of
from embforge.codegen.errors import KernelBugError
from embforge.codegen.params import CudaParams
from embforge.codegen.plan import Plan
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.codegen.targets.cuda.arch import DEFAULT_ARCH
from embforge.codegen.targets.simt.toolchain import compile_image, twin_of
from embforge.inputs import Batch
from embforge.launch.metadata import metadata_of
from embforge.launch.reference import forward as reference
from embforge.launch.simt.forward import SimtForward
from embforge.verify.cases import draw_tables

SPEC = CollectionSpec(
    (TableSpec("a", 40, 16), TableSpec("b", 30, 33, "bf16")),
    (
        FeatureSpec("x", "a"),
        FeatureSpec("y", "b", "mean", weighted=True),
        FeatureSpec("z", "a", "none"),
        FeatureSpec("m", "a", "max"),
    ),
    name="seeded",
)
PLAN = Plan("forward", "simt", DEFAULT_ARCH, "int64", SPEC, CudaParams(long_bag=256))
BATCH = 70


@dataclass(frozen=True)
class Seeded:
    """A bug: the text `sound` is replaced by `buggy`, and the error must match `says`."""

    name: str
    sound: str
    buggy: str
    says: str


BUGS = (
    Seeded(
        "missing barrier",
        "        __syncthreads();\n\n#pragma unroll 1\n        for (int k = 0; k < window;",
        "\n\n#pragma unroll 1\n        for (int k = 0; k < window;",
        r"race: .*shared variable",
    ),
    Seeded(
        "missing barrier in the kernel of long bags",
        "            __syncthreads();\n            if (group < chunks && vector < shape.vectors) {",
        "\n            if (group < chunks && vector < shape.vectors) {",
        r"race: .*dynamic shared memory",
    ),
    Seeded(
        "off-by-one row",
        "column + static_cast<int64_t>(number) * stride",
        "column + static_cast<int64_t>(number + 1) * stride",
        r"out-of-bounds: reads .* past the end of `table [ab]`",
    ),
    Seeded(
        "misaligned load",
        "stage.source.rows + vector * B::VECTOR;",
        "stage.source.rows + vector * B::VECTOR + 2;",
        r"misaligned: reads (16|4) bytes at `table [ab]`",
    ),
    Seeded(
        "racing store",
        "out_t* const out = stage.out + index * OUTPUT_WIDTH;",
        "out_t* const out = stage.out;",
        r"race: writes .* at `pooled`",
    ),
    Seeded(
        "lost tail element",
        "if (B::WHOLE || column + e < B::DIM) {",
        "if (B::WHOLE || column + e < B::DIM - 1) {",
        r"unwritten: .*feature 'y'.* column 32",
    ),
    Seeded(
        "uninitialised shared memory",
        "        stage.bags = bags;\n",
        "\n",
        r"uninitialised: reads 4 bytes at the shared variable",
    ),
    Seeded(
        "barrier that one thread does not reach",
        "f.index * a.batch + first + i);\n    __syncthreads();",
        "f.index * a.batch + first + i);\n    if (threadIdx.x != 3) __syncthreads();",
        r"(divergent-barrier|race): ",
    ),
    Seeded(
        "result in a read-only argument",
        "a.pooled + first * OUTPUT_WIDTH + f.column",
        "reinterpret_cast<out_t*>(const_cast<id_t*>(a.values))",
        r"read-only: writes .* `values`",
    ),
    Seeded(
        "scratch of the wrong unit",
        "a.scratch + bag.first_unit * SCRATCH_WIDTH",
        "a.scratch + (bag.first_unit + 1) * SCRATCH_WIDTH",
        r"(uninitialised|out-of-bounds): reads .*`scratch`",
    ),
)


def forward(text: str, directory: Path) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compiles the text and calls its kernels. Ids include every table's last row, and one bag is long."""
    image = directory / "image.so"
    image.write_bytes(compile_image(text, f"{twin_of(PLAN).uri}.cu", PLAN.arch))
    tables = draw_tables(SPEC, seed=0)
    batch = drawn()
    rows = int(batch.offsets[3 * BATCH] - batch.offsets[2 * BATCH])
    kernel = SimtForward(PLAN, image)
    return kernel(metadata_of(tables, "error"), tables, batch, rows * 16, "error")


def drawn() -> Batch:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 12, (4 * BATCH,), generator=generator)
    lengths[5] = 5000
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    values = torch.randint(0, 30, (int(offsets[-1]),), generator=generator)
    values[:8] = 39
    values[offsets[BATCH] : offsets[BATCH] + 8] = 29
    return Batch(values, offsets, torch.rand(values.numel(), generator=generator), BATCH, None)


def test_without_a_bug_nothing_is_found(tmp_path: Path) -> None:
    pooled, sequence = forward(source_of(PLAN), tmp_path)
    batch = drawn()
    expected = reference.lookup(
        SPEC, batch.values, batch.offsets, batch.weights, draw_tables(SPEC, seed=0), bounds_check="error"
    )
    assert torch.equal(pooled, expected[0])
    assert sequence is not None and torch.equal(sequence, expected[1])


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_seeded_bug_is_caught(bug: Seeded, tmp_path: Path) -> None:
    text = source_of(PLAN)
    assert bug.sound in text, "the kernels changed: update the text of this bug"
    with pytest.raises(KernelBugError) as caught:
        forward(text.replace(bug.sound, bug.buggy), tmp_path)
    message = str(caught.value)
    assert re.search(bug.says, message), message
    if "unwritten" not in message:
        assert re.search(r"block \d+, thread \d+, \w+\.cu:\d+ in \w+", message), message
