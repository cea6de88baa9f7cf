"""Batches that look for trouble, each with the reference's answer, and a kernel's answer to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from embforge.arguments import sequence_elements
from embforge.codegen.layout import CollectionLayout
from embforge.codegen.plan import Plan
from embforge.codegen.spec import CollectionSpec, TableSpec
from embforge.inputs import Batch
from embforge.launch.kernels import Kernel
from embforge.launch.metadata import Metadata, metadata_of
from embforge.launch.reference import forward as reference
from embforge.verify.cases import Case, Drawn, draw_batch, draw_tables

Progress = Callable[[str, int, int], None]
"""Told what is being done, how many steps of it are done, and of how many."""
Result = tuple[Tensor, Tensor]
"""Pooled `[B, output_width]`, and the flat sequence."""

SMALL_ROWS = 1000
"""Rows of the tables that hold special numbers. A kernel learns a table's size when it is called."""

FEW_FOR_ALL = (
    Case(9, bad_ids=True, id_dtype="int32", weights="special"),
    Case(70, "one", ids="zipf"),
    Case(6, "edges"),
    Case(3, "split", ids="zipf"),
)
FEW_FOR_ONE = (
    Case(0, "none"),
    Case(40, "none"),
    Case(1),
    Case(70, ids="zipf"),
    Case(300, "one", weights="absent"),
    Case(20, ids="same"),
    Case(20, bad_ids=True),
)
FEW_SPECIAL = (Case(9, "edges"),)
"""Small batches: for every plan, beside them for one plan, and for tables that hold special numbers."""


@dataclass(frozen=True)
class Probe:
    """A batch, the tables it is looked up in, and what the reference makes of it."""

    case: Case
    special: bool
    drawn: Drawn
    tables: tuple[Tensor, ...]
    expected: Result
    for_all: bool = True
    """Whether every plan is asked, or the default one only."""

    def __str__(self) -> str:
        return str(self.case) + (", special numbers" if self.special else "")

    def fits(self, id_dtype: str) -> bool:
        """Whether its ids can be said in that dtype: bad int64 ids need int64."""
        return id_dtype == "int64" or self.case.id_dtype == "int32" or not self.case.bad_ids


def probes_of(
    spec: CollectionSpec, batch_sizes: Sequence[int], seed: int, device: torch.device, tell: Progress
) -> list[Probe]:
    """Batches of the given sizes for a backend as fast as a CPU or a GPU."""
    largest = max(batch_sizes)
    usual = [
        Case(0, "none"),
        Case(largest, "none"),
        *(Case(size, ids="zipf" if index % 2 else "uniform") for index, size in enumerate(batch_sizes)),
        Case(largest, "one", weights="absent"),
        Case(min(largest, 48), "edges", weights="special"),
        Case(min(largest, 8), "long"),
        Case(min(largest, 64), ids="same"),
        Case(largest, bad_ids=True, id_dtype="int32"),
        Case(min(largest, 64), bad_ids=True),
    ]
    on_special = [
        Case(min(largest, 64)),
        Case(min(largest, 16), "edges", weights="special", bad_ids=True, id_dtype="int32"),
    ]
    return _draw([(spec, False, usual), (shrunk(spec), True, on_special)], seed, device, tell)


def few_probes_of(spec: CollectionSpec, seed: int, tell: Progress) -> list[Probe]:
    """Small batches and tables, for a backend that executes thread by thread: few for all plans, more for one."""
    small = shrunk(spec)
    ordinary = _draw([(small, False, FEW_FOR_ALL + FEW_FOR_ONE), (small, True, FEW_SPECIAL)], seed, CPU, tell)
    return [replace(probe, for_all=index < len(FEW_FOR_ALL)) for index, probe in enumerate(ordinary)]


CPU = torch.device("cpu")


def _draw(
    parts: Sequence[tuple[CollectionSpec, bool, Sequence[Case]]], seed: int, device: torch.device, tell: Progress
) -> list[Probe]:
    """The probes of all cases: each part has its spec, whether its tables hold special numbers, and its cases."""
    probes: list[Probe] = []
    count = sum(len(cases) for _, _, cases in parts)
    for number, (spec, special, cases) in enumerate(parts):
        tell("drawing tables", number, len(parts))
        tables = draw_tables(spec, seed, special, device)
        for case in cases:
            tell("asking the reference", len(probes), count)
            drawn = draw_batch(spec, case, seed + len(probes), device)
            expected = reference.lookup(spec, *drawn, tables, bounds_check="zero" if case.bad_ids else "error")
            probes.append(Probe(case, special, drawn, tables, expected))
    return probes


def call_of(plan: Plan, probe: Probe) -> tuple[Metadata, tuple[Tensor, ...], Batch, int, str]:
    """The arguments by which a probe is put to a plan's kernel."""
    dtype = getattr(torch, plan.id_dtype)
    values, offsets, weights = probe.drawn
    batch = Batch(values.to(dtype), offsets.to(dtype), weights, probe.case.batch, None)
    bounds_check = "zero" if probe.case.bad_ids else "error"
    elements = sequence_elements(plan.layout, _sequence_rows(plan.layout, batch))
    return metadata_of(probe.tables, bounds_check), probe.tables, batch, elements, bounds_check


def run(kernel: Kernel, probe: Probe) -> Result:
    """The kernel's answer to a probe."""
    return whole(*kernel(*call_of(kernel.plan, probe)))


def whole(pooled: Tensor, sequence: Tensor | None) -> Result:
    """A kernel's answer with an empty sequence where there is none."""
    return pooled, pooled.new_empty(0) if sequence is None else sequence


def shrunk(spec: CollectionSpec, rows: int = SMALL_ROWS) -> CollectionSpec:
    """The spec with tables of at most so many rows, but for padding ids, which stay among them."""

    def smaller(table: TableSpec) -> TableSpec:
        rows_of = [spec.padding_row(f) for f in spec.features if f.table == table.name]
        padding = [row for row in rows_of if row is not None]
        return replace(table, num_embeddings=min(table.num_embeddings, max([rows - 1, *padding]) + 1))

    return replace(spec, tables=tuple(map(smaller, spec.tables)))


def _sequence_rows(layout: CollectionLayout, batch: Batch) -> list[int]:
    borders = batch.offsets[:: batch.batch].tolist() if batch.batch else [0] * (len(layout.features) + 1)
    return [borders[f.index + 1] - borders[f.index] for f in layout.sequence_features]
