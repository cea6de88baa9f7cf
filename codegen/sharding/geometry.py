"""What follows from a placement: streams of ids between ranks, each rank's own collection, and the places of results.

    ids      feature ─► streams, one per (bucketing, shard) ─► blocks, one per destination ─► all-to-all
    vectors  rank's own collection ─► rows [samples of all ranks, its columns] ─► all-to-all ─► columns of the result

Every rank derives the same geometry from the same placement, so ranks only have to exchange sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from embforge.codegen.layout import CollectionLayout, layout_of
from embforge.codegen.sharding.placement import Piece, Placement, Rows, TablePlacement
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec

INT32_ROWS = 2**31 - 1
NO_ROW = -1
"""Sent instead of an id that is not a row."""


@dataclass(frozen=True)
class Stream:
    """The ids of one feature that are sent to one rank: those of one row shard, as row numbers of that shard."""

    feature: int
    rank: int
    rows: Rows
    sequence: bool
    """Whether rows travel one by one, because they are not pooled; otherwise one partial pool per bag and shard."""
    weighted: bool
    """Whether weights travel with the ids; only for pooled features."""


@dataclass(frozen=True)
class Bucketing:
    """One way in which a feature's ids are distributed: ids of row shard r go to `streams[r]` (an index of
    `Geometry.streams`)."""

    feature: int
    streams: tuple[int, ...]


@dataclass(frozen=True)
class LocalFeature:
    """A feature of a rank's own collection: columns of a feature of the whole collection, for one stream of ids."""

    stream: int
    feature: int
    piece: int
    table: int
    """The index of its table in the rank's own collection."""


@dataclass(frozen=True)
class Local:
    """A rank's own collection, for which its lookup and update kernels are made."""

    spec: CollectionSpec
    features: tuple[LocalFeature, ...]
    """In the order of `spec.features`: first those whose results are sent directly, then the hierarchical ones."""
    layout: CollectionLayout
    direct_width: int
    """How many columns of the pooled result are sent directly; the hierarchical ones follow them."""
    wholes: tuple[str, ...]
    """For each table of `spec`, the table whose shard it is."""

    @property
    def hierarchical_width(self) -> int:
        return self.layout.output_width - self.direct_width


@dataclass(frozen=True)
class DirectFeature:
    """Columns of a rank's pooled result that are sent directly to the ranks of the samples."""

    rank: int
    stream: int
    column: int
    width: int


@dataclass(frozen=True)
class PooledPiece:
    """Columns of the pooled result, with the partial pools of every row shard and their columns in owners' results."""

    feature: int
    column: int
    width: int
    owners: tuple[int, ...]
    owner_columns: tuple[int, ...]
    """For each owner, the first of these columns in its pooled result."""
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
    """For each owner, the index of the feature in its own collection."""


@dataclass(frozen=True)
class Geometry:
    """Everything that follows from a placement alone."""

    placement: Placement
    bases: tuple[int, ...] = ()
    """For each feature, the row of its table that its id 0 means; empty if that is row 0 for all features."""

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
        tables = tuple(table.table for table in self.placement.tables if table.replicated)
        names = {table.name for table in tables}
        features = tuple(feature for feature in self.spec.features if feature.table in names)
        return CollectionSpec(tables, features, self.spec.output_dtype, self.spec.name) if tables else None

    @cached_property
    def _spread(self) -> tuple[tuple[Stream, ...], dict[tuple[int, int, int, int], int]]:
        """Streams by destination and feature; and their index by (feature, rank, shards, shard)."""
        streams: dict[tuple[int, int, int, int], Stream] = {}
        for index, feature in enumerate(self.spec.features):
            placement = self.placement.by_name[feature.table]
            sequence = not feature.kind.pooled
            for piece in placement.pieces:
                for shard, rank in enumerate(piece.owners):
                    stream = Stream(
                        index, rank, placement.rows(piece, shard), sequence, feature.weighted and not sequence
                    )
                    streams[index, rank, len(piece.owners), shard] = stream
        keys = sorted(streams, key=lambda key: (key[1], key[0], key[2:]))
        return tuple(streams[key] for key in keys), {key: place for place, key in enumerate(keys)}

    @property
    def streams(self) -> tuple[Stream, ...]:
        """All streams that a rank sends, by destination; the same on every rank."""
        return self._spread[0]

    @cached_property
    def streams_to(self) -> tuple[tuple[int, ...], ...]:
        """For each rank, the streams that go to it."""
        by_rank: list[list[int]] = [[] for _ in range(self.world_size)]
        for index, stream in enumerate(self.streams):
            by_rank[stream.rank].append(index)
        return tuple(map(tuple, by_rank))

    @cached_property
    def _shard_streams(self) -> dict[tuple[int, tuple[int, ...]], tuple[int, ...]]:
        """A cache of `_streams_of`, by feature and owners of a piece."""
        return {}

    def _streams_of(self, feature: int, piece: Piece) -> tuple[int, ...]:
        streams = self._shard_streams.get((feature, piece.owners))
        if streams is None:
            index_of, count = self._spread[1], len(piece.owners)
            streams = tuple(index_of[feature, rank, count, shard] for shard, rank in enumerate(piece.owners))
            self._shard_streams[feature, piece.owners] = streams
        return streams

    @cached_property
    def bucketings(self) -> tuple[Bucketing, ...]:
        """All bucketings, by feature. Pieces on the same ranks share one."""
        different = {
            Bucketing(index, self._streams_of(index, piece)): None
            for index, feature in enumerate(self.spec.features)
            for piece in self.placement.by_name[feature.table].pieces
        }
        return tuple(different)

    @cached_property
    def direct_features(self) -> tuple[DirectFeature, ...]:
        """All pooled features of ranks' own collections whose results are sent directly, by rank and column."""
        return tuple(
            DirectFeature(rank, feature.stream, slot.column, slot.width)
            for rank, local in enumerate(self.locals)
            if local is not None
            for slot, feature in zip(local.layout.features, local.features, strict=True)
            if slot.column is not None and slot.column < local.direct_width
        )

    @cached_property
    def direct_columns(self) -> tuple[int, ...]:
        """For each stream, how many columns of its pools are sent back directly."""
        columns = [0] * len(self.streams)
        for feature in self.direct_features:
            columns[feature.stream] += feature.width
        return tuple(columns)

    @cached_property
    def requestable_to(self) -> tuple[tuple[int, ...], ...]:
        """For each rank, those streams to it whose pools can be requested one by one."""
        return tuple(tuple(t for t in streams if self.direct_columns[t]) for streams in self.streams_to)

    @cached_property
    def wide_ids(self) -> bool:
        """Whether row numbers of some shard do not fit into 32 bits."""
        return any(stream.rows.capacity > INT32_ROWS for stream in self.streams)

    @property
    def id_dtype(self) -> str:
        """The type of row numbers between ranks and in ranks' own collections."""
        return "int64" if self.wide_ids else "int32"

    @cached_property
    def whole_bags(self) -> bool:
        """Whether every pooled bag is pooled by one rank, so that partial pools are results."""
        return all(len(piece.owners) == 1 for piece in self.pooled_pieces)

    @cached_property
    def locals(self) -> tuple[Local | None, ...]:
        """Each rank's own collection; None for a rank that holds nothing."""
        return tuple(self._local(rank) for rank in range(self.world_size))

    @cached_property
    def _held(self) -> list[list[tuple[str, int, int]]]:
        """For each rank, the (table, piece, row shard) of everything that it holds."""
        held: list[list[tuple[str, int, int]]] = [[] for _ in range(self.world_size)]
        for placement in self.placement.tables:
            for number, piece in enumerate(placement.pieces):
                for shard, rank in enumerate(piece.owners):
                    held[rank].append((placement.table.name, number, shard))
        return held

    def _local(self, rank: int) -> Local | None:
        tables: list[TableSpec] = []
        shards: dict[str, list[tuple[int, int, int]]] = {}
        """For each table with shards on this rank: piece, row shard, and index in the rank's own collection."""
        for name, number, shard in self._held[rank]:
            shards.setdefault(name, []).append((number, shard, len(tables)))
            tables.append(_local_table(self.placement.by_name[name], number, shard))
        entries: list[tuple[LocalFeature, FeatureSpec, bool]] = []
        for index, feature in enumerate(self.spec.features):
            placement, base = self.placement.by_name[feature.table], self.bases[index] if self.bases else 0
            for number, shard, table in shards.get(feature.table, ()):
                stream = self._streams_of(index, placement.pieces[number])[shard]
                feature_spec = _local_feature(feature, placement, number, shard, tables[table].name, base)
                local = LocalFeature(stream, index, number, table)
                entries.append((local, feature_spec, is_hierarchical(feature, placement)))
        if not entries:
            return None
        entries.sort(key=lambda entry: entry[2])  # stable: features of a table keep their order
        spec = CollectionSpec(tuple(tables), tuple(entry[1] for entry in entries), name=self.spec.name)
        layout = layout_of(spec)
        hierarchical = sum(layout.features[i].width for i, entry in enumerate(entries) if entry[2])
        wholes = tuple(name for name, _, _ in self._held[rank])
        return Local(spec, tuple(entry[0] for entry in entries), layout, layout.output_width - hierarchical, wholes)

    @cached_property
    def _local_index(self) -> dict[tuple[int, int, int], int]:
        """By (rank, feature, piece): the index of that feature in the rank's own collection."""
        return {
            (rank, feature.feature, feature.piece): index
            for rank, local in enumerate(self.locals)
            if local is not None
            for index, feature in enumerate(local.features)
        }

    @cached_property
    def pooled_pieces(self) -> tuple[PooledPiece, ...]:
        """All pooled pieces, in the order of the result's columns."""
        pieces = []
        for slot in self.layout.features:
            table = self.placement.by_name[slot.feature.table]
            if not slot.feature.kind.pooled or slot.column is None:
                continue
            for number, piece in enumerate(table.pieces):
                columns = []
                for rank in piece.owners:
                    local = self.locals[rank]
                    assert local is not None
                    column = local.layout.features[self._local_index[rank, slot.index, number]].column
                    assert column is not None
                    columns.append(column)
                pieces.append(
                    PooledPiece(
                        slot.index,
                        slot.column + piece.begin,
                        piece.width,
                        piece.owners,
                        tuple(columns),
                        self._streams_of(slot.index, piece),
                        is_hierarchical(slot.feature, table),
                    )
                )
        return tuple(pieces)

    @cached_property
    def sequence_pieces(self) -> tuple[SequencePiece, ...]:
        """All sequence pieces, by feature and column."""
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
            if not feature.kind.pooled
            for number, piece in enumerate(self.placement.by_name[feature.table].pieces)
        )


def is_hierarchical(feature: FeatureSpec, placement: TablePlacement) -> bool:
    """Whether a feature's partial pools are added up within nodes on their way. Maxima and minima are not: the rank of
    the sample must know which shard won, so they are sent directly."""
    return placement.hierarchical and feature.kind.sums


def piece_name(placement: TablePlacement, number: int) -> str:
    """The name of a piece of a table in a rank's own collection."""
    return f"{placement.table.name}.{number}" if placement.columns_split else placement.table.name


def _local_table(placement: TablePlacement, number: int, shard: int) -> TableSpec:
    piece = placement.pieces[number]
    rows = placement.rows(piece, shard)
    return replace(
        placement.table, name=piece_name(placement, number), num_embeddings=rows.capacity, embedding_dim=piece.width
    )


def _local_feature(
    feature: FeatureSpec, placement: TablePlacement, number: int, shard: int, table: str, base: int
) -> FeatureSpec:
    """The feature that a shard looks up: it combines the rows that it holds, or returns each of them. The sender
    divides, multiplies rows by weights, and puts them in their places in a bag."""
    name = f"{feature.name}.{number}" if placement.columns_split else feature.name
    all_rows = range(placement.table.num_embeddings)
    partial = feature.kind.partial.name
    if not feature.kind.pooled:
        # The sender leaves padding out of bags that several ranks pool. Here the row of padding is looked up, but must
        # not be trained.
        rows = placement.rows(placement.pieces[number], shard)
        padding = feature.padding_idx
        padding = rows.local(padding) if padding is not None and padding in all_rows else None
        return FeatureSpec(name, table, partial, padding_idx=padding)
    # A bag that one rank pools is sent unchanged, so that its chunks of the canonical sum stay the same.
    whole = len(placement.pieces[number].owners) == 1
    padding = feature.padding_idx if whole else None
    if padding is not None:
        padding = padding + base if padding in all_rows else NO_ROW
    return FeatureSpec(name, table, partial, feature.weighted, feature.hotness, padding)
