"""Specs whose tables are remapped, and batches of ids that stand for the rows of a batch of the plain spec."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from embforge.codegen.spec import CollectionSpec

Entries = dict[str, Tensor]


def remapped(spec: CollectionSpec, tables: Collection[str] | None = None) -> CollectionSpec:
    """The spec with these tables remapped (None: all), each from more ids than it has rows."""
    return replace(
        spec,
        tables=tuple(
            replace(table, remap=2 * table.num_embeddings + 3) if tables is None or table.name in tables else table
            for table in spec.tables
        ),
        name=f"{spec.name}_remapped" if spec.name else None,
    )


def entries_of(spec: CollectionSpec, seed: int = 0) -> Entries:
    """The row of each id: every row has an id, some have several, and some ids have none."""
    generator = torch.Generator("cpu").manual_seed(seed)
    found = {}
    for table in spec.tables:
        if table.remap is None:
            continue
        rest = torch.randint(
            -1, table.num_embeddings, (table.remap - table.num_embeddings,), generator=generator, device="cpu"
        )
        rest[0] = -1
        entries = torch.cat([torch.arange(table.num_embeddings, dtype=torch.int64, device="cpu"), rest])
        found[table.name] = entries[torch.randperm(table.remap, generator=generator, device="cpu")]
    return found


def ids_for(spec: CollectionSpec, entries: Entries, values: Tensor, offsets: Tensor, seed: int = 0) -> Tensor:
    """Ids that stand for these rows; -1 among them becomes an id that has none. `spec` is the remapped one."""
    generator = torch.Generator("cpu").manual_seed(seed)
    batch, found = (offsets.numel() - 1) // len(spec.features), values.clone()
    for number, feature in enumerate(spec.features):
        if feature.table not in entries:
            continue
        begin, end = int(offsets[number * batch]), int(offsets[(number + 1) * batch])
        rows = entries[feature.table]
        for place in range(begin, end):
            ids = (rows == int(values[place])).nonzero().flatten()
            found[place] = ids[torch.randint(len(ids), (1,), generator=generator, device="cpu")].item()
    return found
