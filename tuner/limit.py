"""The machine's gather limit: how fast the rows of a batch can be read at all.

A contender like any other (`templates/cpu/gather_limit.cpp.j2`): it reads the very tables of the module under
test through torch's thread pool, and only XORs what it reads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from embforge.codegen import cache
from embforge.codegen.dtypes import DTYPES
from embforge.codegen.layout import layout_of
from embforge.codegen.machine import host_isa
from embforge.codegen.params import CpuParams
from embforge.codegen.plan import Plan
from embforge.codegen.render import render
from embforge.codegen.signature import METADATA_WORDS
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.targets.cpu import CPU
from embforge.launch.cpu import torch_parallel_for
from embforge.tuner.measure import measure
from embforge.tuner.workload import Batch

TEMPLATE = "cpu/gather_limit.cpp.j2"
DISTANCES = (0, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Bytes of rows requested ahead that the sweep tries, into the first and into the second cache."""
SERIAL_IDS = 20_000
"""Batches of more ids are not tried on one thread."""

Kernel = Callable[..., int]


@dataclass(frozen=True, eq=False)
class GatherLimit:
    """Reads a batch's rows. `run` returns the XOR of their 64-bit words (rows padded with zeros)."""

    kernel: Kernel
    metadata: Tensor
    tables: tuple[Tensor, ...]
    """Keeps alive what `metadata` points to."""
    ahead_bytes: int = 4096
    level: int = 2
    serial: bool = False
    """On the calling thread alone: a few rows are read sooner than another thread wakes up."""

    @property
    def name(self) -> str:
        return "limit"

    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor, int]:
        return torch.from_numpy(batch.values), torch.from_numpy(batch.offsets), batch.size

    def run(self, prepared: tuple[Tensor, Tensor, int]) -> int:
        values, offsets, size = prepared
        return self.kernel(
            self.metadata.data_ptr(),
            values.data_ptr(),
            offsets.data_ptr(),
            size,
            self.ahead_bytes,
            self.level,
            torch_parallel_for(),
            1 if self.serial else torch.get_num_threads(),
        )

    def best(self, batches: Sequence[Batch], seconds: float) -> GatherLimit:
        """The fastest on these batches of all prefetch distances and levels, and of one thread where ids are few."""
        tried = [
            _Tried(replace(self, ahead_bytes=distance, level=level, serial=serial))
            for distance in DISTANCES
            for level in (1, 2)
            for serial in (False, True)
            if (distance or level == 1) and not (serial and batches[0].values.size > SERIAL_IDS)
        ]
        times = measure(tried, batches, seconds=seconds)
        return min(tried, key=lambda t: times.median(t.name)).limit

    def __str__(self) -> str:
        prefetch = f"{self.ahead_bytes} bytes ahead into L{self.level}" if self.ahead_bytes else "no prefetch"
        return f"XOR of rows, {prefetch}" + (", one thread" if self.serial else "")


@dataclass(frozen=True, eq=False)
class _Tried:
    """A limit under a name of its own."""

    limit: GatherLimit

    @property
    def name(self) -> str:
        return str(self.limit)

    def prepare(self, batch: Batch) -> Any:
        return self.limit.prepare(batch)

    def run(self, prepared: Any) -> int:
        return self.limit.run(prepared)


def gather_limit(spec: CollectionSpec, tables: Sequence[Tensor], id_dtype: str = "int64") -> GatherLimit:
    """The limit of a spec over its tables (one a table of the spec, with the layout's row stride).

    Compiled as our kernels are: `ToolchainError` without a compiler.
    """
    layout = layout_of(spec)
    for placed, table in zip(layout.tables, tables, strict=True):
        if table.stride() != (placed.stride_elements, 1):
            raise ValueError(
                f"table {placed.table.name!r} has strides {table.stride()}, "
                f"its layout needs {(placed.stride_elements, 1)}"
            )
    metadata = torch.tensor([(t.data_ptr(), t.shape[0]) for t in tables], dtype=torch.int64)
    return GatherLimit(_kernel(spec, id_dtype), metadata, tuple(tables))


def source_of(spec: CollectionSpec, id_dtype: str = "int64") -> str:
    """The limit's source text for a spec."""
    layout = layout_of(spec)
    features = [
        {
            "name": placed.feature.name,
            "table": placed.table_index,
            "row_bytes": layout.tables[placed.table_index].row_bytes,
            "stride_bytes": layout.tables[placed.table_index].stride_bytes,
        }
        for placed in layout.features
    ]
    return render(
        TEMPLATE,
        {
            "name": spec.name or "collection",
            "features": features,
            "id_type": DTYPES[id_dtype].c_type,
            "metadata_words": len(METADATA_WORDS),
            "metadata_doc": ", ".join(METADATA_WORDS),
        },
    )


def _kernel(spec: CollectionSpec, id_dtype: str) -> Kernel:
    # The forward plan lends its compiler and flags: the limit gets the instruction set that the kernels get.
    plan = Plan("forward", "cpu", host_isa(), id_dtype, spec, CpuParams())
    source = source_of(spec, id_dtype)
    recipe = cache.Recipe(
        uri=plan.uri.replace("forward", "gather_limit", 1),
        key=cache.key_of({**CPU.fingerprint(plan), "source": source}),
        source=source,
        source_suffix=CPU.source_suffix,
        binary_suffix=CPU.binary_suffix,
        compile=lambda path: CPU.compile(plan, path),
    )
    entry, _ = cache.fetch(recipe)
    function = ctypes.CDLL(str(entry.binary)).gather_limit
    pointer, word = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = (pointer, pointer, pointer, word, word, word, pointer, word)
    function.restype = ctypes.c_uint64
    kernel: Kernel = function
    return kernel
