"""Probes: difficult batches, each with the results of the reference, and how to run a kernel on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from embforge.codegen.layout import CollectionLayout
from embforge.codegen.plan import Plan
from embforge.codegen.spec import CollectionSpec, TableSpec
from embforge.inputs import Batch
from embforge.launch.kernels import Kernel
from embforge.launch.metadata import Metadata, metadata_of
from embforge.launch.reference import forward as reference
from embforge.number_formats import torch_dtype
from embforge.operator_arguments import sequence_elements
from embforge.verify.cases import Case, Drawn, draw_batch, draw_tables

Progress = Callable[[str, int, int], None]
"""A function that is called with the name of the work that is being done, the number of finished steps, and of all."""
Result = tuple[Tensor, Tensor]
"""Pooled `[B, output_width]`, and the flat sequence."""

SMALL_ROWS = 1000
"""The most rows of tables that hold special numbers. A kernel gets the number of rows as an argument."""

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
"""Small batches: those for every plan, those for the default plan only, and those for tables with special numbers."""


@dataclass(frozen=True)
class Probe:
    """A batch, the tables in which it is looked up, and the results of the reference."""

    case: Case
    special: bool
    drawn: Drawn
    tables: tuple[Tensor, ...]
    expected: Result
    for_all: bool = True
    """Whether all plans run on it, or only the default plan."""

    def __str__(self) -> str:
        return str(self.case) + (", special numbers" if self.special else "")

    def fits(self, id_dtype: str) -> bool:
        """Whether this dtype can represent its ids: bad ids of a case with int64 ids need int64."""
        return id_dtype == "int64" or self.case.id_dtype == "int32" or not self.case.bad_ids


def probes_of(
    spec: CollectionSpec, batch_sizes: Sequence[int], seed: int, device: torch.device, progress: Progress
) -> list[Probe]:
    """Probes with batches of these sizes, for backends that are fast enough for tables of the full size."""
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
    return _draw([_CasesOf(spec, False, usual), _CasesOf(shrunk(spec), True, on_special)], seed, device, progress)


def few_probes_of(spec: CollectionSpec, seed: int, progress: Progress) -> list[Probe]:
    """Probes with small batches and tables, for a slow backend: few for all plans, and more for the default plan."""
    small = shrunk(spec)
    cases = [_CasesOf(small, False, FEW_FOR_ALL + FEW_FOR_ONE), _CasesOf(small, True, FEW_SPECIAL)]
    probes = _draw(cases, seed, CPU, progress)
    return [replace(probe, for_all=index < len(FEW_FOR_ALL)) for index, probe in enumerate(probes)]


CPU = torch.device("cpu")


class _CasesOf(NamedTuple):
    """Cases to draw for a spec, and whether its tables hold special numbers."""

    spec: CollectionSpec
    special: bool
    cases: Sequence[Case]


def _draw(cases_of: Sequence[_CasesOf], seed: int, device: torch.device, progress: Progress) -> list[Probe]:
    """The probes of all cases."""
    probes: list[Probe] = []
    count = sum(len(cases) for _, _, cases in cases_of)
    for number, (spec, special, cases) in enumerate(cases_of):
        progress("drawing tables", number, len(cases_of))
        tables = draw_tables(spec, seed, special, device)
        for case in cases:
            progress("computing the reference", len(probes), count)
            drawn = draw_batch(spec, case, seed + len(probes), device)
            expected = reference.lookup(spec, *drawn, tables, bounds_check="zero" if case.bad_ids else "error")
            probes.append(Probe(case, special, drawn, tables, expected))
    return probes


def call_of(plan: Plan, probe: Probe) -> tuple[Metadata, tuple[Tensor, ...], Batch, int, str]:
    """The arguments with which the kernel of a plan is called for a probe."""
    dtype = torch_dtype(plan.id_dtype)
    values, offsets, weights = probe.drawn
    batch = Batch(values.to(dtype), offsets.to(dtype), weights, probe.case.batch, None)
    bounds_check = "zero" if probe.case.bad_ids else "error"
    elements = sequence_elements(plan.layout, _sequence_rows(plan.layout, batch))
    return metadata_of(probe.tables, bounds_check), probe.tables, batch, elements, bounds_check


def run(kernel: Kernel, probe: Probe) -> Result:
    """The results of a kernel for a probe."""
    return as_result(*kernel(*call_of(kernel.plan, probe)))


def as_result(pooled: Tensor, sequence: Tensor | None) -> Result:
    """The results of a kernel, with an empty tensor in the place of a sequence that is None."""
    return pooled, pooled.new_empty(0) if sequence is None else sequence


def shrunk(spec: CollectionSpec, rows: int = SMALL_ROWS) -> CollectionSpec:
    """The spec with tables of at most `rows` rows, or of more if padding ids need them."""

    def smaller(table: TableSpec) -> TableSpec:
        rows_of = [spec.padding_row(f) for f in spec.features if f.table == table.name]
        padding = [row for row in rows_of if row is not None]
        return replace(table, num_embeddings=min(table.num_embeddings, max([rows - 1, *padding]) + 1))

    return replace(spec, tables=tuple(map(smaller, spec.tables)))


def _sequence_rows(layout: CollectionLayout, batch: Batch) -> list[int]:
    borders = batch.offsets[:: batch.batch].tolist() if batch.batch else [0] * (len(layout.features) + 1)
    return [borders[f.index + 1] - borders[f.index] for f in layout.sequence_features]
