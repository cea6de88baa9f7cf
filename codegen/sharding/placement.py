"""A shard plan applied to a number of ranks: which rank holds which rows of which columns of every table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import assert_never

from embforge.codegen.errors import PlanError
from embforge.codegen.sharding.kinds import (
    By,
    ColumnWise,
    DataParallel,
    Grid,
    Hierarchical,
    Kind,
    RowWise,
    ShardPlan,
    TableWise,
)
from embforge.codegen.spec import CollectionSpec, TableSpec

COLUMN_UNIT = 4
"""The width of a piece is a multiple of this if the table is wide enough, so that rows can be read by vector loads."""


@dataclass(frozen=True)
class Rows:
    """One of `shards` parts of a table's rows."""

    total: int
    shards: int
    shard: int
    by: By

    @property
    def capacity(self) -> int:
        """The rows of the largest shard. All shards have space for this many, so that one kernel serves all ranks."""
        return -(-self.total // self.shards)

    @property
    def count(self) -> int:
        """The rows of this shard; 0 is possible if there are fewer rows than shards."""
        if self.by == "modulo":
            return self.total // self.shards + (self.shard < self.total % self.shards)
        return max(0, min(self.capacity, self.total - self.shard * self.capacity))

    @property
    def range(self) -> range:
        """The numbers of this shard's rows in the table."""
        if self.by == "modulo":
            return range(self.shard, self.total, self.shards)
        begin = min(self.shard * self.capacity, self.total)
        return range(begin, begin + self.count)

    def local(self, row: int) -> int | None:
        """The number of a row within this shard, or None if another shard holds it."""
        shard, index = (row % self.shards, row // self.shards) if self.by == "modulo" else divmod(row, self.capacity)
        return index if shard == self.shard else None


@dataclass(frozen=True)
class Piece:
    """Columns `[begin, end)` of a table. Rank `owners[r]` holds row shard r of them."""

    begin: int
    end: int
    owners: tuple[int, ...]

    @property
    def width(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class TablePlacement:
    """The ranks that hold the parts of one table. A replicated table has no pieces."""

    table: TableSpec
    kind: Kind
    by: By
    pieces: tuple[Piece, ...]

    @property
    def replicated(self) -> bool:
        return not self.pieces

    @property
    def hierarchical(self) -> bool:
        return isinstance(self.kind, Hierarchical)

    @property
    def columns_split(self) -> bool:
        return len(self.pieces) > 1

    def rows(self, piece: Piece, shard: int) -> Rows:
        return Rows(self.table.num_embeddings, len(piece.owners), shard, self.by)


@dataclass(frozen=True)
class Placement:
    """The placement of every table on `world_size` ranks.

    `node_size` ranks share a node: rank k is local rank `k % node_size` of node `k // node_size`.
    """

    spec: CollectionSpec
    world_size: int
    node_size: int
    tables: tuple[TablePlacement, ...]
    remap_bytes: int = 0
    """Bytes of the rows of ids, which every rank holds."""
    num_remapped: int = 0
    """The number of tables whose ids are not their rows. `spec` is the one by rows."""

    @cached_property
    def by_name(self) -> dict[str, TablePlacement]:
        return {table.table.name: table for table in self.tables}

    @property
    def nodes(self) -> int:
        return self.world_size // self.node_size


def place(plan: ShardPlan, spec: CollectionSpec, world_size: int, node_size: int | None = None) -> Placement:
    """The plan on `world_size` ranks, which place rows: of the spec by rows, see `CollectionSpec.by_rows`.

    `PlanError` names the table that cannot be placed so, and why.
    """
    remap_bytes, num_remapped, spec = spec.remap_bytes, spec.num_remapped, spec.by_rows()
    node_size = world_size if node_size is None else node_size
    if world_size < 1 or node_size < 1 or world_size % node_size:
        raise PlanError(
            f"shard plan: {world_size} ranks on nodes of {node_size}; allowed: nodes of equal size, at least one rank"
        )
    known = {table.name for table in spec.tables}
    for name, _ in plan.kinds:
        if name not in known:
            raise PlanError(f"shard plan: table {name!r} is not in the spec; its tables: {', '.join(sorted(known))}")
    loads = [0.0] * world_size
    placements: dict[str, TablePlacement] = {}
    reads = reads_of(spec)
    heaviest_first = sorted(spec.tables, key=lambda table: (-reads[table.name], table.name))
    for table in heaviest_first:
        placement = place_table(table, plan.kind(table.name), world_size, node_size, loads)
        for piece in placement.pieces:
            share = reads[table.name] * piece.width / table.embedding_dim / len(piece.owners)
            for owner in piece.owners:
                loads[owner] += share
        for number in range(len(placement.pieces) if placement.columns_split else 0):
            if f"{table.name}.{number}" in known:
                raise PlanError(
                    f"shard plan: piece {number} of table {table.name!r} and table '{table.name}.{number}' would have "
                    "the same name; rename one of the tables, or do not split the columns"
                )
        placements[table.name] = placement
    ordered = tuple(placements[table.name] for table in spec.tables)
    return Placement(spec, world_size, node_size, ordered, remap_bytes, num_remapped)


def place_table(table: TableSpec, kind: Kind, world_size: int, node_size: int, loads: list[float]) -> TablePlacement:
    """The placement of one table. If its kind does not say which ranks, those with the least of `loads` are taken."""
    pieces = _pieces(table, kind, world_size, node_size, loads)
    return TablePlacement(table, kind, _by(kind), pieces)


def reads_of(spec: CollectionSpec) -> dict[str, float]:
    """How many numbers of each table the lookups of one sample read."""
    dims = {table.name: table.embedding_dim for table in spec.tables}
    reads = dict.fromkeys(dims, 0.0)
    for feature in spec.features:
        reads[feature.table] += dims[feature.table] * (feature.hotness or 1)
    return reads


def _by(kind: Kind) -> By:
    """How a kind spreads the rows of a piece. With one shard per piece, both ways are the same."""
    match kind:
        case RowWise() | Grid() | Hierarchical():
            return kind.by
        case DataParallel() | TableWise() | ColumnWise():
            return "modulo"
        case _:
            assert_never(kind)


def _pieces(table: TableSpec, kind: Kind, world_size: int, node_size: int, loads: list[float]) -> tuple[Piece, ...]:
    all_ranks = tuple(range(world_size))
    dim = table.embedding_dim
    if isinstance(kind, DataParallel):
        return ()
    if isinstance(kind, TableWise):
        rank = min(all_ranks, key=lambda r: (loads[r], r)) if kind.rank is None else kind.rank
        return (Piece(0, dim, _known(table, kind, (rank,), world_size)),)
    if isinstance(kind, ColumnWise):
        widest = max(1, dim // COLUMN_UNIT)
        count = min(world_size, widest) if kind.pieces is None else kind.pieces
        ranks = kind.ranks or tuple(sorted(all_ranks, key=lambda r: (loads[r], r)))
        _known(table, kind, ranks, world_size)
        borders = _borders(table, kind, count)
        return tuple(Piece(borders[i], borders[i + 1], (ranks[i % len(ranks)],)) for i in range(count))
    if isinstance(kind, Grid):
        nodes = world_size // node_size
        count = kind.pieces or min(nodes if nodes > 1 else 2, world_size, dim)
        if count > world_size:
            raise PlanError(
                f"shard plan: table {table.name!r}: {count} pieces on {world_size} ranks; use at most {world_size}"
            )
        borders = _borders(table, kind, count)
        by_node = count == nodes > 1
        parts = [
            all_ranks[i * node_size : (i + 1) * node_size] if by_node else all_ranks[i::count] for i in range(count)
        ]
        return tuple(Piece(borders[i], borders[i + 1], parts[i]) for i in range(count))
    ranks = all_ranks if isinstance(kind, Hierarchical) else kind.ranks or all_ranks
    return (Piece(0, dim, _known(table, kind, ranks, world_size)),)


def _known(table: TableSpec, kind: Kind, ranks: tuple[int, ...], world_size: int) -> tuple[int, ...]:
    for rank in ranks:
        if not 0 <= rank < world_size:
            raise PlanError(
                f"shard plan: table {table.name!r}: {kind.name} on rank {rank}; allowed: 0 to {world_size - 1}"
            )
    return ranks


def _borders(table: TableSpec, kind: Kind, count: int) -> tuple[int, ...]:
    """The `count + 1` borders between pieces of columns, which are as equal as whole units allow."""
    dim = table.embedding_dim
    if count > dim:
        raise PlanError(
            f"shard plan: table {table.name!r}: {kind.name} of {count} pieces, but it has {dim} columns; use fewer"
        )
    unit = COLUMN_UNIT if dim % COLUMN_UNIT == 0 and dim // COLUMN_UNIT >= count else 1
    units = dim // unit
    return tuple(i * units // count * unit for i in range(count + 1))
