"""What a placement makes ranks send and hold: streams of ids, each rank's own collection, and where results go.

    ids      feature ─► streams, one a (bucketing, shard) ─► blocks, one a destination ─► all-to-all
    vectors  rank's own collection ─► rows [samples of all ranks, its columns] ─► all-to-all ─► columns of the result

Every rank derives the same geometry from the same placement, so sizes are all that ranks must tell each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from embforge.codegen.layout import CollectionLayout, layout_of
from embforge.codegen.sharding.placement import Piece, Placement, Rows, TablePlacement
from embforge.codegen.spec import CollectionSpec, FeatureSpec, Pooling, TableSpec

SEQUENCE_POOLINGS = ("none", "concat")
"""Features whose rows travel one by one; of all others one partial pool a bag and shard does."""
SUMMED_POOLINGS = ("sum", "mean", "sqrtn")
"""Features whose partial pools may be added up on their way. Maxima are not: their winner must be known at the end."""
INT32_ROWS = 2**31 - 1
NO_ROW = -1
"""What travels in the place of an id that is no row."""


@dataclass(frozen=True)
class Stream:
    """Ids of one feature that go to one rank: those of one row shard, as rows of that shard."""

    feature: int
    rank: int
    rows: Rows
    sequence: bool
    weighted: bool
    """Whether weights travel with the ids: of pooled features only."""


@dataclass(frozen=True)
class Bucketing:
    """One way in which a feature's ids are spread: shard r of the rows to `streams[r]` (indices of
    `Geometry.streams`)."""

    feature: int
    streams: tuple[int, ...]


@dataclass(frozen=True)
class LocalFeature:
    """A feature of a rank's own collection: columns of a feature of the whole, for the ids of one stream."""

    stream: int
    feature: int
    piece: int
    table: int
    """In the rank's own collection."""


@dataclass(frozen=True)
class Local:
    """A rank's own collection: what its lookup and update kernels are made for."""

    spec: CollectionSpec
    features: tuple[LocalFeature, ...]
    """In the order of `spec.features`: first those whose results take the direct way, then the hierarchical ones."""
    layout: CollectionLayout
    direct_width: int
    """Columns of the pooled result that take the direct way; hierarchical ones stand behind them."""
    wholes: tuple[str, ...]
    """For each table of `spec`, the table whose shard it is."""

    @property
    def hierarchical_width(self) -> int:
        return self.layout.output_width - self.direct_width


@dataclass(frozen=True)
class DirectFeature:
    """Columns of a rank's pooled result that go straight to the ranks of the samples."""

    rank: int
    stream: int
    column: int
    width: int


@dataclass(frozen=True)
class PooledPiece:
    """Columns of the pooled result: the partial pools of every row shard, and where they stand in their owner's
    rows."""

    feature: int
    column: int
    width: int
    owners: tuple[int, ...]
    owner_columns: tuple[int, ...]
    """Of the owner's pooled result."""
    streams: tuple[int, ...]
    hierarchical: bool


@dataclass(frozen=True)
class SequencePiece:
    """Columns of a feature whose rows travel one by one: row shard r comes from `streams[r]`."""

    feature: int
    begin: int
    width: int
    streams: tuple[int, ...]
    owners: tuple[int, ...]
    local_features: tuple[int, ...]
    """Of each owner's own collection."""


@dataclass(frozen=True)
class Geometry:
    """All that follows from a placement alone."""

    placement: Placement
    bases: tuple[int, ...] = ()
    """Of each feature, where its ids begin among the rows of its table, if they are not the whole table's."""

    @property
    def spec(self) -> CollectionSpec:
        return self.placement.spec

    @property
    def world_size(self) -> int:
        return self.placement.world_size

    @cached_property
    def layout(self) -> CollectionLayout:
        return layout_of(self.spec)

    @cached_property
    def replicated(self) -> CollectionSpec | None:
        """The collection of replicated tables, if there are any."""
        tables = tuple(placed.table for placed in self.placement.tables if placed.replicated)
        names = {table.name for table in tables}
        features = tuple(feature for feature in self.spec.features if feature.table in names)
        return CollectionSpec(tables, features, self.spec.output_dtype, self.spec.name) if tables else None

    @cached_property
    def _spread(self) -> tuple[tuple[Stream, ...], dict[tuple[int, int, int, int], int]]:
        """Streams by destination and feature; and their index by (feature, rank, shards, shard)."""
        found: dict[tuple[int, int, int, int], Stream] = {}
        for index, feature in enumerate(self.spec.features):
            placed = self.placement.by_name[feature.table]
            sequence = feature.pooling in SEQUENCE_POOLINGS
            for piece in placed.pieces:
                for shard, rank in enumerate(piece.owners):
                    stream = Stream(index, rank, placed.rows(piece, shard), sequence, feature.weighted and not sequence)
                    found[index, rank, len(piece.owners), shard] = stream
        keys = sorted(found, key=lambda key: (key[1], key[0], key[2:]))
        return tuple(found[key] for key in keys), {key: place for place, key in enumerate(keys)}

    @property
    def streams(self) -> tuple[Stream, ...]:
        """All streams that a rank sends, by destination; the same on every rank."""
        return self._spread[0]

    @cached_property
    def streams_to(self) -> tuple[tuple[int, ...], ...]:
        """For each rank the streams that go to it."""
        by_rank: list[list[int]] = [[] for _ in range(self.world_size)]
        for index, stream in enumerate(self.streams):
            by_rank[stream.rank].append(index)
        return tuple(map(tuple, by_rank))

    @cached_property
    def _shard_streams(self) -> dict[tuple[int, tuple[int, ...]], tuple[int, ...]]:
        """By feature and owners of a piece."""
        return {}

    def _streams_of(self, feature: int, piece: Piece) -> tuple[int, ...]:
        found = self._shard_streams.get((feature, piece.owners))
        if found is None:
            places, count = self._spread[1], len(piece.owners)
            found = tuple(places[feature, rank, count, shard] for shard, rank in enumerate(piece.owners))
            self._shard_streams[feature, piece.owners] = found
        return found

    @cached_property
    def bucketings(self) -> tuple[Bucketing, ...]:
        """All of them, by feature. Pieces that lie on the same ranks share one."""
        found = {
            Bucketing(index, self._streams_of(index, piece)): None
            for index, feature in enumerate(self.spec.features)
            for piece in self.placement.by_name[feature.table].pieces
        }
        return tuple(found)

    @cached_property
    def direct_features(self) -> tuple[DirectFeature, ...]:
        """All pooled features of ranks' own collections whose results take the direct way, by rank and column."""
        return tuple(
            DirectFeature(rank, found.stream, placed.column, placed.width)
            for rank, local in enumerate(self.locals)
            if local is not None
            for placed, found in zip(local.layout.features, local.features, strict=True)
            if placed.column is not None and placed.column < local.direct_width
        )

    @cached_property
    def direct_columns(self) -> tuple[int, ...]:
        """Of each stream the columns of its pools that take the direct way back."""
        columns = [0] * len(self.streams)
        for feature in self.direct_features:
            columns[feature.stream] += feature.width
        return tuple(columns)

    @cached_property
    def asking_to(self) -> tuple[tuple[int, ...], ...]:
        """For each rank the streams that go to it whose pools can be asked for."""
        return tuple(tuple(t for t in streams if self.direct_columns[t]) for streams in self.streams_to)

    @cached_property
    def wide_ids(self) -> bool:
        """Whether rows of a shard do not fit 32 bits."""
        return any(stream.rows.capacity > INT32_ROWS for stream in self.streams)

    @property
    def id_dtype(self) -> str:
        """Of rows on the wire and in ranks' own collections."""
        return "int64" if self.wide_ids else "int32"

    @cached_property
    def whole_bags(self) -> bool:
        """Whether every pooled bag is pooled by one rank, so that partial pools are results."""
        return all(len(piece.owners) == 1 for piece in self.pooled_pieces)

    @cached_property
    def locals(self) -> tuple[Local | None, ...]:
        """Each rank's own collection; None: it holds nothing."""
        return tuple(self._local(rank) for rank in range(self.world_size))

    @cached_property
    def _held(self) -> list[list[tuple[str, int, int]]]:
        """Of each rank: table, piece and row shard of all that it holds."""
        found: list[list[tuple[str, int, int]]] = [[] for _ in range(self.world_size)]
        for placed in self.placement.tables:
            for number, piece in enumerate(placed.pieces):
                for shard, rank in enumerate(piece.owners):
                    found[rank].append((placed.table.name, number, shard))
        return found

    def _local(self, rank: int) -> Local | None:
        tables: list[TableSpec] = []
        shards: dict[str, list[tuple[int, int, int]]] = {}
        """Of each table that has shards here: piece, row shard, and table of the own collection."""
        for name, number, shard in self._held[rank]:
            shards.setdefault(name, []).append((number, shard, len(tables)))
            tables.append(_local_table(self.placement.by_name[name], number, shard))
        found: list[tuple[LocalFeature, FeatureSpec, bool]] = []
        for index, feature in enumerate(self.spec.features):
            placed, base = self.placement.by_name[feature.table], self.bases[index] if self.bases else 0
            for number, shard, table in shards.get(feature.table, ()):
                stream = self._streams_of(index, placed.pieces[number])[shard]
                made = _local_feature(feature, placed, number, shard, tables[table].name, base)
                local = LocalFeature(stream, index, number, table)
                found.append((local, made, placed.hierarchical and feature.pooling in SUMMED_POOLINGS))
        if not found:
            return None
        found.sort(key=lambda entry: entry[2])  # stable: features of a table keep their order
        spec = CollectionSpec(tuple(tables), tuple(made for _, made, _ in found), name=self.spec.name)
        layout = layout_of(spec)
        behind = sum(layout.features[i].width for i, entry in enumerate(found) if entry[2])
        wholes = tuple(name for name, _, _ in self._held[rank])
        return Local(spec, tuple(local for local, _, _ in found), layout, layout.output_width - behind, wholes)

    @cached_property
    def _local_index(self) -> dict[tuple[int, int, int], int]:
        """By (rank, feature, piece): which feature of the rank's own collection that is."""
        return {
            (rank, found.feature, found.piece): index
            for rank, local in enumerate(self.locals)
            if local is not None
            for index, found in enumerate(local.features)
        }

    @cached_property
    def pooled_pieces(self) -> tuple[PooledPiece, ...]:
        """In the order of the result's columns."""
        found = []
        for placed in self.layout.features:
            table = self.placement.by_name[placed.feature.table]
            if placed.feature.pooling in SEQUENCE_POOLINGS or placed.column is None:
                continue
            for number, piece in enumerate(table.pieces):
                columns = []
                for rank in piece.owners:
                    local = self.locals[rank]
                    assert local is not None
                    column = local.layout.features[self._local_index[rank, placed.index, number]].column
                    assert column is not None
                    columns.append(column)
                found.append(
                    PooledPiece(
                        placed.index,
                        placed.column + piece.begin,
                        piece.width,
                        piece.owners,
                        tuple(columns),
                        self._streams_of(placed.index, piece),
                        table.hierarchical and placed.feature.pooling in SUMMED_POOLINGS,
                    )
                )
        return tuple(found)

    @cached_property
    def sequence_pieces(self) -> tuple[SequencePiece, ...]:
        """By feature and column."""
        return tuple(
            SequencePiece(
                index,
                piece.begin,
                piece.width,
                self._streams_of(index, piece),
                piece.owners,
                tuple(self._local_index[rank, index, number] for rank in piece.owners),
            )
            for index, feature in enumerate(self.spec.features)
            if feature.pooling in SEQUENCE_POOLINGS
            for number, piece in enumerate(self.placement.by_name[feature.table].pieces)
        )


def piece_name(placed: TablePlacement, number: int) -> str:
    """What a piece of a table is called in a rank's own collection."""
    return f"{placed.table.name}.{number}" if placed.columns_split else placed.table.name


def _local_table(placed: TablePlacement, number: int, shard: int) -> TableSpec:
    piece = placed.pieces[number]
    rows = placed.rows(piece, shard)
    return replace(
        placed.table, name=piece_name(placed, number), num_embeddings=rows.capacity, embedding_dim=piece.width
    )


def _local_feature(
    feature: FeatureSpec, placed: TablePlacement, number: int, shard: int, table: str, base: int
) -> FeatureSpec:
    """Sums and maxima of what a shard holds; division, weights of rows and places in a bag are the sender's work."""
    name = f"{feature.name}.{number}" if placed.columns_split else feature.name
    all_rows = range(placed.table.num_embeddings)
    if feature.pooling in SEQUENCE_POOLINGS:
        # The sender leaves padding out of bags that several ranks pool. Here its row is wanted, and must not be
        # trained.
        rows = placed.rows(placed.pieces[number], shard)
        padding = feature.padding_idx
        padding = rows.local(padding) if padding is not None and padding in all_rows else None
        return FeatureSpec(name, table, "none", padding_idx=padding)
    pooling: Pooling = "max" if feature.pooling == "max" else "sum"
    # A bag that one rank pools goes there as it is, so that its chunks of the canonical sum are what they were.
    whole = len(placed.pieces[number].owners) == 1
    padding = feature.padding_idx if whole else None
    if padding is not None:
        padding = padding + base if padding in all_rows else NO_ROW
    return FeatureSpec(name, table, pooling, feature.weighted, feature.hotness, padding)
