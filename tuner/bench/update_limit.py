"""The machine's update limit: how fast the rows that a training step changes can be read and written back at all.

`templates/cpu/limits/update_limit.cpp.j2` adds a number to every distinct row of a batch, once. The number is 0, so
that the tables of the module under test keep their values; it is an argument, so that no compiler removes the addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from embforge.codegen.dtypes import DTYPES
from embforge.codegen.layout import layout_of
from embforge.codegen.render import render
from embforge.codegen.spec import CollectionSpec
from embforge.tuner.bench.limit import Limit, Work, common_facts, compiled, metadata_of
from embforge.tuner.workload.workload import Batch, Ints

TEMPLATE = "cpu/limits/update_limit.cpp.j2"
ELEMENTS = {4: "float", 2: "uint16_t", 1: "uint8_t"}
"""The C++ type in which the number is added, by bytes per element: a limit does not convert number formats."""


def update_limit(spec: CollectionSpec, tables: Sequence[Tensor], addend: int = 0) -> Limit:
    """The limit of a training step; `run` returns how many rows it changed.

    `tables` has one tensor per table of the spec, with the layout's row stride. `ToolchainError` without a compiler.
    """
    kernel = compiled(spec, "update_limit", source_of(spec))
    what = "distinct rows added to and written back once"
    return Limit("limit", what, kernel, metadata_of(spec, tables), tuple(tables), partial(_update_work, spec, addend))


def source_of(spec: CollectionSpec) -> str:
    """The update limit's source text for a spec."""
    tables = [
        {
            "name": layout.table.name,
            "element": ELEMENTS[DTYPES[layout.table.dtype].bytes],
            "row_bytes": layout.row_bytes,
            "stride_bytes": layout.stride_bytes,
        }
        for layout in layout_of(spec).tables
    ]
    return render(TEMPLATE, {**common_facts(spec), "tables": tables})


def distinct_rows(spec: CollectionSpec, batch: Batch) -> list[Ints]:
    """For each table: the rows that the batch's ids name in any of its features, as a sorted array."""
    ids: list[list[Ints]] = [[] for _ in spec.tables]
    for feature in layout_of(spec).features:
        ids[feature.table_index].append(batch.values[batch.feature(feature.index)].astype(np.int64))
    return [np.unique(np.concatenate(of_table)) if of_table else np.empty(0, np.int64) for of_table in ids]


def _update_work(spec: CollectionSpec, addend: int, batch: Batch) -> Work:
    rows = distinct_rows(spec, batch)
    borders = np.cumsum([0, *(r.size for r in rows)], dtype=np.int64)
    return Work(torch.from_numpy(np.concatenate(rows)), torch.from_numpy(borders), addend)
