"""Runs and counts the mapping "one warp per bag, sized by the widest table" in the SIMT executor."""

from __future__ import annotations

import ctypes
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from embforge.codegen.layout import largest_power_of_two
from embforge.codegen.plan import Plan
from embforge.codegen.render import render
from embforge.codegen.targets.cuda.arch import DEFAULT_ARCH, WARP, arch_named
from embforge.codegen.targets.cuda.formats import format_facts
from embforge.codegen.targets.simt.toolchain import compile_image
from embforge.inputs import Batch
from embforge.launch.simt.abi import DONE, Image, Region
from embforge.launch.simt.counters import KernelCounters
from embforge.launch.simt.forward import kernel_counters, table_region

KERNEL = "warp_per_bag"
BLOCK = 256
LOADS = (16, 8, 4, 2, 1)
"""The sizes of loads in bytes that the alignment of rows may allow."""


def warp_per_bag_text() -> str:
    """The kernel's CUDA source, after the primitives that embforge's own kernels use."""
    facts = {"load_hint": "", "load_bytes": LOADS, **format_facts((), arch_named(DEFAULT_ARCH))}
    primitives = render("cuda/common/primitives.cu.j2", facts)
    return primitives + "\n" + (Path(__file__).parent / "warp_per_bag.cu").read_text("utf-8")


def count_warp_per_bag(plan: Plan, tables: Sequence[Tensor], batch: Batch) -> KernelCounters:
    """The kernel's counters for a batch."""
    layouts = plan.layout.tables
    vectors = [largest_power_of_two(layout.stride_bytes, LOADS[0]) for layout in layouts]
    facts = torch.tensor(
        [
            (tables[i].data_ptr(), layouts[i].row_bytes, layouts[i].stride_bytes, vectors[i])
            for i in (f.table_index for f in plan.layout.features)
        ],
        dtype=torch.int64,
    )
    bags = len(plan.layout.features) * batch.batch
    widest = max(math.ceil(layout.row_bytes / vector) for layout, vector in zip(layouts, vectors, strict=True))
    out = torch.empty(bags, dtype=torch.int32)
    tensors = {"metadata": facts, "values": batch.values, "offsets": batch.offsets, "pooled": out}
    regions = [
        *(table_region(layout.table.name, rows) for layout, rows in zip(layouts, tables, strict=True)),
        *(Region(name, t.data_ptr(), t.nbytes, writable=name == "pooled") for name, t in tensors.items()),
    ]
    numbers = (batch.batch, bags, math.ceil(widest / WARP))
    arguments = [ctypes.c_int64(word) for word in (*(t.data_ptr() for t in tensors.values()), *numbers)]
    with tempfile.TemporaryDirectory(prefix="embforge-") as scratch:
        path = Path(scratch) / "image.so"
        path.write_bytes(compile_image(warp_per_bag_text(), f"{KERNEL}.cu"))
        image = Image(path)
    grid = math.ceil(bags * WARP / BLOCK)
    status, report, counts = image.launch(KERNEL, (grid, 1, 1), (BLOCK, 1, 1), arguments, regions, count=True)
    if status != DONE or counts is None:
        raise AssertionError(report.message.decode())
    return kernel_counters(KERNEL, regions, counts)
