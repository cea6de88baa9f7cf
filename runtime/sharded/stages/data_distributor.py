"""The data distributor: every id to the rank that owns its row.

count    what goes where, and whether anything is wrong  ─► header: all ranks learn sizes and mistakes, or raise
fill     ids, lengths, weights and which pools are wanted, a block a rank  ─► ids
regroup  what came in, in the order of a lookup over the samples of all ranks
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from embforge.codegen.errors import RankError
from embforge.codegen.remap import bad_id
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.stages import FLAGS, HEADER_WORDS, MISTAKES, PLACE_WORDS, SEGMENT_WORDS, StagePlan
from embforge.inputs import BOUNDS_CHECKS, Batch, raise_bad_input
from embforge.launch.stage_calls import Stages
from embforge.launch.stages import stages_of
from embforge.sharded.exchange.buffers import on_device
from embforge.sharded.exchange.collectives import Exchange
from embforge.sharded.stages.pool_dedup import Asked, Askers, Wanted
from embforge.sharded.stages.stage_metadata import FIXED, Numbers, Wiring

_MISTAKE, _FEATURE, _SAMPLE, _POSITION, _VALUE, _BATCH, _FLAGS, _CALL = range(FIXED)
REFUSED = MISTAKES.index("REFUSED") + 1
BAD_ID = MISTAKES.index("BAD_ID") + 1
MOST_KNOWN = 64
"""Different sizes of batches that are remembered."""
K = TypeVar("K")


@dataclass(frozen=True, eq=False)
class Distributed:
    """A batch whose ids have been exchanged: what its lookup, and later its backward, needs of it."""

    given: Batch
    samples: tuple[int, ...]
    """Of every rank."""
    sent: Numbers
    """Ids that this rank put into each stream."""
    received: Numbers
    """`[ranks, streams to this rank]` ids that came in."""
    lengths: Tensor
    """int32 `[pooled streams, batch]`."""
    divisors: Tensor
    slots: Tensor
    """int32 `[layers, num_values]`."""
    local: Batch | None
    """The batch of this rank's own collection; None if it holds nothing."""
    borders: tuple[int, ...]
    """Of this rank's own batch: where each feature's ids begin and end."""
    flags: int
    """What any rank wants of this call."""
    wanted: Wanted | None
    """Which pools travel; None: one of every bag."""
    distributor: Distributor
    """What exchanged the ids: only its module has the rows that were asked for."""

    @property
    def total(self) -> int:
        """Samples of all ranks."""
        return sum(self.samples)

    def wants(self, flag: str) -> bool:
        """Whether any rank wants it."""
        return bool(self.flags & FLAGS[flag])


@dataclass(frozen=True)
class Distributor:
    """Exchanges ids. One call at a time; on every rank, in the same order."""

    wiring: Wiring
    exchange: Exchange
    plan: StagePlan
    """Of the stages, but for the dtype of ids."""
    spec: CollectionSpec
    """The module's, whose ids may be others than rows."""
    bounds_check: str
    merge: bool
    """Whether an id that occurs several times in a sequence is sent once."""
    kernels: str | None = None
    _known: dict[tuple[object, ...], Any] = field(default_factory=dict, compare=False, repr=False)

    def __call__(self, batch: Batch | Exception, flags: int, call: int) -> Distributed:
        """`batch`: or why there is none; then every rank raises, this one that very error.

        Raises IndexError or ValueError for a bad batch of any rank, on all ranks, before any row is read.
        """
        failure = batch if isinstance(batch, Exception) else None
        own = self._nothing() if isinstance(batch, Exception) else batch
        try:
            stages = stages_of(self._plans[own.values.dtype], self.kernels)
            counted = self._count(stages, own)
        except Exception as error:  # no compiler, no memory: the other ranks must hear of it
            failure, counted = error, self._uncounted(own)
        header = self._header(counted, own, flags, call, failure)
        world, rank = self.wiring.geometry.world_size, self.wiring.rank
        sizes = self.wiring.header_sizes
        received = self.exchange.all_to_all(
            "header", header[: self.wiring.header_begins[-1]], sizes, [sizes[rank]] * world
        )
        # Sizes must be known to the host. All of them in one copy, with the borders of features.
        borders = own.offsets[:: own.batch].to(torch.int64) if own.batch else header[:0]
        host = torch.cat([header, received, borders]).cpu().numpy()
        told = host[header.numel() : header.numel() + received.numel()].reshape(world, -1)
        self._raise_mistakes(told, own, failure)
        border_list = host[header.numel() + received.numel() :].tolist()
        features = len(self.wiring.geometry.spec.features)
        sent = host[self.wiring.header_at] if len(self.wiring.header_at) else np.zeros(0, dtype=np.int64)
        samples = told[:, _BATCH]
        end = FIXED + len(self.wiring.geometry.streams_to[rank])
        counts = told[:, FIXED:end]
        asked = self.askers.asked(told[:, end:], host, samples) if self.wiring.asks else None
        words_in, incoming = self._exchange_ids(stages, own, counted, sent, counts, samples, asked)
        return Distributed(
            own,
            tuple(samples.tolist()),
            sent,
            counts,
            counted.lengths,
            counted.divisors,
            counted.slots,
            self._regroup(stages, words_in, incoming),
            tuple(border_list) if own.batch else (0,) * (features + 1),
            int(np.bitwise_or.reduce(told[:, _FLAGS])),
            None
            if asked is None or counted.pools is None
            else Wanted(asked, counted.pools, words_in, incoming.lists_at),
            self,
        )

    @cached_property
    def askers(self) -> Askers:
        """Who asks whom for what."""
        return Askers(self.wiring)

    @cached_property
    def _plans(self) -> dict[torch.dtype, StagePlan]:
        names = {torch.int32: "int32", torch.int64: "int64"}
        return {dtype: replace(self.plan, id_dtype=name) for dtype, name in names.items()}

    def _header(self, counted: _Counted, own: Batch, flags: int, call: int, failure: Exception | None) -> Tensor:
        """Counts, and to every rank the same words before them."""
        numbers = [own.batch, flags, call]
        if counted.header.is_cpu:  # many small steps of torch would take longer than the kernel
            words = counted.header.numpy()
            fixed = [*counted.mistake.tolist(), *numbers]
            if failure is not None:
                fixed[_MISTAKE] = REFUSED
            words[self.wiring.header_places] = fixed
            return counted.header
        told = torch.cat(
            [
                counted.mistake,
                torch.tensor(numbers, dtype=torch.int64, device="cpu").to(counted.mistake.device, non_blocking=True),
            ]
        )
        if failure is not None:
            told[_MISTAKE] = REFUSED
        counted.header[self.wiring.header_fixed] = told
        return counted.header

    def _count(self, stages: Stages, batch: Batch) -> _Counted:
        wiring, like = self.wiring, batch.values
        size, count = batch.batch, batch.values.numel()
        lengths = like.new_empty((wiring.num_length_rows, size), dtype=torch.int32)
        slots = like.new_empty((wiring.layers, count), dtype=torch.int32)
        pools = lengths.new_empty(lengths.shape) if wiring.asks else None
        divisors = like.new_empty((size, wiring.divisor_width), dtype=torch.float32)
        header = like.new_zeros(wiring.header_words, dtype=torch.int64)
        mistake = like.new_zeros(_VALUE + 1, dtype=torch.int64)
        stages.run(
            "count",
            features=wiring.features,
            bucketings=wiring.bucketings,
            shard_streams=wiring.shard_streams,
            streams=wiring.streams,
            values=batch.values,
            offsets=batch.offsets,
            weights=batch.weights,
            lengths=lengths,
            slots=slots,
            pools=pools,
            divisors=divisors,
            header=header,
            mistake=mistake,
            num_features=len(wiring.geometry.spec.features),
            num_bucketings=wiring.num_bucketings + len(wiring.replicated_features),
            batch=size,
            num_values=count,
            bounds=BOUNDS_CHECKS.index(self.bounds_check),
            merge=int(self.merge),
            divisor_width=wiring.divisor_width,
        )
        return _Counted(lengths, slots, pools, divisors, header, mistake)

    def _uncounted(self, batch: Batch) -> _Counted:
        """What a rank has to tell that could not count."""
        none = batch.values.new_zeros(0)
        header = batch.values.new_zeros(self.wiring.header_words, dtype=torch.int64)
        return _Counted(none, none, None, none, header, batch.values.new_zeros(_VALUE + 1, dtype=torch.int64))

    def _exchange_ids(
        self,
        stages: Stages,
        batch: Batch,
        counted: _Counted,
        sent: Numbers,
        received: Numbers,
        samples: Numbers,
        asked: Asked | None,
    ) -> tuple[Tensor, _Incoming]:
        """The words that came in, and where in them what is."""
        wiring = self.wiring
        outgoing = self._remembered(
            ("out", sent.tobytes(), batch.batch, asked and asked.outgoing),
            lambda: self._outgoing(sent, batch.batch, asked),
        )
        incoming = self._remembered(
            ("in", received.tobytes(), samples.tobytes(), asked and asked.incoming),
            lambda: self._incoming(received, samples, asked),
        )
        words = torch.empty(sum(outgoing.sizes), dtype=torch.int32, device=batch.values.device)
        stages.run(
            "fill",
            features=wiring.features,
            bucketings=wiring.bucketings,
            shard_streams=wiring.shard_streams,
            streams=wiring.streams,
            values=batch.values,
            offsets=batch.offsets,
            weights=batch.weights,
            lengths=counted.lengths,
            slots=counted.slots,
            pools=counted.pools,
            places=outgoing.places,
            words=words,
            num_features=len(wiring.geometry.spec.features),
            num_bucketings=wiring.num_bucketings,
            batch=batch.batch,
            num_values=batch.values.numel(),
            bounds=BOUNDS_CHECKS.index(self.bounds_check),
            merge=int(self.merge),
        )
        return self.exchange.all_to_all("ids", words, outgoing.sizes, incoming.sizes), incoming

    def _remembered(self, key: tuple[object, ...], make: Callable[[], K]) -> K:
        """What sizes alone decide: batches of a training loop often have those of an earlier one."""
        found: K | None = self._known.get(key)
        if found is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            found = self._known.setdefault(key, make())
        return found

    def _outgoing(self, sent: Numbers, size: int, asked: Asked | None) -> _Outgoing:
        index = self.wiring.sending.index
        known = index >= 0
        counts = np.where(known, sent[index] if len(sent) else 0, 0)
        asking = np.zeros(len(index), dtype=bool) if asked is None else asked.owners
        pools = np.zeros_like(counts) if asked is None else np.where(known & asking[:, None], asked.of_owners[index], 0)
        blocks = self.wiring.sending.blocks(counts, np.full(len(index), size, dtype=np.int64), pools)
        places = np.zeros((len(sent), len(PLACE_WORDS)), dtype=np.int64)
        for word, found in enumerate((blocks.ids_at, blocks.lengths_at, blocks.weights_at)):
            places[index[known], word] = found[known]
        places[index[known], PLACE_WORDS.index("asked_at")] = np.where(asking[:, None], blocks.asked_at, -1)[known]
        for streams in self.wiring.sequence_streams:
            places[streams, PLACE_WORDS.index("base")] = np.cumsum(sent[streams]) - sent[streams]
        return _Outgoing(on_device(places, self.wiring.device), blocks.sizes.tolist())

    def _incoming(self, received: Numbers, samples: Numbers, asked: Asked | None) -> _Incoming:
        pools = np.zeros_like(received) if asked is None else asked.by_sources * asked.sources[:, None]
        blocks = self.wiring.receiving.blocks(received, samples, pools)
        total = int(samples.sum())
        columns, pooled, weighted = self.wiring.own_streams
        counts = received[:, columns].T  # [features, ranks]
        flat = counts.reshape(-1)
        found = {
            "ids_from": blocks.ids_at[:, columns].T,
            "count": counts,
            "values_to": (np.cumsum(flat) - flat).reshape(counts.shape),
            "lengths_from": np.where(pooled, blocks.lengths_at[:, columns].T, -1),
            "samples": np.broadcast_to(samples, counts.shape),
            "offsets_to": 1 + np.arange(len(columns))[:, None] * total + (np.cumsum(samples) - samples)[None],
            "weights_from": np.where(weighted, blocks.weights_at[:, columns].T, -1),
        }
        segments = np.stack([found[word].reshape(-1) for word in SEGMENT_WORDS], axis=1)
        sizes = blocks.sizes.tolist()
        per_feature = tuple(counts.sum(1).tolist())
        return _Incoming(on_device(segments, self.wiring.device), sizes, total, per_feature, blocks.asked_at)

    def _regroup(self, stages: Stages, words: Tensor, incoming: _Incoming) -> Batch | None:
        geometry, rank = self.wiring.geometry, self.wiring.rank
        if geometry.locals[rank] is None:
            return None
        count, total = sum(incoming.per_feature), incoming.samples
        if not geometry.wide_ids and count >= 2**31:
            raise ValueError(
                f"batch: {count} ids for the rows of rank {rank} are too many for one call; split the batch"
            )
        dtype = torch.int64 if geometry.wide_ids else torch.int32
        values = words.new_empty(count, dtype=dtype)
        offsets = words.new_empty(len(incoming.per_feature) * total + 1, dtype=dtype)
        weighted = bool(self.wiring.own_streams[2].any())
        weights = words.new_empty(count, dtype=torch.float32) if weighted else None
        stages.run(
            "regroup",
            segments=incoming.segments,
            words=words,
            values=values,
            offsets=offsets,
            weights=weights,
            num_segments=len(incoming.segments),
        )
        return Batch(values, offsets, weights, total, incoming.per_feature)

    def _nothing(self) -> Batch:
        device = self.wiring.device
        empty = torch.zeros(0, dtype=torch.int64, device=device)
        return Batch(empty, torch.zeros(1, dtype=torch.int64, device=device), None, 0, None)

    def _raise_mistakes(self, told: Numbers, own: Batch, failure: Exception | None) -> None:
        """The same kind of error on all ranks, naming the rank where it came from."""
        calls = told[:, _CALL]
        if failure is not None:
            raise failure
        for rank, words in enumerate(told.tolist()):
            if words[_MISTAKE]:
                self._raise_mistake(rank, words, own)
        if (calls != calls[0]).any():
            raise RankError(
                f"ranks are out of step: rank {calls.argmin()} makes call {calls.min()}, rank {calls.argmax()} call "
                f"{calls.max()}; every rank must call the module equally often, or use torch's Join"
            )

    def _raise_mistake(self, rank: int, words: list[int], own: Batch) -> None:
        spec = self.wiring.geometry.spec
        where = f"rank {rank}: "
        if words[_MISTAKE] == REFUSED:
            raise RankError(f"{where}its batch was refused; its own output says why. No rank has looked anything up")
        feature = spec.features[words[_FEATURE]]
        if words[_MISTAKE] == BAD_ID and not self.spec.table(feature.table).ids_are_rows:
            place = words[_FEATURE], words[_VALUE], words[_SAMPLE], words[_POSITION]
            raise IndexError(f"{where}{bad_id(self.spec, *place)}")
        if words[_MISTAKE] == BAD_ID:
            base = self.wiring.base(words[_FEATURE])
            raise IndexError(
                f"{where}feature {feature.name!r}: id {words[_VALUE]} of sample {words[_SAMPLE]}, position "
                f"{words[_POSITION]} is not a row of table {base.table!r}; allowed: 0 to {base.rows - 1} "
                f"({base.rows} rows)"
            )
        if rank == self.wiring.rank:
            try:
                raise_bad_input(spec, own.values, own.offsets, own.weights, own.batch, "zero")
            except ValueError as error:
                raise ValueError(f"{where}{error}") from None
        kind = MISTAKES[words[_MISTAKE] - 1]
        said = "a concat bag is too long" if kind == "LONG_CONCAT" else "offsets cannot be"
        raise ValueError(
            f"{where}feature {feature.name!r}, sample {words[_SAMPLE]}: {said} ({words[_VALUE]}, {words[_POSITION]}); "
            "its own output says more"
        )


class _Outgoing(NamedTuple):
    """Where ids go in the blocks that are sent, and how long those are."""

    places: Tensor
    sizes: list[int]


class _Incoming(NamedTuple):
    """What blocks that come in hold, and how long they are."""

    segments: Tensor
    sizes: list[int]
    samples: int
    per_feature: tuple[int, ...]
    """Ids of each feature of this rank's own collection."""
    lists_at: Numbers
    """`[ranks, streams]`: where the samples stand whose pools are asked for."""


@dataclass(frozen=True, eq=False)
class _Counted:
    lengths: Tensor
    slots: Tensor
    pools: Tensor | None
    divisors: Tensor
    header: Tensor
    mistake: Tensor


assert HEADER_WORDS == ("mistake", "feature", "sample", "position", "value", "batch", "flags", "call")
