"""The rows that a sharded collection begins with."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

from embforge.codegen.sharding.geometry import piece_name
from embforge.codegen.sharding.placement import Piece


def draw_rows(module: Any, seed: int) -> None:
    """Rows uniformly from +-1/sqrt(rows), of every shard from a seed of its own: ranks often share torch's."""
    rank, device = module._ranks.rank, module._device
    for placed in module.geometry.placement.tables:
        bound = 1 / math.sqrt(placed.table.num_embeddings)
        if placed.table.dtype == "fp8_e4m3":
            bound = max(bound, 2**-6)
        pieces = placed.pieces or (Piece(0, placed.table.embedding_dim, (rank,)),)
        for number, piece in enumerate(pieces):
            if rank not in piece.owners or device.type == "meta":
                continue
            shard = piece.owners.index(rank)
            name = piece_name(placed, number) if placed.pieces else placed.table.name
            key = f"{seed}/{placed.table.name}/{number}/{shard}"
            generator = torch.Generator(device)
            generator.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "little"))
            _fill(module._table(name).weight, bound, generator)
    for numbers in module._all_numbers():
        numbers.seed(seed % 2**63)


@torch.no_grad()
def _fill(rows: Tensor, bound: float, generator: torch.Generator) -> None:
    for part in rows.split(1 << 16):  # torch draws no fp8: converted a slice at a time
        drawn = torch.empty(part.shape, dtype=torch.float32, device=rows.device).uniform_(
            -bound, bound, generator=generator
        )
        part.copy_(drawn)
