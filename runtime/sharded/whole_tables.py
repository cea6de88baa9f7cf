"""The rows of a sharded collection: this rank's shards as live tensors, and whole tables in and out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from embforge.codegen.rules.rule import Extent
from embforge.codegen.sharding.geometry import piece_name
from embforge.number_formats import torch_dtype
from embforge.sharded.exchange.collectives import Exchange
from embforge.sharded.state import HeldShards
from embforge.storage.table import Table


class WholeTables(HeldShards):
    """A module that can copy whole tables into the shards of all ranks, and gather whole tables from them."""

    _wires: Exchange
    """What exchanges vectors and rows."""

    def weight(self, table: str) -> Tensor:
        """The live rows of the shard of a table that this rank holds, `[rows, columns]`; of the whole table if it is
        replicated.

        Raises ValueError if this rank holds no shard of the table or several, see `shards`.
        """
        shards = self.shards(table)
        if len(shards) != 1:
            raise ValueError(
                f"table {table!r}: this rank holds {len(shards)} shards of it; call shards(), or full() for the whole "
                "table"
            )
        return next(iter(shards.values()))

    def shards(self, table: str) -> dict[tuple[range, range], Tensor]:
        """The live parts of a table that this rank holds, by rows and columns."""
        self.spec.table(table)
        placement = self.geometry.placement.by_name[table]
        if placement.replicated:
            whole = placement.table
            return {(range(whole.num_embeddings), range(whole.embedding_dim)): self._table(table).weight}
        shards = {}
        for number, piece in enumerate(placement.pieces):
            if self._ranks.rank in piece.owners:
                rows = placement.rows(piece, piece.owners.index(self._ranks.rank))
                shard = self._table(piece_name(placement, number)).weight[: rows.count]
                shards[rows.range, range(piece.begin, piece.end)] = shard
        return shards

    @torch.no_grad()
    def load_full(self, tables: Mapping[str, Tensor]) -> None:
        """Copies this rank's part from whole tables `[rows, dim]`, which must be the same on all ranks."""
        for name, rows_of_table in tables.items():
            table = self.spec.table(name)
            shape = (table.num_embeddings, table.embedding_dim)
            if tuple(rows_of_table.shape) != shape:
                raise ValueError(f"table {name!r}: shape {tuple(rows_of_table.shape)} does not fit; allowed: {shape}")
            for (rows, columns), shard in self.shards(name).items():
                shard.copy_(rows_of_table[rows.start : rows.stop : rows.step, columns.start : columns.stop])

    @torch.no_grad()
    def full(self, table: str) -> Tensor:
        """The whole table `[rows, dim]`, on every rank. All ranks must call."""
        return self._gather(table, lambda shard: shard.weight, None)

    @torch.no_grad()
    def full_optimizer_state(self, table: str) -> dict[str, Tensor]:
        """The whole states of a table by name, on every rank: `[rows, dim]` for states of elements, `[rows]` for states
        of rows. All ranks must call."""
        self.spec.table(table)
        return {
            state.name: self._gather(table, partial(_state_of, state.name), state.extent)
            for state in self.states_of(table)
        }

    def _gather(self, name: str, take: Callable[[Table], Tensor], extent: Extent | None) -> Tensor:
        """Gathers the weight, or a state of an extent, of all shards of a table. `take` gets it from a shard."""
        spec, placement = self.spec.table(name), self.geometry.placement.by_name[name]
        if placement.replicated:
            return take(self._table(name)).clone()
        of_rows = extent == "row"
        dtype = torch.float32 if extent else torch_dtype(spec.dtype)
        shape = (spec.num_embeddings,) if of_rows else (spec.num_embeddings, spec.embedding_dim)
        whole = torch.empty(shape, dtype=dtype, device=self._device)
        for number, piece in enumerate(placement.pieces):
            for shard, owner in enumerate(piece.owners):
                rows = placement.rows(piece, shard)
                part = whole.new_empty((rows.count, *(() if of_rows else (piece.width,))))
                if owner == self._ranks.rank:
                    part.copy_(take(self._table(piece_name(placement, number)))[: rows.count])
                if rows.count:
                    self._wires.broadcast(part, owner)
                row_slice = slice(rows.range.start, rows.range.stop, rows.range.step)
                if of_rows:
                    whole[row_slice] = part
                else:
                    whole[row_slice, piece.begin : piece.end] = part
        return whole


def _state_of(name: str, shard: Table) -> Tensor:
    return shard.states()[name]
