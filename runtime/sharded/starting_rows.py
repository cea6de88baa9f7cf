"""The initial rows of a sharded collection."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from embforge.codegen.spec import CollectionSpec
from embforge.sharded.state import HeldTable
from embforge.storage.common import starting_bound


def draw_rows(spec: CollectionSpec, held: Iterable[HeldTable], seed: int) -> None:
    """Draws rows uniformly from within `starting_bound`. Every shard has its own seed, because ranks often have the
    same seed of torch."""
    for shard in held:
        rows = shard.table.weight
        if rows.is_meta:
            continue
        key = f"{seed}/{shard.name}/{shard.piece}/{shard.shard}"
        generator = torch.Generator(rows.device)
        generator.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "little"))
        _fill(rows, starting_bound(spec.table(shard.name)), generator)


@torch.no_grad()
def _fill(rows: Tensor, bound: float, generator: torch.Generator) -> None:
    for part in rows.split(1 << 16):  # drawn in fp32 and converted, one slice after the other
        drawn = torch.empty(part.shape, dtype=torch.float32, device=rows.device).uniform_(
            -bound, bound, generator=generator
        )
        part.copy_(drawn)
