"""The definition of the stages that distribute ids to ranks, in plain loops, for `ReferenceStages`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from embforge.codegen import stages as words
from embforge.codegen.poolings import Divisor
from embforge.codegen.stages import ABSENT, MISTAKES
from embforge.launch.reference.forward import canonical_reduce, ieee_sqrt

Record = dict[str, int]
UNCHECKED = 2**64 - 1
"""The number of rows of a table whose ids are not checked."""


def records(array: Tensor, names: Sequence[str]) -> list[Record]:
    """The rows of a metadata array as dictionaries; `names` are the names of a row's words."""
    return [dict(zip(names, row, strict=True)) for row in array.reshape(-1, len(names)).tolist()]


class IdBatch:
    """A batch, and how its ids are distributed, as Python numbers."""

    def __init__(self, features: Tensor, bucketings: Tensor, shard_streams: Tensor, streams: Tensor, values: Tensor,
                 offsets: Tensor, weights: Tensor | None, num_features: int, num_bucketings: int, batch: int,
                 num_values: int, bounds: int) -> None:  # fmt: skip
        self.features = records(features, words.FEATURE_WORDS)[:num_features]
        self.bucketings = records(bucketings, words.BUCKETING_WORDS)[:num_bucketings]
        self.streams = records(streams, words.STREAM_WORDS)
        self._shard_streams = shard_streams.flatten().tolist()
        self.ids: list[int] = values[:num_values].tolist()
        self.borders: list[int] = offsets.tolist()
        self.weights, self.device = weights, values.device
        self.size, self.bounds = batch, bounds

    def stream_of(self, bucketing: Record, shard: int) -> int:
        """The index of the stream that goes to a shard."""
        return int(self._shard_streams[bucketing["first"] + shard])

    def layer_of(self, slots: Tensor, bucketing: Record) -> Tensor:
        """The slots of a bucketing's ids: one number per id of the batch."""
        return slots.flatten()[bucketing["layer"] * len(self.ids) :][: len(self.ids)]

    def positions(self, feature: int) -> range:
        """The positions of a feature's ids."""
        return range(self.borders[feature * self.size], self.borders[(feature + 1) * self.size])

    def bag(self, feature: int, sample: int) -> range:
        """The positions of the ids of a bag."""
        return range(*self.borders[feature * self.size + sample :][:2])

    def is_row(self, bucketing: Record, position: int) -> bool:
        """Whether an id is a row of its table."""
        rows = UNCHECKED if self.bounds == 2 else self.features[bucketing["feature"]]["rows"] % 2**64
        return self.ids[position] % 2**64 < rows

    def is_present(self, bucketing: Record, position: int) -> bool:
        """Whether an id counts: it is a row, and is not the padding id of a pooled feature."""
        pads = self.ids[position] == self.features[bucketing["feature"]]["padding"] and not bucketing["sequence"]
        return self.is_row(bucketing, position) and not pads

    def owned(self, bucketing: Record, position: int) -> tuple[int, int]:
        """The shard that holds the row of an id, and the number of the row in the shard."""
        row = (self.ids[position] + self.features[bucketing["feature"]]["base"]) % 2**64
        shards, block = bucketing["shards"], bucketing["block"]
        if shards == 1:
            return 0, row
        if not block:
            return row % shards, row // shards
        return (row // block, row % block) if row // block < shards else (shards - 1, 0)

    def weight_of(self, positions: Sequence[int]) -> Tensor:
        """The weights at these positions; ones if the batch has no weights."""
        if self.weights is None:
            return torch.ones(len(positions), dtype=torch.float32, device=self.device)
        return self.weights[list(positions)]

    def bad_border(self) -> list[int] | None:
        """The first mistake in the offsets as the numbers kind, feature, sample, position and value; None if there is
        none."""

        def mistake(kind: str, bag: int, position: int, value: int) -> list[int]:
            return [MISTAKES.index(kind) + 1, *(divmod(bag, self.size) if self.size else (0, 0)), position, value]

        bags = len(self.features) * self.size
        if self.borders[0]:
            return mistake("BAD_OFFSET", 0, 0, self.borders[0])
        for bag in range(bags):
            if self.borders[bag + 1] < self.borders[bag]:
                return mistake("BAD_OFFSET", bag, bag + 1, self.borders[bag + 1])
        if self.borders[bags] != len(self.ids):
            return mistake("BAD_OFFSET", max(bags - 1, 0), bags, self.borders[bags])
        for bag in range(bags):
            hotness = self.features[bag // self.size]["hotness"]
            length = self.borders[bag + 1] - self.borders[bag]
            if hotness and length > hotness:
                return mistake("LONG_CONCAT", bag, hotness, length)
        return None

    def bad_id(self, bucketing: Record) -> list[int] | None:
        """The first id of a bucketing that is not a row, in the form of `bad_border`; None if there is none, or if such
        ids are allowed."""
        if not bucketing["checks"] or self.bounds != 0:
            return None
        feature = bucketing["feature"]
        for sample in range(self.size):
            bag = self.bag(feature, sample)
            for position in bag:
                absent = self.ids[position] == self.features[feature]["absent"]
                if not self.is_row(bucketing, position) and not absent:
                    kind = MISTAKES.index("BAD_ID") + 1
                    return [kind, feature, sample, position - bag.start, self.ids[position]]
        return None


def count_pooled(batch: IdBatch, bucketing: Record, lengths: Tensor, header: Tensor) -> None:
    """Counts the ids of a pooled feature that go to each shard: per sample in `lengths`, and in total in `header`."""
    counts = torch.zeros(bucketing["shards"], batch.size, dtype=torch.int32, device=lengths.device)
    for sample in range(batch.size):
        for position in batch.bag(bucketing["feature"], sample):
            if bucketing["shards"] == 1:  # a single shard gets all ids, also absent ones
                counts[0, sample] += 1
            elif batch.is_present(bucketing, position):
                counts[batch.owned(bucketing, position)[0], sample] += 1
    for shard in range(bucketing["shards"]):
        stream = batch.streams[batch.stream_of(bucketing, shard)]
        if batch.size:
            lengths.view(-1, batch.size)[stream["length_row"]] = counts[shard]
        header[stream["header_at"]] = counts[shard].sum()


def count_pools(batch: IdBatch, bucketing: Record, lengths: Tensor, pools: Tensor, header: Tensor) -> None:
    """Counts the different pools that are asked for. Bags that have the same single id without a weight share a pool.

    Each bag gets in `pools` the number of its pool, -1 minus that number if an earlier bag has the pool already, or
    `ABSENT` if it has no ids on the shard.
    """
    feature, whole = bucketing["feature"], bucketing["shards"] == 1
    for shard in range(bucketing["shards"]):
        stream = batch.streams[batch.stream_of(bucketing, shard)]
        if stream["asked_at"] < 0:
            continue
        seen: dict[int, int] = {}
        asked = 0
        for sample in range(batch.size):
            row = stream["length_row"]
            at, length = (row, sample), int(lengths.view(-1, batch.size)[row, sample])
            own = pools.view(-1, batch.size)
            if not length:
                own[at] = ABSENT
                continue
            ids = [
                batch.owned(bucketing, position)[1]
                for position in batch.bag(feature, sample)
                if (whole and batch.is_row(bucketing, position))
                or (
                    not whole and batch.is_present(bucketing, position) and batch.owned(bucketing, position)[0] == shard
                )
            ]
            if length == 1 and ids and not stream["weighted"]:
                if ids[0] in seen:
                    own[at] = -1 - seen[ids[0]]
                    continue
                seen[ids[0]] = asked
            own[at] = asked
            asked += 1
        header[stream["asked_at"]] = asked


def fill_pools(batch: IdBatch, bucketing: Record, pools: Tensor, places: list[Record], words: Tensor) -> None:
    """Writes the samples of the different pools into the message, and replaces the numbers of `count_pools`: each bag
    gets the number of its pool, or -1 if it has none."""
    for shard in range(bucketing["shards"]):
        index = batch.stream_of(bucketing, shard)
        stream, to = batch.streams[index], places[index]["asked_at"]
        if stream["asked_at"] < 0 or to < 0 or not batch.size:
            continue
        own = pools.view(-1, batch.size)[stream["length_row"]]
        for sample, slot in enumerate(own.tolist()):
            if slot >= 0:
                words[to + slot] = sample
            else:
                own[sample] = -1 if slot == ABSENT else -1 - slot


def divisor(batch: IdBatch, bucketing: Record) -> Tensor:
    """What the bags of a feature are divided by; 0 for a bag in which no id counts."""
    facts, feature = batch.features[bucketing["feature"]], bucketing["feature"]
    root = facts["divides"] == Divisor.ROOT
    bags = [batch.bag(feature, sample) for sample in range(batch.size)]
    counts = [[batch.is_present(bucketing, position) for position in bag] for bag in bags]
    present = torch.tensor([sum(bag) for bag in counts], dtype=torch.int64, device=batch.device)
    if not facts["weighted"] or batch.weights is None:
        amount = present.float()
    else:
        counted = torch.tensor(list(chain.from_iterable(counts)), dtype=torch.bool, device=present.device)
        weights = batch.weights[list(batch.positions(feature))].masked_fill(~counted, 0.0)
        items = (weights * weights if root else weights)[:, None]
        starts = torch.tensor([bag.start - bags[0].start for bag in bags], dtype=torch.int64, device=present.device)
        sizes = torch.tensor([len(bag) for bag in bags], dtype=torch.int64, device=present.device)
        amount = canonical_reduce(items.__getitem__, starts, sizes, 1, torch.float32)[:, 0] if bags else present.float()
    return (ieee_sqrt(amount) if root else amount).masked_fill(present == 0, 0.0)


def count_sequence(batch: IdBatch, bucketing: Record, slots: Tensor, header: Tensor, merge: bool) -> None:
    """Counts the ids of a sequence that go to each shard into `header`, and gives each id a slot. With `merge`, equal
    ids share a slot: later ones get -1 minus the slot of the first."""
    counts = [0] * bucketing["shards"]
    seen: dict[tuple[int, int], int] = {}
    own = batch.layer_of(slots, bucketing)
    for position in batch.positions(bucketing["feature"]):
        if not batch.is_row(bucketing, position):
            own[position] = ABSENT
            continue
        key = batch.owned(bucketing, position)
        if merge and key in seen:
            own[position] = -1 - seen[key]
            continue
        own[position] = seen[key] = counts[key[0]]
        counts[key[0]] += 1
    for shard, count in enumerate(counts):
        header[batch.streams[batch.stream_of(bucketing, shard)]["header_at"]] = count
