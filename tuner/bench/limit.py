"""How fast the machine can move the rows of a batch at all: one frame for every such limit, and the gather limit.

A limit is a contender like any other: a bare loop, compiled as our kernels are, over the very tables of the module
under test, on torch's thread pool. `templates/cpu/limits/gather_limit.cpp.j2` reads the rows that a lookup reads and
only XORs them; the update limit of a training step is in `tuner/bench/update_limit.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embforge.codegen import cache
from embforge.codegen.dtypes import DTYPES
from embforge.codegen.kernel import METADATA_WORDS, arguments_of, records_of
from embforge.codegen.layout import layout_of
from embforge.codegen.machine import host_isa
from embforge.codegen.params import CpuParams
from embforge.codegen.plan import Plan
from embforge.codegen.render import render
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.target import target_named
from embforge.codegen.targets.cpu.toolchain import CPU
from embforge.launch.cpu.forward import torch_parallel_for
from embforge.tuner.measure.paired import measure
from embforge.tuner.workload.workload import Batch

TEMPLATE = "cpu/limits/gather_limit.cpp.j2"
DISTANCES = (0, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Bytes of rows requested ahead that the sweep tries, into the first and into the second cache."""
SERIAL_IDS = 20_000
"""Batches of more ids are not tried on one thread."""

Kernel = Callable[..., int]


class Work(NamedTuple):
    """A batch as a limit's kernel takes it: two arrays and a number."""

    first: Tensor
    second: Tensor
    number: int


@dataclass(frozen=True, eq=False)
class Limit:
    """Touches a batch's rows in a bare loop. `run` returns what its kernel returns."""

    name: str
    what: str
    """What is done to the rows."""
    kernel: Kernel
    metadata: Tensor
    tables: tuple[Tensor, ...]
    """Keeps alive what `metadata` points to."""
    prepare: Callable[[Batch], Work]
    ahead_bytes: int = 4096
    level: int = 2
    serial: bool = False
    """On the calling thread alone: a few rows are read sooner than another thread wakes up."""

    def run(self, work: Work) -> int:
        return self.kernel(
            self.metadata.data_ptr(),
            work.first.data_ptr(),
            work.second.data_ptr(),
            work.number,
            self.ahead_bytes,
            self.level,
            torch_parallel_for(),
            1 if self.serial else torch.get_num_threads(),
        )

    def best(self, batches: Sequence[Batch], seconds: float) -> Limit:
        """The fastest on these batches of all prefetch distances and levels, and of one thread where ids are few."""
        tried = [
            replace(self, ahead_bytes=distance, level=level, serial=serial)
            for distance in DISTANCES
            for level in (1, 2)
            for serial in (False, True)
            if (distance or level == 1) and not (serial and batches[0].values.size > SERIAL_IDS)
        ]
        times = measure([replace(limit, name=limit.note) for limit in tried], batches, seconds=seconds)
        return min(tried, key=lambda limit: times.median(limit.note))

    @property
    def note(self) -> str:
        """What is done to the rows, and how."""
        prefetch = f"{self.ahead_bytes} bytes ahead into L{self.level}" if self.ahead_bytes else "no prefetch"
        return f"{self.what}, {prefetch}" + (", one thread" if self.serial else "")


def gather_limit(spec: CollectionSpec, tables: Sequence[Tensor], id_dtype: str = "int64", name: str = "limit") -> Limit:
    """The limit of a lookup; `run` returns the XOR of the rows' 64-bit words (rows padded with zeros).

    `tables`: one a table of the spec, with the layout's row stride. `ToolchainError` without a compiler.
    """
    kernel = compiled(spec, "gather_limit", source_of(spec, id_dtype), id_dtype)
    return Limit(name, "XOR of rows", kernel, metadata_of(spec, tables), tuple(tables), _bags)


def source_of(spec: CollectionSpec, id_dtype: str = "int64") -> str:
    """The gather limit's source text for a spec."""
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
    facts = {"features": features, "id_type": DTYPES[id_dtype].c_type}
    return render(TEMPLATE, {**common_facts(spec), **facts})


def common_facts(spec: CollectionSpec) -> dict[str, Any]:
    """What the template of any limit is told."""
    return {
        "name": spec.name or "collection",
        "records": records_of(arguments_of("cpu", "forward")),
        "metadata_doc": ", ".join(METADATA_WORDS),
    }


def metadata_of(spec: CollectionSpec, tables: Sequence[Tensor]) -> Tensor:
    """Where the tables lie. `ValueError` for one that is not laid out as the spec's kernels expect."""
    for placed, table in zip(layout_of(spec).tables, tables, strict=True):
        if table.stride() != (placed.stride_elements, 1):
            raise ValueError(
                f"table {placed.table.name!r} has strides {table.stride()}, "
                f"its layout needs {(placed.stride_elements, 1)}"
            )
    return torch.tensor([(t.data_ptr(), t.shape[0]) for t in tables], dtype=torch.int64)


def compiled(spec: CollectionSpec, symbol: str, source: str, id_dtype: str = "int64") -> Kernel:
    """The function `symbol` of a limit's source, from the cache if it was compiled before."""
    # The forward plan lends its compiler and flags: the limit gets the instruction set that the kernels get.
    plan = Plan("forward", "cpu", host_isa(), id_dtype, spec, CpuParams())
    target = target_named(plan.target)
    recipe = cache.Recipe(
        uri=plan.uri.replace("forward", symbol, 1),
        key=cache.key_of({**CPU.fingerprint(plan), "source": source}),
        source=source,
        source_suffix=target.source_suffix,
        binary_suffix=target.binary_suffix,
        compile=lambda path: CPU.compile(plan, path),
    )
    entry, _ = cache.fetch(recipe)
    function = ctypes.CDLL(str(entry.binary))[symbol]
    pointer, word = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = (pointer, pointer, pointer, word, word, word, pointer, word)
    function.restype = ctypes.c_uint64
    kernel: Kernel = function
    return kernel


def _bags(batch: Batch) -> Work:
    return Work(torch.from_numpy(batch.values), torch.from_numpy(batch.offsets), batch.size)
