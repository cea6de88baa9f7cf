"""Which pools travel: where ranks ask for them, no empty ones, and equal ones once.

A rank knows the ids and lengths of its bags, so it knows which of their pools are zeros and which are equal: bags of
one id without a weight are rows. It tells an owner the samples whose pools it wants, beside the ids; what comes back
stands in that order, and `pools` says of every sample which it is. Where that saves less than a quarter, all pools
come, a row a sample. Gradients always travel a row a sample, so that they are added up in the order of samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from embforge.codegen.planner.traffic import worth_asking
from embforge.codegen.sharding.geometry import Geometry
from embforge.codegen.stages import PICK_WORDS, SOURCE_WORDS
from embforge.sharded.exchange.formats import row_bytes
from embforge.sharded.stages.stage_metadata import Numbers, Wiring

Flags = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
_BLOCK_AT, _ROW_WIDTH, _COLUMN, _ASKED = (SOURCE_WORDS.index(w) for w in ("block_at", "row_width", "column", "asked"))


@dataclass(frozen=True, eq=False)
class Asked:
    """What the ranks ask each other for in one batch."""

    of_owners: Numbers
    """`[streams]` pools that this rank asks for."""
    owners: Flags
    """`[ranks]`: whether this rank asks each owner; else it gets a pool of every bag."""
    by_sources: Numbers
    """`[ranks, streams to this rank]` pools that each rank asks this one for."""
    sources: Flags
    """`[ranks]`: whether each rank asks this one."""

    @property
    def outgoing(self) -> tuple[bytes, bytes]:
        """What this rank asks for, as a key."""
        return self.of_owners.tobytes(), self.owners.tobytes()

    @property
    def incoming(self) -> tuple[bytes, bytes]:
        """What it is asked for, as a key."""
        return self.by_sources.tobytes(), self.sources.tobytes()


@dataclass(frozen=True, eq=False)
class Wanted:
    """What is known of asked pools once ids have been exchanged."""

    asked: Asked
    pools: Tensor
    """int32 `[pooled streams, batch]`: which of the pools that its stream asked for a bag gets; -1: it is empty."""
    words: Tensor
    """Words that came in, with the lists of samples."""
    lists_at: Numbers
    """`[ranks, streams to this rank]`: where each list begins."""


@dataclass(frozen=True)
class Askers:
    """The direct features of all ranks as arrays, and what follows from them for a batch."""

    wiring: Wiring

    @property
    def geometry(self) -> Geometry:
        return self.wiring.geometry

    @cached_property
    def _features(self) -> tuple[Numbers, Numbers, Numbers]:
        """Of each direct feature, by rank and column: its rank, stream and width."""
        found = [(f.rank, f.stream, f.width) for f in self.geometry.direct_features]
        rank, stream, width = np.array(found, dtype=np.int64).reshape(-1, 3).T
        return rank, stream, width

    @cached_property
    def _prices(self) -> tuple[Numbers, Numbers]:
        """`[ranks, streams]` what a pool of a stream costs if its owner is asked for it: its numbers, and its place in
        the list; `[ranks]` the numbers of a sample if nobody asks."""
        geometry, columns = self.geometry, np.array(self.geometry.direct_columns, dtype=np.int64)
        prices = np.zeros((geometry.world_size, len(columns)), dtype=np.int64)
        for rank, asking in enumerate(self.wiring.asking_to):
            prices[rank, list(asking)] = columns[list(asking)] + 1
        return prices, (prices - (prices > 0)).sum(1)

    @cached_property
    def _own_numbers(self) -> list[int]:
        """Of the streams to this rank that ask, which they are among all that go to it."""
        return [self.wiring.stream_numbers[t] for t in self.wiring.asking_to[self.wiring.rank]]

    def asked(self, told: Numbers, host_header: Numbers, samples: Numbers) -> Asked | None:
        """Of headers that came (`[ranks, asking streams to this rank]` numbers of pools) and of this rank's own. None:
        nobody asks this rank, which asks nobody."""
        rank, places = self.wiring.rank, self.wiring.asked_at
        prices, columns = self._prices
        of_owners = np.where(places >= 0, host_header[places], 0)
        owners = worth_asking(prices @ of_owners, samples[rank], columns) & (columns > 0)
        own_prices = prices[rank, list(self.wiring.asking_to[rank])]
        sources = worth_asking(told @ own_prices, samples, columns[rank]) & bool(columns[rank])
        owners[rank] = sources[rank] = False
        if not (owners.any() or sources.any()):
            return None
        by_sources = np.zeros((len(prices), len(self.geometry.streams_to[rank])), dtype=np.int64)
        by_sources[:, self._own_numbers] = told
        return Asked(of_owners, owners, by_sources, sources)

    def numbers(self, asked: Asked, samples: int) -> Numbers:
        """Of each rank, the numbers of its pools that come to this rank's samples; its own do not travel."""
        rank, stream, width = self._features
        rows = np.where(asked.owners[rank], asked.of_owners[stream], samples)
        sizes = np.bincount(rank, weights=rows * width, minlength=self.geometry.world_size).astype(np.int64)
        sizes[self.wiring.rank] = 0
        return sizes

    def runs(self, asked: Asked, owner: int) -> list[tuple[int, list[int]]]:
        """Rows and width of each feature of a block that this rank asked an owner for."""
        rank, stream, width = self._features
        mine = rank == owner
        rows, widths = asked.of_owners[stream[mine]].tolist(), width[mine].tolist()
        return [(count, [wide]) for count, wide in zip(rows, widths, strict=True)]

    def placed(self, asked: Asked, begins: tuple[int, ...], owners: Numbers, sources: Numbers) -> Numbers:
        """Sources of `network_forward` with their places in blocks; `sources` as `Wiring.pieces` has them, in dense
        blocks."""
        rank, stream, width = self._features
        placed = sources.copy()
        placed[:, _BLOCK_AT] = np.array(begins)[owners]
        inside = owners < self.geometry.world_size  # others are nodes
        asks = inside & asked.owners[np.where(inside, owners, 0)]
        if not asks.any():
            return placed
        sizes = asked.of_owners[stream] * width
        before = np.cumsum(sizes) - sizes
        within = before - before[np.searchsorted(rank, rank)]  # behind the rank's first feature
        found = self._feature_of(owners[asks], sources[asks, _COLUMN])
        placed[asks, _BLOCK_AT] += within[found]
        placed[asks, _ROW_WIDTH] = width[found]
        placed[asks, _COLUMN] = 0
        placed[asks, _ASKED] = 1
        return placed

    def _feature_of(self, owners: Numbers, columns: Numbers) -> Numbers:
        """The direct feature that stands at a column of an owner's results."""
        keys, most = self._places
        return np.searchsorted(keys, owners * most + columns)

    @cached_property
    def _places(self) -> tuple[Numbers, int]:
        """Rank and column of each direct feature as one number, and what a rank counts in it."""
        known = np.array([(f.rank, f.column) for f in self.geometry.direct_features], dtype=np.int64).reshape(-1, 2)
        most = int(known[:, 1].max(initial=0)) + 1
        return known[:, 0] * most + known[:, 1], most

    def picks(self, wanted: Wanted, samples: tuple[int, ...], format: str) -> tuple[Numbers, list[int]]:
        """What `gather` copies for the ranks that ask, and how many bytes each of them gets."""
        ranks, streams, widths = self._features
        mine = ranks == self.wiring.rank
        numbers = np.array([self.wiring.stream_numbers[t] for t in streams[mine].tolist()], dtype=np.int64)
        sizes = np.array([row_bytes(format, [width]) for width in widths[mine].tolist()], dtype=np.int64)
        asking = np.flatnonzero(wanted.asked.sources)
        counts = wanted.asked.by_sources[asking][:, numbers]
        moved = counts * sizes
        firsts = np.cumsum(samples) - samples
        found = {
            "row": np.broadcast_to(firsts[asking][:, None], counts.shape),
            "byte": np.broadcast_to(np.cumsum(sizes) - sizes, counts.shape),
            "bytes": np.broadcast_to(sizes, counts.shape),
            "asked_from": wanted.lists_at[asking][:, numbers],
            "count": counts,
            "to": (np.cumsum(moved.reshape(-1)) - moved.reshape(-1)).reshape(counts.shape),
        }
        picks = np.stack([found[word].reshape(-1) for word in PICK_WORDS], axis=1)
        each = np.zeros(self.geometry.world_size, dtype=np.int64)
        each[asking] = moved.sum(1)
        return picks, each.tolist()
