"""What the stage kernels know about a geometry: int64 arrays on the module's device, made once per module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from embforge.codegen.sharding.geometry import Geometry
from embforge.codegen.stages import (
    BUCKETING_WORDS,
    FEATURE_WORDS,
    HEADER_WORDS,
    PIECE_WORDS,
    SOURCE_WORDS,
    STREAM_WORDS,
)

Numbers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Flags = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
FIXED = len(HEADER_WORDS)
"""The number of words at the begin of every header. Digests of remaps follow them, if there are any."""


@dataclass(frozen=True)
class Base:
    """The rows that a feature looks up, if they are only a part of its table."""

    first: int
    """The row that id 0 means."""
    rows: int
    table: str
    """The user's name of this part."""


class PieceArrays(NamedTuple):
    """The pieces of pooled columns, and the sources of their partial pools."""

    pieces: Tensor
    owners: Numbers
    """For each source, the rank that sends it, or the number of ranks plus the node, if a node sends it."""
    sources: Numbers
    """`[sources, SOURCE_WORDS]`; where the block of the owner begins is 0 here, because it depends on the batch."""


class OwnStreams(NamedTuple):
    """The streams of the features of a rank's own collection."""

    columns: Numbers
    """`[features]`: the number of each feature's stream among those to this rank."""
    pooled: Flags
    """`[features, 1]`: whether the feature is pooled."""
    weighted: Flags
    """`[features, 1]`: whether weights are sent with the ids."""


class _Bucketings(NamedTuple):
    bucketings: Tensor
    shard_streams: Tensor
    """The streams of the shards of all bucketings."""
    layers: int
    """How many rows `slots` has."""


@dataclass(frozen=True)
class StageArrays:
    """A geometry as the arrays that stage kernels read, for one rank and device."""

    geometry: Geometry
    rank: int
    device: torch.device
    bases: Sequence[Base] | None = None
    """The rows of each feature; None if every feature looks up its whole table."""
    exchange_adds: bool = False
    """Whether the exchange itself adds up partial pools, so that a rank receives a single block of sums."""
    requests_pools: bool = False
    """Whether ranks request pools, if that pays, instead of receiving one of every bag."""

    def base(self, feature: int) -> Base:
        """The rows that a feature looks up."""
        if self.bases:
            return self.bases[feature]
        table = self.geometry.spec.table(self.geometry.spec.features[feature].table)
        return Base(0, table.num_embeddings, table.name)

    # ---- What is sent -------------------------------------------------------------------------------------

    @cached_property
    def features(self) -> Tensor:
        """`[features, FEATURE_WORDS]`."""
        rows = []
        spec, layout = self.geometry.spec, self.geometry.layout
        for index, feature in enumerate(spec.features):
            base = self.base(index)
            padding, absent = feature.padding_idx, spec.absent_id(feature)
            facts = {
                "rows": base.rows,
                "padding": -1 if padding is None or absent is not None else padding,
                "absent": absent or 0,
                "base": base.first,
                "divides": int(feature.kind.divisor or 0),
                "divisor_column": layout.divisor_column.get(index, 0),
                "hotness": feature.slots,
                "weighted": int(feature.weighted),
            }
            rows.append([facts[word] for word in FEATURE_WORDS])
        return self._tensor(rows, FEATURE_WORDS)

    @property
    def divisor_width(self) -> int:
        return self.geometry.layout.divisor_width

    @cached_property
    def num_bucketings(self) -> int:
        """The number of bucketings, without those that only look for mistakes in ids of replicated tables."""
        return len(self.geometry.bucketings)

    @cached_property
    def replicated_features(self) -> tuple[int, ...]:
        """The features of replicated tables. Their ids are not sent, but a mistake in them is raised on all ranks."""
        by_name = self.geometry.placement.by_name
        return tuple(i for i, f in enumerate(self.geometry.spec.features) if by_name[f.table].replicated)

    @cached_property
    def _bucketings(self) -> _Bucketings:
        rows: list[list[int]] = []
        shard_streams: list[int] = []
        layers: dict[int, int] = {}
        for bucketing in self.geometry.bucketings:
            streams = [self.geometry.streams[index] for index in bucketing.streams]
            layer = layers.get(bucketing.feature, 0)
            layers[bucketing.feature] = layer + 1
            facts = {
                "feature": bucketing.feature,
                "shards": len(streams),
                "block": streams[0].rows.capacity if streams[0].rows.by == "block" else 0,
                "first": len(shard_streams),
                "sequence": int(streams[0].sequence),
                "layer": layer,
                "checks": int(layer == 0),
            }
            rows.append([facts[word] for word in BUCKETING_WORDS])
            shard_streams += bucketing.streams
        for number, feature in enumerate(self.replicated_features):
            facts = {"feature": feature, "shards": 1, "block": 0, "first": len(shard_streams), "sequence": 0}
            facts |= {"layer": 0, "checks": 1}
            rows.append([facts[word] for word in BUCKETING_WORDS])
            shard_streams.append(len(self.geometry.streams) + number)
        sequences = [b.feature for b in self.geometry.bucketings if self.geometry.streams[b.streams[0]].sequence]
        most = max((layers[feature] for feature in sequences), default=0)
        streams_of_shards = self._tensor([[stream] for stream in shard_streams], ("stream",))
        return _Bucketings(self._tensor(rows, BUCKETING_WORDS), streams_of_shards, most)

    @property
    def bucketings(self) -> Tensor:
        """`[bucketings, BUCKETING_WORDS]`, the bucketings of replicated features at the end."""
        return self._bucketings.bucketings

    @property
    def shard_streams(self) -> Tensor:
        """For each shard of each bucketing, the stream that goes to it."""
        return self._bucketings.shard_streams

    @property
    def layers(self) -> int:
        """The number of rows of `slots`: the most bucketings of a sequence feature."""
        return self._bucketings.layers

    @cached_property
    def length_rows(self) -> list[int]:
        """For each stream, its row of `lengths`; -1 for a sequence."""
        pooled = (index for index, stream in enumerate(self.geometry.streams) if not stream.sequence)
        rows = {index: row for row, index in enumerate(pooled)}
        return [rows.get(index, -1) for index in range(len(self.geometry.streams))]

    @cached_property
    def num_length_rows(self) -> int:
        """The number of rows of `lengths`, with those of replicated features, which are written but not read."""
        return sum(row >= 0 for row in self.length_rows) + len(self.replicated_features)

    @cached_property
    def fixed_words(self) -> int:
        """The number of words at the begin of a header that are the same for all ranks: `FIXED`, and one for each
        remapped table."""
        return FIXED + self.geometry.placement.num_remapped

    @cached_property
    def header_sizes(self) -> list[int]:
        """The number of words of the header to each rank."""
        return [
            self.fixed_words + len(streams) + len(requestable)
            for streams, requestable in zip(self.geometry.streams_to, self.requestable_to, strict=True)
        ]

    @cached_property
    def requestable_to(self) -> tuple[tuple[int, ...], ...]:
        """For each rank, the streams to it whose pools can be requested."""
        return self.geometry.requestable_to if self.requests_pools else ((),) * self.geometry.world_size

    @cached_property
    def header_begins(self) -> list[int]:
        """Where the header to each rank begins, and where the last one ends."""
        return [0, *np.cumsum(self.header_sizes).tolist()]

    @cached_property
    def header_fixed_at(self) -> Numbers:
        """`[ranks, fixed_words]`: the positions of the words that are the same for all ranks."""
        return np.array(self.header_begins[:-1], dtype=np.int64)[:, None] + np.arange(self.fixed_words)

    @cached_property
    def header_fixed(self) -> Tensor:
        """`header_fixed_at` on the device."""
        return torch.from_numpy(self.header_fixed_at).to(self.device)

    @cached_property
    def header_at(self) -> Numbers:
        """For each stream, the position in the header of its number of ids."""
        at = np.zeros(len(self.geometry.streams), dtype=np.int64)
        for begin, streams in zip(self.header_begins, self.geometry.streams_to, strict=False):
            for number, index in enumerate(streams):
                at[index] = begin + self.fixed_words + number
        return at

    @cached_property
    def asked_at(self) -> Numbers:
        """For each stream, the position in the header of its number of requested pools; -1 if its pools cannot be
        requested, as those of this rank itself."""
        at = np.full(len(self.geometry.streams), -1, dtype=np.int64)
        for rank, (begin, streams) in enumerate(zip(self.header_begins, self.requestable_to, strict=False)):
            if rank != self.rank:
                first = begin + self.fixed_words + len(self.geometry.streams_to[rank])
                at[list(streams)] = first + np.arange(len(streams))
        return at

    @cached_property
    def streams(self) -> Tensor:
        """`[streams, STREAM_WORDS]`, those of replicated features at the end."""
        rows = [
            [int(self.header_at[index]), self.length_rows[index], int(stream.weighted), int(self.asked_at[index])]
            for index, stream in enumerate(self.geometry.streams)
        ]
        for number in range(len(self.replicated_features)):
            row = self.num_length_rows - len(self.replicated_features) + number
            rows.append([self.header_begins[-1] + number, row, 0, -1])
        return self._tensor(rows, STREAM_WORDS)

    @property
    def header_words(self) -> int:
        """The number of words of all headers, and of the counts of replicated features after them."""
        return self.header_begins[-1] + len(self.replicated_features)

    @cached_property
    def sending(self) -> BlockShape:
        """The shape of the blocks of ids to each rank."""
        return BlockShape.of(self.geometry, self.geometry.streams_to)

    @cached_property
    def receiving(self) -> BlockShape:
        """The shape of the blocks of ids from each rank, which all have the same streams."""
        own = self.geometry.streams_to[self.rank]
        return BlockShape.of(self.geometry, (own,) * self.geometry.world_size)

    @cached_property
    def sequence_streams(self) -> list[Numbers]:
        """For each bucketing of a sequence, the streams of its shards."""
        sequences = [b for b in self.geometry.bucketings if self.geometry.streams[b.streams[0]].sequence]
        return [np.array(bucketing.streams, dtype=np.int64) for bucketing in sequences]

    @cached_property
    def stream_numbers(self) -> dict[int, int]:
        """The number of each stream to this rank among those to this rank."""
        return {stream: number for number, stream in enumerate(self.geometry.streams_to[self.rank])}

    @cached_property
    def own_streams(self) -> OwnStreams:
        """The streams of the features of this rank's own collection."""
        local = self.geometry.locals[self.rank]
        features = () if local is None else local.features
        streams = [self.geometry.streams[feature.stream] for feature in features]
        columns = np.array([self.stream_numbers[feature.stream] for feature in features], dtype=np.int64)
        pooled = np.array([not stream.sequence for stream in streams], dtype=bool)[:, None]
        weighted = np.array([stream.weighted for stream in streams], dtype=bool)[:, None]
        return OwnStreams(columns, pooled, weighted)

    # ---- What comes back ----------------------------------------------------------------------------------

    @cached_property
    def pieces(self) -> PieceArrays:
        """The pieces of pooled columns, with the partial pools that are combined in a forward."""
        layout, world = self.geometry.layout, self.geometry.world_size
        rows: list[list[int]] = []
        owners: list[int] = []
        sources: list[list[int]] = []
        for piece in self.geometry.pooled_pieces:
            feature = layout.features[piece.feature]
            assert feature.column is not None
            entries = []
            if piece.hierarchical:
                local = self.geometry.locals[piece.owners[0]]
                assert local is not None
                column = piece.owner_columns[0] - local.direct_width
                for node in range(self.geometry.placement.nodes):
                    entries.append((world + node, local.hierarchical_width, column, -1))
            else:
                count = 1 if self.exchange_adds else len(piece.owners)
                partials = zip(piece.owners[:count], piece.owner_columns[:count], piece.streams[:count], strict=True)
                for rank, column, stream in partials:
                    local = self.geometry.locals[rank]
                    assert local is not None
                    entries.append((rank, local.direct_width, column, self.length_rows[stream]))
            facts = {
                "column": piece.column,
                "width": piece.width,
                "action": feature.feature.kind.action,
                "divisor_column": layout.divisor_column.get(piece.feature, 0),
                "first": len(sources),
                "sources": len(entries),
                "winner_column": layout.winner_column.get(piece.feature, 0) + piece.column - feature.column,
            }
            rows.append([facts[word] for word in PIECE_WORDS])
            for rank, width, column, length_row in entries:
                owners.append(rank)
                sources.append([0, width, column, length_row, 0, 0])
        source_words = np.array(sources, dtype=np.int64).reshape(-1, len(SOURCE_WORDS))
        return PieceArrays(self._tensor(rows, PIECE_WORDS), np.array(owners, dtype=np.int64), source_words)

    @cached_property
    def gradients_are_equal(self) -> bool:
        """Whether all ranks get the same gradients of partial pools: every rank holds a shard of the rows of each
        pooled feature, and no feature selects, because then only the shard that won gets a gradient."""
        all_ranks = tuple(range(self.geometry.world_size))
        return not self.exchange_adds and all(
            piece.owners == all_ranks
            and not piece.hierarchical
            and len(set(piece.owner_columns)) == 1
            and not self.geometry.spec.features[piece.feature].kind.selects
            for piece in self.geometry.pooled_pieces
        )

    @cached_property
    def gradient_pieces(self) -> PieceArrays:
        """The pieces of pooled columns, with the partial pools whose gradients are computed in a backward: if all ranks
        get the same gradients, only those of this rank itself."""
        pieces, owners, sources = self.pieces
        if not self.gradients_are_equal or not len(owners):
            return self.pieces
        own = pieces.clone()
        own[:, PIECE_WORDS.index("first")] = torch.arange(len(own), dtype=torch.int64, device=self.device)
        own[:, PIECE_WORDS.index("sources")] = 1
        from_here = owners == self.rank
        return PieceArrays(own, owners[from_here], sources[from_here])

    @property
    def winner_width(self) -> int:
        return self.geometry.layout.winner_width

    def _tensor(self, rows: Sequence[Sequence[int]], words: Sequence[str]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, len(words)).to(self.device)


@dataclass(frozen=True)
class Blocks:
    """The positions of the parts of blocks of ids, `[ranks, streams]` each, in 4-byte words from the begin of the first
    block."""

    ids_at: Numbers
    lengths_at: Numbers
    weights_at: Numbers
    asked_at: Numbers
    """The positions of the lists of samples whose pools are requested."""
    sizes: Numbers
    """`[ranks]`: the number of words of each block."""


@dataclass(frozen=True)
class BlockShape:
    """What blocks of ids contain, in every batch: there is one block per rank, with some streams."""

    index: Numbers
    """`[ranks, streams]`: the streams of each block, padded with -1."""
    pooled: Numbers
    """`[ranks, streams]`: 1 for a pooled stream, otherwise 0."""
    weighted: Numbers
    """`[ranks, streams]`: 1 for a stream with weights, otherwise 0."""
    id_words: int
    """The 4-byte words of an id."""

    @classmethod
    def of(cls, geometry: Geometry, streams: Sequence[Sequence[int]]) -> BlockShape:
        """The shape of blocks with these streams, for each rank."""
        most = max(map(len, streams), default=0)
        index = np.full((len(streams), most), -1, dtype=np.int64)
        pooled, weighted = np.zeros_like(index), np.zeros_like(index)
        for rank, of_rank in enumerate(streams):
            for number, stream in enumerate(of_rank):
                index[rank, number] = stream
                pooled[rank, number] = not geometry.streams[stream].sequence
                weighted[rank, number] = geometry.streams[stream].weighted
        return cls(index, pooled, weighted, 2 if geometry.wide_ids else 1)

    def blocks(self, counts: Numbers, samples: Numbers, requested: Numbers) -> Blocks:
        """The blocks of a batch with `counts[rank, stream]` ids, `samples[rank]` samples and `requested[rank, stream]`
        requested pools. A block has first ids, then lengths, then weights, then samples whose pools are requested."""
        id_words, length_words = counts * self.id_words, self.pooled * samples[:, None]
        weight_words = counts * self.weighted
        of_ids, of_lengths = id_words.sum(1, keepdims=True), length_words.sum(1, keepdims=True)
        of_weights = weight_words.sum(1, keepdims=True)
        sizes = (of_ids + of_lengths + of_weights)[:, 0] + requested.sum(1)
        sizes = -(-sizes // self.id_words) * self.id_words  # wide ids stay aligned
        begins = _before(sizes[None])[0][:, None]
        return Blocks(
            begins + _before(id_words),
            begins + of_ids + _before(length_words),
            begins + of_ids + of_lengths + _before(weight_words),
            begins + of_ids + of_lengths + of_weights + _before(requested),
            sizes,
        )


def _before(numbers: Numbers) -> Numbers:
    """For each number, the sum of those before it in its row."""
    sums: Numbers = np.cumsum(numbers, axis=1) - numbers
    return sums
