"""Checks that a backend turns the ids of remapped tables into the same rows as the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from embforge.codegen.dtypes import ID_DTYPES
from embforge.codegen.plans import resolve_plan
from embforge.codegen.spec import NO_ROW, CollectionSpec, TableSpec
from embforge.inputs import Batch
from embforge.launch.kernels import Program, ResolveKernel, kernel_of
from embforge.launch.metadata import remap_metadata_of
from embforge.number_formats import torch_dtype
from embforge.verify.cases import Case, draw_batch
from embforge.verify.lookups import VerifyRow

BATCHES = (0, 1, 70, 300)
"""The numbers of samples of the batches."""
MOST_IDS = 10_000
"""The most ids and rows of a table."""


def remap_rows(spec: CollectionSpec, on: str, arch: str, device: torch.device, seed: int) -> list[VerifyRow]:
    """One row of the report, for batches of known, absent and unknown ids of both dtypes; none if all ids are rows."""
    if not spec.has_remaps:
        return []
    spec = replace(spec, tables=tuple(map(_smaller, spec.tables)))
    generator = torch.Generator("cpu").manual_seed(seed)
    remaps = [
        torch.randint(
            NO_ROW, table.num_embeddings, (table.num_ids,), generator=generator, dtype=torch.int64, device="cpu"
        ).to(device)
        for table in spec.tables
        if not table.ids_are_rows
    ]
    cases, detail = 0, ""
    for id_dtype in ID_DTYPES:
        for number, size in enumerate(BATCHES):
            batch = _batch(spec, size, id_dtype, seed + number, device)
            want = _rows(spec, "reference", "reference", id_dtype, remaps, batch)
            have = _rows(spec, on, arch, id_dtype, remaps, batch)
            cases += 1
            if not detail and not torch.equal(want, have):
                place = int((want != have).int().argmax())
                detail = (
                    f"{id_dtype} ids, {size} samples, position {place}: id {int(batch.values[place])} became "
                    f"{int(have[place])}, expected {int(want[place])}"
                )
    return [VerifyRow("rows of ids", cases, 0.0 if not detail else float("inf"), not detail, detail)]


def _smaller(table: TableSpec) -> TableSpec:
    """The table with few rows and ids. A kernel gets their numbers as arguments."""
    remap = None if table.remap is None else min(table.remap, MOST_IDS)
    return replace(table, num_embeddings=min(table.num_embeddings, MOST_IDS), remap=remap)


def _batch(spec: CollectionSpec, size: int, id_dtype: str, seed: int, device: torch.device) -> Batch:
    """A batch with ids from the whole range of each table, padding ids, and ids that no table has."""
    tables = tuple(replace(table, num_embeddings=table.num_ids, remap=None) for table in spec.tables)
    case = Case(size, bad_ids=True, id_dtype=id_dtype)
    drawn = draw_batch(replace(spec, tables=tables), case, seed, device)
    dtype = torch_dtype(id_dtype)
    return Batch(drawn.values.to(dtype), drawn.offsets.to(dtype), None, size, None)


def _rows(
    spec: CollectionSpec, target: str, arch: str, id_dtype: str, remaps: Sequence[Tensor], batch: Batch
) -> Tensor:
    kernel: ResolveKernel = kernel_of(Program(resolve_plan(spec, target, arch, id_dtype)).text)
    return kernel(remap_metadata_of(spec, remaps), remaps, batch)
