"""The definition of the stages between ranks, in plain torch and plain loops: slow and obvious. All other backends are
tested against it.

The slots of a sequence are numbered by first occurrence here, as on the CPU. A GPU numbers merged slots by row, so an
id may have another slot there; the row at its slot is the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embforge.codegen.poolings import DIVIDE, SELECTING
from embforge.codegen.stages import (
    ABSENT,
    PACKED,
    PART_WORDS,
    PICK_WORDS,
    PIECE_WORDS,
    PLACE_WORDS,
    SEGMENT_WORDS,
    SOURCE_WORDS,
    STAGES,
    StagePlan,
)
from embforge.launch.reference.forward import stays
from embforge.launch.reference.stages_ids import (
    IdBatch,
    Record,
    count_pooled,
    count_pools,
    count_sequence,
    divisor,
    fill_pools,
    records,
)
from embforge.launch.stage_calls import Value
from embforge.number_formats import torch_dtype

SCALE_BYTES = 4
WORD_BYTES = 4


class ReferenceStages:
    """All stages. Method `_NAME` runs stage NAME."""

    def __init__(self, plan: StagePlan) -> None:
        self.plan = plan
        self._wire_id = torch_dtype(plan.wire_id_dtype)

    def run(self, stage: str, **arguments: Value) -> None:
        """Runs one stage; see `Stages.run`."""
        expected = {argument.name for argument in STAGES[stage].on(self.plan.target)}
        if set(arguments) != expected:
            raise AssertionError(f"stage {stage} takes {sorted(expected)}, got {sorted(arguments)}")
        getattr(self, f"_{stage}")(**arguments)

    def _count(self, lengths: Tensor, slots: Tensor, pools: Tensor | None, divisors: Tensor, header: Tensor,
               mistake: Tensor, merge: int, divisor_width: int, **of_batch: Any) -> None:  # fmt: skip
        mistake.zero_()
        batch = IdBatch(**of_batch)
        first_mistake = batch.bad_border()
        if first_mistake is None:
            for bucketing in batch.bucketings:
                first_mistake = batch.bad_id(bucketing) if first_mistake is None else first_mistake
                if bucketing["sequence"]:
                    count_sequence(batch, bucketing, slots, header, bool(merge))
                else:
                    count_pooled(batch, bucketing, lengths, header)
                    if pools is not None:
                        count_pools(batch, bucketing, lengths, pools, header)
                    if bucketing["checks"] and batch.features[bucketing["feature"]]["divides"]:
                        column = batch.features[bucketing["feature"]]["divisor_column"]
                        divisors.view(-1, divisor_width)[:, column] = divisor(batch, bucketing)
        if first_mistake is not None:
            mistake.copy_(torch.tensor(first_mistake, dtype=mistake.dtype, device=mistake.device))

    def _fill(self, lengths: Tensor, slots: Tensor, pools: Tensor | None, places: Tensor, words: Tensor, merge: int,
              **of_batch: Any) -> None:  # fmt: skip
        batch = IdBatch(**of_batch)
        to = records(places, PLACE_WORDS)
        for bucketing in batch.bucketings:
            fill = self._fill_sequence if bucketing["sequence"] else self._fill_pooled
            fill(batch, bucketing, lengths, slots, to, words)
            if pools is not None and not bucketing["sequence"]:
                fill_pools(batch, bucketing, pools, to, words)

    def _fill_pooled(self, batch: IdBatch, bucketing: Record, lengths: Tensor, slots: Tensor, places: list[Record],
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
            _put(words, place["ids_at"], torch.tensor(ids[shard], dtype=self._wire_id, device=words.device))
            if batch.streams[batch.stream_of(bucketing, 0)]["weighted"]:
                _put(words, place["weights_at"], batch.weight_of(positions[shard]))

    def _fill_sequence(self, batch: IdBatch, bucketing: Record, lengths: Tensor, slots: Tensor, places: list[Record],
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
                _put(
                    words, place["ids_at"] + slot * step, torch.tensor([row], dtype=self._wire_id, device=words.device)
                )
            own[position] = place["base"] + (slot if slot >= 0 else -1 - slot)

    def _regroup(self, segments: Tensor, words: Tensor, values: Tensor, offsets: Tensor, weights: Tensor | None,
                 num_segments: int) -> None:  # fmt: skip
        offsets[0] = 0
        for segment in records(segments, SEGMENT_WORDS)[:num_segments]:
            count, samples, to = segment["count"], segment["samples"], segment["values_to"]
            values[to : to + count] = _get(words, segment["ids_from"], count, self._wire_id)
            if segment["lengths_from"] < 0:
                ends = torch.arange(1, samples + 1, dtype=torch.int64, device=offsets.device)
                borders = ends * count // max(samples, 1)
            else:
                borders = _get(words, segment["lengths_from"], samples, torch.int32).long().cumsum(0)
            offsets[segment["offsets_to"] : segment["offsets_to"] + samples] = to + borders
            if segment["weights_from"] >= 0:
                assert weights is not None
                weights[to : to + count] = _get(words, segment["weights_from"], count, torch.float32)

    def _gather(self, picks: Tensor, words: Tensor, rows: Tensor, picked: Tensor, num_picks: int,
                row_bytes: int) -> None:  # fmt: skip
        source = rows.contiguous().view(torch.uint8).view(-1, row_bytes)
        for pick in records(picks, PICK_WORDS)[:num_picks]:
            samples = _get(words, pick["asked_from"], pick["count"], torch.int32).long()
            bytes_ = source[pick["row"] + samples, pick["byte"] : pick["byte"] + pick["bytes"]].reshape(-1)
            picked.view(-1)[pick["to"] : pick["to"] + bytes_.numel()] = bytes_

    def _network_forward(self, pieces: Tensor, sources: Tensor, lengths: Tensor, divisors: Tensor,
                         pools: Tensor | None, partials: Tensor, own_partials: Tensor | None, pooled: Tensor,
                         winners: Tensor | None, num_pieces: int, batch: int, output_width: int, divisor_width: int,
                         winner_width: int) -> None:  # fmt: skip
        result = pooled.view(batch, output_width)
        for piece, own in _pieces_of(pieces, sources, num_pieces) if batch else ():
            columns = slice(piece["column"], piece["column"] + piece["width"])
            parts = [_pools(partials, own_partials, pools, source, batch, piece["width"]) for source in own]
            if combiner := SELECTING.get(piece["action"]):
                best = lengths.new_zeros((batch, piece["width"]), dtype=torch.float32)
                winner = torch.full_like(best, -1, dtype=torch.int64)
                for number, (source, part) in enumerate(zip(own, parts, strict=True)):
                    has = lengths.view(-1, batch)[source["length_row"]][:, None] != 0
                    wins = has & ~((winner >= 0) & stays(combiner, best, part.float()))
                    best, winner = torch.where(wins, part.float(), best), torch.where(wins, number, winner)
                result[:, columns] = best.to(result.dtype)
                if winners is not None:
                    first = piece["winner_column"]
                    winners.view(batch, winner_width)[:, first : first + piece["width"]] = winner.int()
                continue
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part.float()
            if piece["action"] == DIVIDE:
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
            if piece["action"] == DIVIDE:
                gradient = _divided(gradient, divisors.view(batch, divisor_width)[:, piece["divisor_column"], None])
            for number, source in enumerate(own):
                to = _block(partials, own_partials, source, batch, width)
                if piece["action"] in SELECTING:
                    assert winners is not None
                    first = piece["winner_column"]
                    won = winners.view(batch, winner_width)[:, first : first + width] == number
                    to.copy_(torch.where(won, gradient, 0.0))
                else:
                    to.copy_(gradient)

    def _pack(self, parts: Tensor, numbers: Tensor, bytes: Tensor, num_parts: int, rows: int, width: int,
              row_bytes: int, packing: int) -> None:  # fmt: skip
        kind = PACKED[packing]
        into = bytes.view(rows, row_bytes)
        for part in records(parts, PART_WORDS)[:num_parts]:
            count, first = part["width"], part["byte"]
            own = numbers.view(rows, width)[:, part["column"] : part["column"] + count]
            largest = own.abs().amax(1, keepdim=True) if count else own.new_zeros(rows, 1)
            scale = (largest / kind.largest).masked_fill(~largest.isfinite(), torch.nan)
            into[:, first : first + SCALE_BYTES] = scale.view(torch.uint8).view(rows, SCALE_BYTES)
            counts = (own / scale).clamp(-kind.largest, kind.largest)
            coded = (counts if kind.is_float else counts.round()).to(torch_dtype(kind.name))
            coded = coded.view(torch.uint8).masked_fill(~(scale > 0), 0)
            first += SCALE_BYTES
            into[:, first : first + count] = coded
            into[:, first + count : first + -(-count // WORD_BYTES) * WORD_BYTES] = 0

    def _unpack(self, parts: Tensor, bytes: Tensor, numbers: Tensor, num_parts: int, rows: int, width: int,
                row_bytes: int, packing: int) -> None:  # fmt: skip
        dtype = torch_dtype(PACKED[packing].name)
        for part in records(parts, PART_WORDS)[:num_parts]:
            first = part["byte"]
            own = bytes.view(rows, row_bytes)
            scale = own[:, first : first + SCALE_BYTES].contiguous().view(torch.float32)
            first += SCALE_BYTES
            coded = own[:, first : first + part["width"]].contiguous().view(dtype)
            numbers.view(rows, width)[:, part["column"] : part["column"] + part["width"]] = coded.float() * scale


def _divided(total: Tensor, divisor: Tensor) -> Tensor:
    """Divides once, as IEEE says; a zero divisor gives zeros."""
    zero = divisor == 0
    return (total / divisor.masked_fill(zero, 1.0)).masked_fill(zero, 0.0)


def _pieces_of(pieces: Tensor, sources: Tensor, count: int) -> list[tuple[Record, list[Record]]]:
    """Every piece with the sources of its partial pools."""
    all_sources = records(sources, SOURCE_WORDS)
    return [
        (piece, all_sources[piece["first"] : piece["first"] + piece["sources"]])
        for piece in records(pieces, PIECE_WORDS)[:count]
    ]


def _block(partials: Tensor, own_partials: Tensor | None, source: Record, batch: int, width: int) -> Tensor:
    """A source's columns of partial pools, one row per sample."""
    if source["own"]:
        assert own_partials is not None
        partials = own_partials
    begin = source["block_at"] + source["column"]
    return partials.flatten().as_strided((batch, width), (source["row_width"], 1), partials.storage_offset() + begin)


def _pools(partials: Tensor, own_partials: Tensor | None, pools: Tensor | None, source: Record, batch: int,
           width: int) -> Tensor:  # fmt: skip
    """The partial pools of a source, one per sample.

    If only different pools were asked for, `pools` has the row of each sample's pool, or a negative number for an empty
    bag, whose pool is zeros.
    """
    if not source["asked"]:
        return _block(partials, own_partials, source, batch, width)
    assert pools is not None and not source["own"]
    rows = pools.view(-1, batch)[source["length_row"]].long()
    asked = _block(partials, own_partials, source, int(rows.max()) + 1, width)
    of_samples = asked[rows.clamp_min(0)] if len(asked) else partials.new_zeros((batch, width))
    return torch.where(rows[:, None] < 0, torch.zeros_like(of_samples), of_samples)


def _put(into: Tensor, at: int, numbers: Tensor) -> None:
    """Writes numbers into an array of 4-byte words."""
    words = numbers.contiguous().view(torch.int32)
    into[at : at + words.numel()] = words


def _get(out_of: Tensor, at: int, count: int, dtype: torch.dtype) -> Tensor:
    """Reads `count` numbers from an array of 4-byte words."""
    return out_of[at : at + count * dtype.itemsize // WORD_BYTES].clone().view(dtype)
