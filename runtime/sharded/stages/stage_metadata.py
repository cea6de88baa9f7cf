"""What the stage kernels know of a geometry: int64 arrays on the module's device, made once a module and device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

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


@dataclass(frozen=True)
class Base:
    """Where a feature's ids begin among the rows of its table, and how many it may have, if it is not the whole."""

    first: int
    rows: int
    table: str
    """What the user calls that part."""


@dataclass(frozen=True)
class Wiring:
    """A geometry as arrays. `bases`: of features that look up a part of their table."""

    geometry: Geometry
    rank: int
    device: torch.device
    bases: Sequence[Base] | None = None
    added_on_the_way: bool = False
    """Whether the exchange itself adds partial pools, so that one block of sums comes of all ranks."""
    asks: bool = False
    """Whether ranks ask for pools, where that pays, instead of getting one of every bag."""

    def base(self, feature: int) -> Base:
        """The rows that a feature looks up."""
        if self.bases:
            return self.bases[feature]
        table = self.geometry.spec.table(self.geometry.spec.features[feature].table)
        return Base(0, table.num_embeddings, table.name)

    # ---- What is sent -------------------------------------------------------------------------------------

    @cached_property
    def features(self) -> Tensor:
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
        """Without those that only look for mistakes."""
        return len(self.geometry.bucketings)

    @cached_property
    def replicated_features(self) -> tuple[int, ...]:
        """Features of replicated tables: their ids go nowhere, but a mistake in them is everybody's."""
        by_name = self.geometry.placement.by_name
        return tuple(i for i, f in enumerate(self.geometry.spec.features) if by_name[f.table].replicated)

    @cached_property
    def _bucketings(self) -> tuple[Tensor, Tensor, int]:
        """The bucketings, the streams of their shards, and how many layers of slots there are."""
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
        return self._tensor(rows, BUCKETING_WORDS), self._tensor([[s] for s in shard_streams], ("stream",)), most

    @property
    def bucketings(self) -> Tensor:
        return self._bucketings[0]

    @property
    def shard_streams(self) -> Tensor:
        return self._bucketings[1]

    @property
    def layers(self) -> int:
        """Rows of `slots`: the most bucketings that a sequence feature has."""
        return self._bucketings[2]

    @cached_property
    def length_rows(self) -> list[int]:
        """Of each stream, its row of `lengths`; -1: a sequence."""
        pooled = (index for index, stream in enumerate(self.geometry.streams) if not stream.sequence)
        rows = {index: row for row, index in enumerate(pooled)}
        return [rows.get(index, -1) for index in range(len(self.geometry.streams))]

    @cached_property
    def num_length_rows(self) -> int:
        """With those of replicated features, which nobody reads."""
        return sum(row >= 0 for row in self.length_rows) + len(self.replicated_features)

    @cached_property
    def header_sizes(self) -> list[int]:
        """Words of the header to each rank."""
        return [
            FIXED + len(streams) + len(asking)
            for streams, asking in zip(self.geometry.streams_to, self.asking_to, strict=True)
        ]

    @cached_property
    def asking_to(self) -> tuple[tuple[int, ...], ...]:
        """For each rank the streams to it whose pools are asked for."""
        return self.geometry.asking_to if self.asks else ((),) * self.geometry.world_size

    @cached_property
    def header_begins(self) -> list[int]:
        return [0, *np.cumsum(self.header_sizes).tolist()]

    @cached_property
    def header_places(self) -> Numbers:
        """`[ranks, FIXED]`: where the words lie that are the same for all."""
        return np.array(self.header_begins[:-1], dtype=np.int64)[:, None] + np.arange(FIXED)

    @cached_property
    def header_fixed(self) -> Tensor:
        """The same on the device."""
        return torch.from_numpy(self.header_places).to(self.device)

    @cached_property
    def header_at(self) -> Numbers:
        """Of each stream, where the header has its count."""
        places = np.zeros(len(self.geometry.streams), dtype=np.int64)
        for begin, streams in zip(self.header_begins, self.geometry.streams_to, strict=False):
            for number, index in enumerate(streams):
                places[index] = begin + FIXED + number
        return places

    @cached_property
    def asked_at(self) -> Numbers:
        """Of each stream, where the header has the number of pools asked for; -1: none are, as of a rank itself."""
        places = np.full(len(self.geometry.streams), -1, dtype=np.int64)
        for rank, (begin, asking) in enumerate(zip(self.header_begins, self.asking_to, strict=False)):
            if rank != self.rank:
                places[list(asking)] = begin + FIXED + len(self.geometry.streams_to[rank]) + np.arange(len(asking))
        return places

    @cached_property
    def streams(self) -> Tensor:
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
        """Of the whole header, with the counts of replicated features behind it."""
        return self.header_begins[-1] + len(self.replicated_features)

    @cached_property
    def sending(self) -> BlockShape:
        """Blocks to each rank."""
        return BlockShape.of(self.geometry, self.geometry.streams_to)

    @cached_property
    def receiving(self) -> BlockShape:
        """Blocks from each rank: all of the same streams."""
        own = self.geometry.streams_to[self.rank]
        return BlockShape.of(self.geometry, (own,) * self.geometry.world_size)

    @cached_property
    def sequence_streams(self) -> list[Numbers]:
        """Of each bucketing of a sequence the streams of its shards."""
        found = [b.streams for b in self.geometry.bucketings if self.geometry.streams[b.streams[0]].sequence]
        return [np.array(streams, dtype=np.int64) for streams in found]

    @cached_property
    def stream_numbers(self) -> dict[int, int]:
        """Of each stream that comes here its number among them."""
        return {stream: number for number, stream in enumerate(self.geometry.streams_to[self.rank])}

    @cached_property
    def own_streams(self) -> tuple[Numbers, Flags, Flags]:
        """Of each feature of this rank's own collection: its stream among those that come here; whether it is
        pooled, and
        weighted, `[features, 1]` each."""
        local = self.geometry.locals[self.rank]
        features = () if local is None else local.features
        streams = [self.geometry.streams[feature.stream] for feature in features]
        columns = np.array([self.stream_numbers[feature.stream] for feature in features], dtype=np.int64)
        pooled = np.array([not stream.sequence for stream in streams], dtype=bool)[:, None]
        return columns, pooled, np.array([stream.weighted for stream in streams], dtype=bool)[:, None]

    # ---- What comes back ----------------------------------------------------------------------------------

    @cached_property
    def pieces(self) -> tuple[Tensor, Numbers, Numbers]:
        """Pieces; of every partial pool its rank (its node's, behind all ranks, if it takes the hierarchical way) and
        its words but for where its block begins."""
        layout, world = self.geometry.layout, self.geometry.world_size
        rows: list[list[int]] = []
        owners: list[int] = []
        sources: list[list[int]] = []
        for piece in self.geometry.pooled_pieces:
            placed = layout.features[piece.feature]
            assert placed.column is not None
            entries = []
            if piece.hierarchical:
                local = self.geometry.locals[piece.owners[0]]
                assert local is not None
                column = piece.owner_columns[0] - local.direct_width
                for node in range(self.geometry.placement.nodes):
                    entries.append((world + node, local.hierarchical_width, column, -1))
            else:
                shown = 1 if self.added_on_the_way else len(piece.owners)
                owned = zip(piece.owners[:shown], piece.owner_columns[:shown], piece.streams[:shown], strict=True)
                for rank, column, stream in owned:
                    local = self.geometry.locals[rank]
                    assert local is not None
                    entries.append((rank, local.direct_width, column, self.length_rows[stream]))
            facts = {
                "column": piece.column,
                "width": piece.width,
                "action": placed.feature.kind.action,
                "divisor_column": layout.divisor_column.get(piece.feature, 0),
                "first": len(sources),
                "sources": len(entries),
                "winner_column": layout.winner_column.get(piece.feature, 0) + piece.column - placed.column,
            }
            rows.append([facts[word] for word in PIECE_WORDS])
            for rank, width, column, length_row in entries:
                owners.append(rank)
                sources.append([0, width, column, length_row, 0, 0])
        shaped = np.array(sources, dtype=np.int64).reshape(-1, len(SOURCE_WORDS))
        return self._tensor(rows, PIECE_WORDS), np.array(owners, dtype=np.int64), shaped

    @cached_property
    def alike(self) -> bool:
        """Whether all ranks get the very same gradients: each holds a shard of the rows of all that is pooled, and no
        feature selects winners, which are on one of them."""
        everyone = tuple(range(self.geometry.world_size))
        return not self.added_on_the_way and all(
            piece.owners == everyone
            and not piece.hierarchical
            and len(set(piece.owner_columns)) == 1
            and not self.geometry.spec.features[piece.feature].kind.selects
            for piece in self.geometry.pooled_pieces
        )

    @cached_property
    def gradient_pieces(self) -> tuple[Tensor, Numbers, Numbers]:
        """As `pieces`, for gradients: where all ranks get the same, only this rank's own."""
        pieces, owners, sources = self.pieces
        if not self.alike or not len(owners):
            return self.pieces
        own = pieces.clone()
        own[:, PIECE_WORDS.index("first")] = torch.arange(len(own), dtype=torch.int64, device=self.device)
        own[:, PIECE_WORDS.index("sources")] = 1
        mine = owners == self.rank
        return own, owners[mine], sources[mine]

    @property
    def winner_width(self) -> int:
        return self.geometry.layout.winner_width

    def _tensor(self, rows: Sequence[Sequence[int]], words: Sequence[str]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, len(words)).to(self.device)


@dataclass(frozen=True)
class Blocks:
    """Where the parts of blocks of ids lie, in words of 4 bytes from the first block's begin, `[ranks, streams]`
    each."""

    ids_at: Numbers
    lengths_at: Numbers
    weights_at: Numbers
    asked_at: Numbers
    """Of which samples pools are asked for."""
    sizes: Numbers
    """Words of every block."""


@dataclass(frozen=True)
class BlockShape:
    """What blocks of ids hold, whatever the batch: one block a rank, of some streams (rows padded with none)."""

    index: Numbers
    """`[ranks, streams]`: the stream, -1: none."""
    pooled: Numbers
    weighted: Numbers
    id_words: int

    @classmethod
    def of(cls, geometry: Geometry, streams: Sequence[Sequence[int]]) -> BlockShape:
        most = max(map(len, streams), default=0)
        index = np.full((len(streams), most), -1, dtype=np.int64)
        pooled, weighted = np.zeros_like(index), np.zeros_like(index)
        for rank, of_rank in enumerate(streams):
            for number, stream in enumerate(of_rank):
                index[rank, number] = stream
                pooled[rank, number] = not geometry.streams[stream].sequence
                weighted[rank, number] = geometry.streams[stream].weighted
        return cls(index, pooled, weighted, 2 if geometry.wide_ids else 1)

    def blocks(self, counts: Numbers, samples: Numbers, asked: Numbers) -> Blocks:
        """`counts[rank, stream]` ids, `samples[rank]` samples, `asked[rank, stream]` pools: of every block first ids,
        then lengths, then weights, then samples asked for."""
        id_words, length_words = counts * self.id_words, self.pooled * samples[:, None]
        weight_words = counts * self.weighted
        of_ids, of_lengths = id_words.sum(1, keepdims=True), length_words.sum(1, keepdims=True)
        of_weights = weight_words.sum(1, keepdims=True)
        sizes = (of_ids + of_lengths + of_weights)[:, 0] + asked.sum(1)
        sizes = -(-sizes // self.id_words) * self.id_words  # wide ids stay aligned
        begins = _before(sizes[None])[0][:, None]
        return Blocks(
            begins + _before(id_words),
            begins + of_ids + _before(length_words),
            begins + of_ids + of_lengths + _before(weight_words),
            begins + of_ids + of_lengths + of_weights + _before(asked),
            sizes,
        )


def _before(numbers: Numbers) -> Numbers:
    """Of each row, what stands before each number."""
    found: Numbers = np.cumsum(numbers, axis=1) - numbers
    return found
