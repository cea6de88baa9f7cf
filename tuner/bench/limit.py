"""The machine's limits: how fast the rows of a batch can be moved at all. What limits share, and the gather limit.

A limit is timed like the other contenders. It is a loop that does as little as possible, compiled as our kernels are,
over the tables of the module under test, on torch's thread pool. `templates/cpu/limits/gather_limit.cpp.j2` reads the
rows that a lookup reads and only XORs them; the update limit of a training step is in `tuner/bench/update_limit.py`.
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
"""Prefetch distances that the sweep tries, in bytes of rows; each into the first and into the second cache level."""
SERIAL_IDS = 20_000
"""Batches with more ids than this are not tried on one thread."""

Kernel = Callable[..., int]


class Work(NamedTuple):
    """A batch as a limit's kernel takes it: two arrays and a number, whose meaning is the kernel's."""

    first: Tensor
    second: Tensor
    number: int


@dataclass(frozen=True, eq=False)
class Limit:
    """A contender that only reads or changes the rows of a batch. `run` returns what its kernel returns."""

    name: str
    what: str
    """What is done with the rows, for people."""
    kernel: Kernel
    metadata: Tensor
    tables: tuple[Tensor, ...]
    """The tables that `metadata` points to, kept alive."""
    prepare: Callable[[Batch], Work]
    ahead_bytes: int = 4096
    level: int = 2
    serial: bool = False
    """Whether only the calling thread works: a few rows are read sooner than another thread wakes up."""

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
        """The fastest variant on these batches: all prefetch distances and levels, and one thread if ids are few."""
        variants = [
            replace(self, ahead_bytes=distance, level=level, serial=serial)
            for distance in DISTANCES
            for level in (1, 2)
            for serial in (False, True)
            if (distance or level == 1) and not (serial and batches[0].values.size > SERIAL_IDS)
        ]
        times = measure([replace(limit, name=limit.note) for limit in variants], batches, seconds=seconds)
        return min(variants, key=lambda limit: times.median(limit.note))

    @property
    def note(self) -> str:
        """What is done with the rows, how far ahead they are prefetched, and whether by one thread."""
        prefetch = f"{self.ahead_bytes} bytes ahead into L{self.level}" if self.ahead_bytes else "no prefetch"
        return f"{self.what}, {prefetch}" + (", one thread" if self.serial else "")


def gather_limit(spec: CollectionSpec, tables: Sequence[Tensor], id_dtype: str = "int64", name: str = "limit") -> Limit:
    """The limit of a lookup; `run` returns the XOR of the rows' 64-bit words (rows padded with zeros).

    `tables` has one tensor per table of the spec, with the layout's row stride. `ToolchainError` without a compiler.
    """
    kernel = compiled(spec, "gather_limit", source_of(spec, id_dtype), id_dtype)
    return Limit(name, "XOR of rows", kernel, metadata_of(spec, tables), tuple(tables), _gather_work)


def source_of(spec: CollectionSpec, id_dtype: str = "int64") -> str:
    """The gather limit's source text for a spec."""
    layout = layout_of(spec)
    features = [
        {
            "name": feature.feature.name,
            "table": feature.table_index,
            "row_bytes": layout.tables[feature.table_index].row_bytes,
            "stride_bytes": layout.tables[feature.table_index].stride_bytes,
        }
        for feature in layout.features
    ]
    facts = {"features": features, "id_type": DTYPES[id_dtype].c_type}
    return render(TEMPLATE, {**common_facts(spec), **facts})


def common_facts(spec: CollectionSpec) -> dict[str, Any]:
    """The facts that the templates of all limits take."""
    return {
        "name": spec.name or "collection",
        "records": records_of(arguments_of("cpu", "forward")),
        "metadata_doc": ", ".join(METADATA_WORDS),
    }


def metadata_of(spec: CollectionSpec, tables: Sequence[Tensor]) -> Tensor:
    """Each table's address and number of rows. `ValueError` for a table whose strides are not those of its layout."""
    for layout, table in zip(layout_of(spec).tables, tables, strict=True):
        if table.stride() != (layout.stride_elements, 1):
            raise ValueError(
                f"table {layout.table.name!r} has strides {table.stride()}, "
                f"its layout needs {(layout.stride_elements, 1)}; pass the weight of a module of this spec"
            )
    return torch.tensor([(t.data_ptr(), t.shape[0]) for t in tables], dtype=torch.int64)


def compiled(spec: CollectionSpec, symbol: str, source: str, id_dtype: str = "int64") -> Kernel:
    """The function `symbol` of a limit's source, from the cache if it was compiled before."""
    # Compiled as a forward kernel is: with the same compiler, flags and instruction set.
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


def _gather_work(batch: Batch) -> Work:
    return Work(torch.from_numpy(batch.values), torch.from_numpy(batch.offsets), batch.size)
