"""Which pools are sent: if ranks request pools, no empty ones, and equal ones only once.

A rank knows the ids and lengths of its bags, so it knows which of their pools are zeros, and which are equal: the pool
of a bag with one id and no weight is a row. With the ids, it sends to an owner the samples whose pools it requests. The
owner sends pools in that order, and `pools` has for every sample the number of its pool. If that saves less than a
quarter, the owner sends one pool for every sample instead. Gradients always have one row per sample, so that they are
added up in the order of samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from torch import Tensor

from embforge.codegen.planner.traffic import worth_requesting
from embforge.codegen.sharding.geometry import Geometry
from embforge.codegen.stages import PICK_WORDS, SOURCE_WORDS
from embforge.sharded.exchange.formats import row_bytes
from embforge.sharded.stages.stage_metadata import Numbers, StageArrays

Flags = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
_BLOCK_AT, _ROW_WIDTH, _COLUMN, _ASKED = (SOURCE_WORDS.index(w) for w in ("block_at", "row_width", "column", "asked"))


@dataclass(frozen=True, eq=False)
class PoolRequests:
    """The pools that the ranks request from each other for one batch."""

    sent_counts: Numbers
    """`[streams]`: how many pools of each stream this rank requests."""
    owners: Flags
    """`[ranks]`: whether this rank requests pools from each owner. The others send a pool of every bag."""
    received_counts: Numbers
    """`[ranks, streams to this rank]`: how many pools of each stream each rank requests from this one."""
    sources: Flags
    """`[ranks]`: whether each rank requests pools from this one."""

    @property
    def sent_key(self) -> tuple[bytes, bytes]:
        """The requests of this rank, as a key of a dictionary."""
        return self.sent_counts.tobytes(), self.owners.tobytes()

    @property
    def received_key(self) -> tuple[bytes, bytes]:
        """The requests to this rank, as a key of a dictionary."""
        return self.received_counts.tobytes(), self.sources.tobytes()


@dataclass(frozen=True, eq=False)
class RequestedPools:
    """What a rank knows about requested pools after ids have been exchanged."""

    requests: PoolRequests
    pools: Tensor
    """int32 `[pooled streams, batch]`: the number of each bag's pool among those that its stream requests; -1 for an
    empty bag."""
    words: Tensor
    """The words that other ranks sent, which contain the lists of samples whose pools they request."""
    lists_at: Numbers
    """`[ranks, streams to this rank]`: where each list begins in `words`."""


class _DirectFeatures(NamedTuple):
    """The features whose pools owners send directly, by rank and column."""

    rank: Numbers
    stream: Numbers
    width: Numbers


@dataclass(frozen=True)
class PoolRequester:
    """Decides which pools are requested in a batch, and where they are in the blocks that owners send."""

    arrays: StageArrays

    @property
    def geometry(self) -> Geometry:
        return self.arrays.geometry

    @cached_property
    def _features(self) -> _DirectFeatures:
        features = [(f.rank, f.stream, f.width) for f in self.geometry.direct_features]
        return _DirectFeatures(*np.array(features, dtype=np.int64).reshape(-1, 3).T)

    @cached_property
    def _costs(self) -> tuple[Numbers, Numbers]:
        """`[ranks, streams]`: the words that a requested pool of a stream costs, which are its numbers and an entry in
        the list; and `[ranks]`: the numbers that a rank sends per sample if no pools are requested from it."""
        geometry, columns = self.geometry, np.array(self.geometry.direct_columns, dtype=np.int64)
        costs = np.zeros((geometry.world_size, len(columns)), dtype=np.int64)
        for rank, streams in enumerate(self.arrays.requestable_to):
            costs[rank, list(streams)] = columns[list(streams)] + 1
        return costs, (costs - (costs > 0)).sum(1)

    @cached_property
    def _own_numbers(self) -> list[int]:
        """The numbers, among the streams to this rank, of those whose pools can be requested."""
        return [self.arrays.stream_numbers[t] for t in self.arrays.requestable_to[self.arrays.rank]]

    def requests(self, requested: Numbers, own_header: Numbers, samples: Numbers) -> PoolRequests | None:
        """The requests of a batch, None if no pools are requested from this rank or by it.

        `requested` (`[ranks, streams to this rank whose pools can be requested]`) has the numbers of pools that the
        ranks could request, from the headers that they sent; `own_header` is the header of this rank.
        """
        rank, at = self.arrays.rank, self.arrays.asked_at
        costs, columns = self._costs
        sent_counts = np.where(at >= 0, own_header[at], 0)
        owners = worth_requesting(costs @ sent_counts, samples[rank], columns) & (columns > 0)
        own_costs = costs[rank, list(self.arrays.requestable_to[rank])]
        sources = worth_requesting(requested @ own_costs, samples, columns[rank]) & bool(columns[rank])
        owners[rank] = sources[rank] = False
        if not (owners.any() or sources.any()):
            return None
        received_counts = np.zeros((len(costs), len(self.geometry.streams_to[rank])), dtype=np.int64)
        received_counts[:, self._own_numbers] = requested
        return PoolRequests(sent_counts, owners, received_counts, sources)

    def received_numbers(self, requests: PoolRequests, samples: int) -> Numbers:
        """For each rank, how many numbers its pools for this rank's samples have; 0 for this rank itself, which does
        not send to itself."""
        rank, stream, width = self._features
        rows = np.where(requests.owners[rank], requests.sent_counts[stream], samples)
        sizes = np.bincount(rank, weights=rows * width, minlength=self.geometry.world_size).astype(np.int64)
        sizes[self.arrays.rank] = 0
        return sizes

    def requested_runs(self, requests: PoolRequests, owner: int) -> list[tuple[int, list[int]]]:
        """The sections of the block that this rank requests from an owner: for each feature, rows and width."""
        rank, stream, width = self._features
        of_owner = rank == owner
        counts, widths = requests.sent_counts[stream[of_owner]].tolist(), width[of_owner].tolist()
        return [(count, [columns]) for count, columns in zip(counts, widths, strict=True)]

    def sources_in_batch(
        self, requests: PoolRequests, begins: tuple[int, ...], owners: Numbers, sources: Numbers
    ) -> Numbers:
        """The sources of `network_forward` with their positions in the blocks of this batch. `begins` says where the
        block of each owner begins; `owners` and `sources` are those of `PieceArrays`, for blocks with all pools."""
        rank, stream, width = self._features
        result = sources.copy()
        result[:, _BLOCK_AT] = np.array(begins)[owners]
        are_ranks = owners < self.geometry.world_size  # others are nodes
        requested = are_ranks & requests.owners[np.where(are_ranks, owners, 0)]
        if not requested.any():
            return result
        sizes = requests.sent_counts[stream] * width
        before = np.cumsum(sizes) - sizes
        in_block = before - before[np.searchsorted(rank, rank)]  # counted from the first feature of the rank
        features = self._feature_of(owners[requested], sources[requested, _COLUMN])
        result[requested, _BLOCK_AT] += in_block[features]
        result[requested, _ROW_WIDTH] = width[features]
        result[requested, _COLUMN] = 0
        result[requested, _ASKED] = 1
        return result

    def _feature_of(self, owners: Numbers, columns: Numbers) -> Numbers:
        """The direct features that begin at these columns of the owners' results."""
        keys, columns_per_rank = self._column_keys
        return np.searchsorted(keys, owners * columns_per_rank + columns)

    @cached_property
    def _column_keys(self) -> tuple[Numbers, int]:
        """The rank and column of each direct feature as one number, and the factor of the rank in it."""
        columns = np.array([(f.rank, f.column) for f in self.geometry.direct_features], dtype=np.int64).reshape(-1, 2)
        columns_per_rank = int(columns[:, 1].max(initial=0)) + 1
        return columns[:, 0] * columns_per_rank + columns[:, 1], columns_per_rank

    def picks(self, requested: RequestedPools, samples: tuple[int, ...], format: str) -> tuple[Numbers, list[int]]:
        """The picks of stage `gather`, which copies the pools that other ranks request, and the number of bytes for
        each rank."""
        ranks, streams, widths = self._features
        own = ranks == self.arrays.rank
        numbers = np.array([self.arrays.stream_numbers[t] for t in streams[own].tolist()], dtype=np.int64)
        sizes = np.array([row_bytes(format, [width]) for width in widths[own].tolist()], dtype=np.int64)
        sources = np.flatnonzero(requested.requests.sources)
        counts = requested.requests.received_counts[sources][:, numbers]
        copied = counts * sizes
        firsts = np.cumsum(samples) - samples
        words = {
            "row": np.broadcast_to(firsts[sources][:, None], counts.shape),
            "byte": np.broadcast_to(np.cumsum(sizes) - sizes, counts.shape),
            "bytes": np.broadcast_to(sizes, counts.shape),
            "asked_from": requested.lists_at[sources][:, numbers],
            "count": counts,
            "to": (np.cumsum(copied.reshape(-1)) - copied.reshape(-1)).reshape(counts.shape),
        }
        picks = np.stack([words[word].reshape(-1) for word in PICK_WORDS], axis=1)
        bytes_of_ranks = np.zeros(self.geometry.world_size, dtype=np.int64)
        bytes_of_ranks[sources] = copied.sum(1)
        return picks, bytes_of_ranks.tolist()
