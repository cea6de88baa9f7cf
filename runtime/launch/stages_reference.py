"""The stages between ranks in plain torch and plain loops: slow, obvious, and the truth that every backend is held to.

A sequence's slots are numbered by first occurrence here, as on the CPU. A GPU numbers merged ones by row: which slot an
id has differs, what stands at its slot does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from embforge.codegen import stages as words
from embforge.codegen.dtypes import DTYPES
from embforge.codegen.stages import ABSENT, ACTIONS, DIVIDES, MISTAKES, PACKINGS, STAGES, StagePlan
from embforge.launch.reference import canonical_reduce, ieee_sqrt, stays

Record = dict[str, int]
UNCHECKED = 2**64 - 1
LARGEST = {"int8": 127.0, "fp8": 448.0}
SCALE_BYTES = 4
WORD_BYTES = 4


class ReferenceStages:
    """All stages, by their names."""

    def __init__(self, plan: StagePlan) -> None:
        self.plan = plan
        self._wire_id = getattr(torch, DTYPES[plan.wire_id_dtype].torch_name)

    def run(self, stage: str, **arguments: Any) -> None:
        """Runs one stage; see `Stages.run`."""
        expected = {argument.name for argument in STAGES[stage] if "cuda" in argument.targets}
        if set(arguments) != expected:
            raise AssertionError(f"stage {stage} takes {sorted(expected)}, got {sorted(arguments)}")
        getattr(self, f"_{stage}")(**arguments)

    def _count(self, lengths: Tensor, slots: Tensor, divisors: Tensor, header: Tensor, mistake: Tensor, merge: int,
               divisor_width: int, **given: Any) -> None:  # fmt: skip
        mistake.zero_()
        batch = _Batch(**given)
        found = batch.bad_border()
        if found is None:
            for bucketing in batch.bucketings:
                found = batch.bad_id(bucketing) if found is None else found
                if bucketing["sequence"]:
                    _count_sequence(batch, bucketing, slots, header, bool(merge))
                else:
                    _count_pooled(batch, bucketing, lengths, header)
                    if bucketing["checks"] and batch.features[bucketing["feature"]]["divides"]:
                        column = batch.features[bucketing["feature"]]["divisor_column"]
                        divisors.view(-1, divisor_width)[:, column] = _divisor(batch, bucketing)
        if found is not None:
            mistake.copy_(torch.tensor(found))

    def _fill(self, lengths: Tensor, slots: Tensor, places: Tensor, words: Tensor, merge: int, **given: Any) -> None:
        batch = _Batch(**given)
        to = _records(places, _PLACES)
        for bucketing in batch.bucketings:
            fill = self._fill_sequence if bucketing["sequence"] else self._fill_pooled
            fill(batch, bucketing, lengths, slots, to, words)

    def _fill_pooled(self, batch: _Batch, bucketing: Record, lengths: Tensor, slots: Tensor, places: list[Record],
                     words: Tensor) -> None:  # fmt: skip
        ids: list[list[int]] = [[] for _ in range(bucketing["shards"])]
        positions: list[list[int]] = [[] for _ in range(bucketing["shards"])]
        for position in batch.positions(bucketing["feature"]):
            whole = bucketing["shards"] == 1
            if whole or batch.is_present(bucketing, position):
                shard, row = batch.owned(bucketing, position) if batch.is_row(bucketing, position) else (0, -1)
                ids[shard].append(row)
                positions[shard].append(position)
        for shard in range(bucketing["shards"]):
            index = batch.stream_of(bucketing, shard)
            stream, place = batch.streams[index], places[index]
            counted = lengths.view(-1, batch.size)[stream["length_row"]] if batch.size else lengths.flatten()[:0]
            _put(words, place["lengths_at"], counted)
            _put(words, place["ids_at"], torch.tensor(ids[shard], dtype=self._wire_id))
            if batch.streams[batch.stream_of(bucketing, 0)]["weighted"]:
                _put(words, place["weights_at"], batch.weight_of(positions[shard]))

    def _fill_sequence(self, batch: _Batch, bucketing: Record, lengths: Tensor, slots: Tensor, places: list[Record],
                       words: Tensor) -> None:  # fmt: skip
        own = batch.layer_of(slots, bucketing)
        for position in batch.positions(bucketing["feature"]):
            slot = int(own[position])
            if slot == ABSENT:
                own[position] = -1
                continue
            shard, row = batch.owned(bucketing, position)
            place = places[batch.stream_of(bucketing, shard)]
            if slot >= 0:
                step = self._wire_id.itemsize // WORD_BYTES
                _put(words, place["ids_at"] + slot * step, torch.tensor([row], dtype=self._wire_id))
            own[position] = place["base"] + (slot if slot >= 0 else -1 - slot)

    def _regroup(self, segments: Tensor, words: Tensor, values: Tensor, offsets: Tensor, weights: Tensor | None,
                 num_segments: int) -> None:  # fmt: skip
        offsets[0] = 0
        for segment in _records(segments, _SEGMENTS)[:num_segments]:
            count, samples, to = segment["count"], segment["samples"], segment["values_to"]
            values[to : to + count] = _get(words, segment["ids_from"], count, self._wire_id)
            if segment["lengths_from"] < 0:
                borders = torch.arange(1, samples + 1) * count // max(samples, 1)
            else:
                borders = _get(words, segment["lengths_from"], samples, torch.int32).long().cumsum(0)
            offsets[segment["offsets_to"] : segment["offsets_to"] + samples] = to + borders
            if segment["weights_from"] >= 0:
                assert weights is not None
                weights[to : to + count] = _get(words, segment["weights_from"], count, torch.float32)

    def _network_forward(self, pieces: Tensor, sources: Tensor, lengths: Tensor, divisors: Tensor, partials: Tensor,
                         own_partials: Tensor | None, pooled: Tensor, winners: Tensor | None, num_pieces: int, batch:
                         int, output_width: int,
                         divisor_width: int, winner_width: int) -> None:  # fmt: skip
        result = pooled.view(batch, output_width)
        for piece, own in _pieces_of(pieces, sources, num_pieces) if batch else ():
            columns = slice(piece["column"], piece["column"] + piece["width"])
            parts = [_block(partials, own_partials, source, batch, piece["width"]) for source in own]
            if piece["action"] == ACTIONS["max"]:
                best, winner = torch.zeros(batch, piece["width"]), torch.full((batch, piece["width"]), -1)
                for number, (source, part) in enumerate(zip(own, parts, strict=True)):
                    has = lengths.view(-1, batch)[source["length_row"]][:, None] != 0
                    wins = has & ~((winner >= 0) & stays(best, part.float()))
                    best, winner = torch.where(wins, part.float(), best), torch.where(wins, number, winner)
                result[:, columns] = best.to(result.dtype)
                if winners is not None:
                    first = piece["winner_column"]
                    winners.view(batch, winner_width)[:, first : first + piece["width"]] = winner.int()
                continue
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part.float()
            if piece["action"] == ACTIONS["divide"]:
                total = _divided(total, divisors.view(batch, divisor_width)[:, piece["divisor_column"], None])
            result[:, columns] = total.to(result.dtype)

    def _network_backward(self, pieces: Tensor, sources: Tensor, lengths: Tensor, divisors: Tensor,
                          grad_pooled: Tensor, winners: Tensor | None, partials: Tensor, own_partials: Tensor | None,
                          factor: Tensor | None,
                          num_pieces: int, batch: int, output_width: int, divisor_width: int,
                          winner_width: int) -> None:  # fmt: skip
        for piece, own in _pieces_of(pieces, sources, num_pieces) if batch else ():
            width = piece["width"]
            gradient = grad_pooled.view(batch, output_width)[:, piece["column"] : piece["column"] + width].float()
            if factor is not None:
                gradient = gradient * factor
            if piece["action"] == ACTIONS["divide"]:
                gradient = _divided(gradient, divisors.view(batch, divisor_width)[:, piece["divisor_column"], None])
            for number, source in enumerate(own):
                to = _block(partials, own_partials, source, batch, width)
                if piece["action"] == ACTIONS["max"]:
                    assert winners is not None
                    first = piece["winner_column"]
                    won = winners.view(batch, winner_width)[:, first : first + width] == number
                    to.copy_(torch.where(won, gradient, 0.0))
                else:
                    to.copy_(gradient)

    def _pack(self, parts: Tensor, numbers: Tensor, bytes: Tensor, num_parts: int, rows: int, width: int,
              row_bytes: int, packing: int) -> None:  # fmt: skip
        kind = _name_of(packing, PACKINGS)
        into = bytes.view(rows, row_bytes)
        for part in _records(parts, words.PART_WORDS)[:num_parts]:
            count, first = part["width"], part["byte"]
            own = numbers.view(rows, width)[:, part["column"] : part["column"] + count]
            largest = own.abs().amax(1, keepdim=True) if count else own.new_zeros(rows, 1)
            scale = (largest / LARGEST[kind]).masked_fill(~largest.isfinite(), torch.nan)
            into[:, first : first + SCALE_BYTES] = scale.view(torch.uint8).view(rows, SCALE_BYTES)
            counts = (own / scale).clamp(-LARGEST[kind], LARGEST[kind])
            coded = counts.round().to(torch.int8) if kind == "int8" else counts.to(torch.float8_e4m3fn)
            coded = coded.view(torch.uint8).masked_fill(~(scale > 0), 0)
            first += SCALE_BYTES
            into[:, first : first + count] = coded
            into[:, first + count : first + -(-count // WORD_BYTES) * WORD_BYTES] = 0

    def _unpack(self, parts: Tensor, bytes: Tensor, numbers: Tensor, num_parts: int, rows: int, width: int,
                row_bytes: int, packing: int) -> None:  # fmt: skip
        dtype = torch.int8 if _name_of(packing, PACKINGS) == "int8" else torch.float8_e4m3fn
        for part in _records(parts, words.PART_WORDS)[:num_parts]:
            first = part["byte"]
            own = bytes.view(rows, row_bytes)
            scale = own[:, first : first + SCALE_BYTES].contiguous().view(torch.float32)
            first += SCALE_BYTES
            coded = own[:, first : first + part["width"]].contiguous().view(dtype)
            numbers.view(rows, width)[:, part["column"] : part["column"] + part["width"]] = coded.float() * scale


_PLACES, _SEGMENTS = words.PLACE_WORDS, words.SEGMENT_WORDS


class _Batch:
    """A batch and how its ids are spread, as Python numbers."""

    def __init__(self, features: Tensor, bucketings: Tensor, shard_streams: Tensor, streams: Tensor, values: Tensor,
                 offsets: Tensor, weights: Tensor | None, num_features: int, num_bucketings: int, batch: int,
                 num_values: int, bounds: int) -> None:  # fmt: skip
        self.features = _records(features, words.FEATURE_WORDS)[:num_features]
        self.bucketings = _records(bucketings, words.BUCKETING_WORDS)[:num_bucketings]
        self.streams = _records(streams, words.STREAM_WORDS)
        self._shard_streams = shard_streams.flatten().tolist()
        self.ids: list[int] = values[:num_values].tolist()
        self.borders: list[int] = offsets.tolist()
        self.weights = weights
        self.size, self.bounds = batch, bounds

    def stream_of(self, bucketing: Record, shard: int) -> int:
        return int(self._shard_streams[bucketing["first"] + shard])

    def layer_of(self, slots: Tensor, bucketing: Record) -> Tensor:
        return slots.flatten()[bucketing["layer"] * len(self.ids) :][: len(self.ids)]

    def positions(self, feature: int) -> range:
        return range(self.borders[feature * self.size], self.borders[(feature + 1) * self.size])

    def bag(self, feature: int, sample: int) -> range:
        return range(*self.borders[feature * self.size + sample :][:2])

    def is_row(self, bucketing: Record, position: int) -> bool:
        rows = UNCHECKED if self.bounds == 2 else self.features[bucketing["feature"]]["rows"] % 2**64
        return self.ids[position] % 2**64 < rows

    def is_present(self, bucketing: Record, position: int) -> bool:
        """Whether an id counts: it is a row, and not what a pooled bag leaves out."""
        pads = self.ids[position] == self.features[bucketing["feature"]]["padding"] and not bucketing["sequence"]
        return self.is_row(bucketing, position) and not pads

    def owned(self, bucketing: Record, position: int) -> tuple[int, int]:
        """The shard that holds an id's row, and the row in it."""
        row = (self.ids[position] + self.features[bucketing["feature"]]["base"]) % 2**64
        shards, block = bucketing["shards"], bucketing["block"]
        if shards == 1:
            return 0, row
        if not block:
            return row % shards, row // shards
        return (row // block, row % block) if row // block < shards else (shards - 1, 0)

    def weight_of(self, positions: Sequence[int]) -> Tensor:
        return torch.ones(len(positions)) if self.weights is None else self.weights[list(positions)]

    def bad_border(self) -> list[int] | None:
        """The first mistake among borders: kind, feature, sample, position, value."""

        def found(kind: str, bag: int, position: int, value: int) -> list[int]:
            return [MISTAKES.index(kind) + 1, *(divmod(bag, self.size) if self.size else (0, 0)), position, value]

        bags = len(self.features) * self.size
        if self.borders[0]:
            return found("BAD_OFFSET", 0, 0, self.borders[0])
        for bag in range(bags):
            if self.borders[bag + 1] < self.borders[bag]:
                return found("BAD_OFFSET", bag, bag + 1, self.borders[bag + 1])
        if self.borders[bags] != len(self.ids):
            return found("BAD_OFFSET", max(bags - 1, 0), bags, self.borders[bags])
        for bag in range(bags):
            hotness = self.features[bag // self.size]["hotness"]
            length = self.borders[bag + 1] - self.borders[bag]
            if hotness and length > hotness:
                return found("LONG_CONCAT", bag, hotness, length)
        return None

    def bad_id(self, bucketing: Record) -> list[int] | None:
        """The bucketing's first id that is no row, where that is a mistake."""
        if not bucketing["checks"] or self.bounds != 0:
            return None
        feature = bucketing["feature"]
        for sample in range(self.size):
            bag = self.bag(feature, sample)
            for position in bag:
                if not self.is_row(bucketing, position):
                    kind = MISTAKES.index("BAD_ID") + 1
                    return [kind, feature, sample, position - bag.start, self.ids[position]]
        return None


def _count_pooled(batch: _Batch, bucketing: Record, lengths: Tensor, header: Tensor) -> None:
    counts = torch.zeros(bucketing["shards"], batch.size, dtype=torch.int32)
    for sample in range(batch.size):
        for position in batch.bag(bucketing["feature"], sample):
            if bucketing["shards"] == 1:  # which gets all ids, absent ones too
                counts[0, sample] += 1
            elif batch.is_present(bucketing, position):
                counts[batch.owned(bucketing, position)[0], sample] += 1
    for shard in range(bucketing["shards"]):
        stream = batch.streams[batch.stream_of(bucketing, shard)]
        if batch.size:
            lengths.view(-1, batch.size)[stream["length_row"]] = counts[shard]
        header[stream["header_at"]] = counts[shard].sum()


def _divisor(batch: _Batch, bucketing: Record) -> Tensor:
    """What a feature's bags are divided by; 0 for a bag without an id that counts."""
    facts, feature = batch.features[bucketing["feature"]], bucketing["feature"]
    root = facts["divides"] == DIVIDES["sqrtn"]
    bags = [batch.bag(feature, sample) for sample in range(batch.size)]
    here = [[batch.is_present(bucketing, position) for position in bag] for bag in bags]
    present = torch.tensor([sum(bag) for bag in here])
    if not facts["weighted"] or batch.weights is None:
        amount = present.float()
    else:
        counted = torch.tensor(list(chain.from_iterable(here)), dtype=torch.bool)
        weights = batch.weights[list(batch.positions(feature))].masked_fill(~counted, 0.0)
        items = (weights * weights if root else weights)[:, None]
        starts = torch.tensor([bag.start - bags[0].start for bag in bags])
        sizes = torch.tensor([len(bag) for bag in bags])
        amount = canonical_reduce(items.__getitem__, starts, sizes, 1, torch.float32)[:, 0] if bags else present.float()
    return (ieee_sqrt(amount) if root else amount).masked_fill(present == 0, 0.0)


def _count_sequence(batch: _Batch, bucketing: Record, slots: Tensor, header: Tensor, merge: bool) -> None:
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


def _divided(total: Tensor, divisor: Tensor) -> Tensor:
    """One IEEE divide; a zero divisor gives zeros."""
    zero = divisor == 0
    return (total / divisor.masked_fill(zero, 1.0)).masked_fill(zero, 0.0)


def _pieces_of(pieces: Tensor, sources: Tensor, count: int) -> list[tuple[Record, list[Record]]]:
    """Every piece with its partial pools."""
    known = _records(sources, words.SOURCE_WORDS)
    found = _records(pieces, words.PIECE_WORDS)[:count]
    return [(piece, known[piece["first"] : piece["first"] + piece["sources"]]) for piece in found]


def _block(partials: Tensor, own_partials: Tensor | None, source: Record, batch: int, width: int) -> Tensor:
    """The columns of a partial pool, a row a sample."""
    if source["own"]:
        assert own_partials is not None
        partials = own_partials
    begin = source["block_at"] + source["column"]
    return partials.flatten().as_strided((batch, width), (source["row_width"], 1), partials.storage_offset() + begin)


def _records(array: Tensor, names: Sequence[str]) -> list[Record]:
    return [dict(zip(names, row, strict=True)) for row in array.reshape(-1, len(names)).tolist()]


def _name_of(number: int, names: dict[str, int]) -> str:
    return next(name for name, value in names.items() if value == number)


def _put(into: Tensor, at: int, numbers: Tensor) -> None:
    """Writes numbers as words of 4 bytes."""
    found = numbers.contiguous().view(torch.int32)
    into[at : at + found.numel()] = found


def _get(out_of: Tensor, at: int, count: int, dtype: torch.dtype) -> Tensor:
    """Reads numbers that stand as words of 4 bytes."""
    return out_of[at : at + count * dtype.itemsize // WORD_BYTES].clone().view(dtype)
