"""The data distributor: sends every id to the rank that owns its row, in three stages.

count    counts the ids for each rank, and finds mistakes  ─► header: all ranks get sizes and mistakes, or raise
fill     writes ids, lengths, weights and requests of pools, one block per rank  ─► ids
regroup  puts the received ids into the order of a lookup over the samples of all ranks
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
from embforge.sharded.remap_agreement import RemapDigests
from embforge.sharded.stages.pool_dedup import PoolRequester, PoolRequests, RequestedPools
from embforge.sharded.stages.stage_metadata import FIXED, Numbers, StageArrays

_MISTAKE, _FEATURE, _SAMPLE, _POSITION, _VALUE, _BATCH, _FLAGS, _CALL = range(FIXED)
REFUSED = MISTAKES.index("REFUSED") + 1
BAD_ID = MISTAKES.index("BAD_ID") + 1
MOST_REMEMBERED = 64
"""The most sizes of batches for which positions in blocks are remembered."""
K = TypeVar("K")


@dataclass(frozen=True, eq=False)
class Distributed:
    """A batch whose ids have been exchanged, with everything that its lookup and its backward need."""

    input: Batch
    """The batch of this rank."""
    samples: tuple[int, ...]
    """The number of samples of every rank."""
    sent: Numbers
    """`[streams]`: how many ids this rank sent in each stream."""
    received: Numbers
    """`[ranks, streams to this rank]`: how many ids each rank sent in each stream."""
    lengths: Tensor
    """int32 `[pooled streams, batch]`."""
    divisors: Tensor
    slots: Tensor
    """int32 `[layers, num_values]`."""
    local: Batch | None
    """The batch of this rank's own collection, with the samples of all ranks; None if the rank holds no rows."""
    borders: tuple[int, ...]
    """Where the ids of each feature begin in the batch of this rank, and where the last ones end."""
    flags: int
    """The flags of this call that any rank has set."""
    requested: RequestedPools | None
    """The pools that are requested; None if every bag has a pool."""
    distributor: Distributor
    """The distributor that exchanged the ids: only its module has the rows."""

    @property
    def total(self) -> int:
        """The number of samples of all ranks."""
        return sum(self.samples)

    def wants(self, flag: str) -> bool:
        """Whether any rank has set a flag."""
        return bool(self.flags & FLAGS[flag])


@dataclass(frozen=True)
class Distributor:
    """Exchanges the ids of batches. Calls must not overlap, and must have the same order on every rank."""

    arrays: StageArrays
    exchange: Exchange
    plan: StagePlan
    """The plan of the stages; the dtype of ids is replaced by that of the batch."""
    spec: CollectionSpec
    """The spec of the module. Ids of its tables may be other numbers than rows."""
    bounds_check: str
    merge: bool
    """Whether an id that occurs several times in a sequence is sent once."""
    remaps: RemapDigests
    kernels: str | None = None
    _cache: dict[tuple[object, ...], Any] = field(default_factory=dict, compare=False, repr=False)

    def __call__(self, batch: Batch | Exception, flags: int, call: int) -> Distributed:
        """Exchanges the ids of a batch. If this rank has no batch, `batch` is the reason: then this rank raises it, and
        the others raise RankError.

        Raises IndexError or ValueError on all ranks for a mistake in the batch of any rank, before any row is read.
        """
        failure = batch if isinstance(batch, Exception) else None
        own = self._nothing() if isinstance(batch, Exception) else batch
        try:
            stages = stages_of(self._plans[own.values.dtype], self.kernels)
            counted, digests = self._count(stages, own), self.remaps.words()
        except Exception as error:  # e.g. no compiler, no memory: the other ranks must be notified
            failure, counted, digests = error, self._uncounted(own), [0] * len(self.remaps.remaps)
        header = self._header(counted, [own.batch, flags, call, *digests], failure)
        world, rank = self.arrays.geometry.world_size, self.arrays.rank
        sizes = self.arrays.header_sizes
        received = self.exchange.all_to_all(
            "header", header[: self.arrays.header_begins[-1]], sizes, [sizes[rank]] * world
        )
        # The host needs the sizes. They are copied all at once, with the borders of features.
        borders = own.offsets[:: own.batch].to(torch.int64) if own.batch else header[:0]
        host = torch.cat([header, received, borders]).cpu().numpy()
        headers = host[header.numel() : header.numel() + received.numel()].reshape(world, -1)
        self._raise_mistakes(headers, own, failure)
        border_list = host[header.numel() + received.numel() :].tolist()
        features = len(self.arrays.geometry.spec.features)
        sent = host[self.arrays.header_at] if len(self.arrays.header_at) else np.zeros(0, dtype=np.int64)
        samples = headers[:, _BATCH]
        begin = self.arrays.fixed_words
        end = begin + len(self.arrays.geometry.streams_to[rank])
        counts = headers[:, begin:end]
        requests = self.pool_requester.requests(headers[:, end:], host, samples) if self.arrays.requests_pools else None
        words_in, incoming = self._exchange_ids(stages, own, counted, sent, counts, samples, requests)
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
            int(np.bitwise_or.reduce(headers[:, _FLAGS])),
            None
            if requests is None or counted.pools is None
            else RequestedPools(requests, counted.pools, words_in, incoming.lists_at),
            self,
        )

    @cached_property
    def pool_requester(self) -> PoolRequester:
        """What decides which pools are requested."""
        return PoolRequester(self.arrays)

    @cached_property
    def _plans(self) -> dict[torch.dtype, StagePlan]:
        names = {torch.int32: "int32", torch.int64: "int64"}
        return {dtype: replace(self.plan, id_dtype=name) for dtype, name in names.items()}

    def _header(self, counted: _Counted, numbers: list[int], failure: Exception | None) -> Tensor:
        """The headers for all ranks: counts, and before them the words that are the same for every rank, which are the
        mistake and `numbers`."""
        if counted.header.is_cpu:  # several small operations of torch would take longer than the kernel
            words = counted.header.numpy()
            fixed_words = [*counted.mistake.tolist(), *numbers]
            if failure is not None:
                fixed_words[_MISTAKE] = REFUSED
            words[self.arrays.header_fixed_at] = fixed_words
            return counted.header
        fixed = torch.cat(
            [
                counted.mistake,
                torch.tensor(numbers, dtype=torch.int64, device="cpu").to(counted.mistake.device, non_blocking=True),
            ]
        )
        if failure is not None:
            fixed[_MISTAKE] = REFUSED
        counted.header[self.arrays.header_fixed] = fixed
        return counted.header

    def _count(self, stages: Stages, batch: Batch) -> _Counted:
        arrays, like = self.arrays, batch.values
        size, count = batch.batch, batch.values.numel()
        lengths = like.new_empty((arrays.num_length_rows, size), dtype=torch.int32)
        slots = like.new_empty((arrays.layers, count), dtype=torch.int32)
        pools = lengths.new_empty(lengths.shape) if arrays.requests_pools else None
        divisors = like.new_empty((size, arrays.divisor_width), dtype=torch.float32)
        header = like.new_zeros(arrays.header_words, dtype=torch.int64)
        mistake = like.new_zeros(_VALUE + 1, dtype=torch.int64)
        stages.run(
            "count",
            features=arrays.features,
            bucketings=arrays.bucketings,
            shard_streams=arrays.shard_streams,
            streams=arrays.streams,
            values=batch.values,
            offsets=batch.offsets,
            weights=batch.weights,
            lengths=lengths,
            slots=slots,
            pools=pools,
            divisors=divisors,
            header=header,
            mistake=mistake,
            num_features=len(arrays.geometry.spec.features),
            num_bucketings=arrays.num_bucketings + len(arrays.replicated_features),
            batch=size,
            num_values=count,
            bounds=BOUNDS_CHECKS.index(self.bounds_check),
            merge=int(self.merge),
            divisor_width=arrays.divisor_width,
        )
        return _Counted(lengths, slots, pools, divisors, header, mistake)

    def _uncounted(self, batch: Batch) -> _Counted:
        """The results of stage `count` on a rank that could not run it: no ids and no mistake."""
        none = batch.values.new_zeros(0)
        header = batch.values.new_zeros(self.arrays.header_words, dtype=torch.int64)
        return _Counted(none, none, None, none, header, batch.values.new_zeros(_VALUE + 1, dtype=torch.int64))

    def _exchange_ids(
        self,
        stages: Stages,
        batch: Batch,
        counted: _Counted,
        sent: Numbers,
        received: Numbers,
        samples: Numbers,
        requests: PoolRequests | None,
    ) -> tuple[Tensor, _Incoming]:
        """Exchanges ids. Returns the words that the ranks sent, and the positions of ids in them."""
        arrays = self.arrays
        outgoing = self._remembered(
            ("out", sent.tobytes(), batch.batch, requests and requests.sent_key),
            lambda: self._outgoing(sent, batch.batch, requests),
        )
        incoming = self._remembered(
            ("in", received.tobytes(), samples.tobytes(), requests and requests.received_key),
            lambda: self._incoming(received, samples, requests),
        )
        words = torch.empty(sum(outgoing.sizes), dtype=torch.int32, device=batch.values.device)
        stages.run(
            "fill",
            features=arrays.features,
            bucketings=arrays.bucketings,
            shard_streams=arrays.shard_streams,
            streams=arrays.streams,
            values=batch.values,
            offsets=batch.offsets,
            weights=batch.weights,
            lengths=counted.lengths,
            slots=counted.slots,
            pools=counted.pools,
            places=outgoing.places,
            words=words,
            num_features=len(arrays.geometry.spec.features),
            num_bucketings=arrays.num_bucketings,
            batch=batch.batch,
            num_values=batch.values.numel(),
            bounds=BOUNDS_CHECKS.index(self.bounds_check),
            merge=int(self.merge),
        )
        return self.exchange.all_to_all("ids", words, outgoing.sizes, incoming.sizes), incoming

    def _remembered(self, key: tuple[object, ...], make: Callable[[], K]) -> K:
        """Caches what depends only on the sizes in `key`: batches of a training loop often have the same sizes."""
        value: K | None = self._cache.get(key)
        if value is None:
            if len(self._cache) >= MOST_REMEMBERED:
                self._cache.clear()
            value = self._cache.setdefault(key, make())
        return value

    def _outgoing(self, sent: Numbers, size: int, requests: PoolRequests | None) -> _Outgoing:
        """Where stage `fill` writes each stream, in the blocks to other ranks."""
        index = self.arrays.sending.index
        used = index >= 0
        counts = np.where(used, sent[index] if len(sent) else 0, 0)
        owners = np.zeros(len(index), dtype=bool) if requests is None else requests.owners
        pools = np.zeros_like(counts)
        if requests is not None:
            pools = np.where(used & owners[:, None], requests.sent_counts[index], 0)
        blocks = self.arrays.sending.blocks(counts, np.full(len(index), size, dtype=np.int64), pools)
        places = np.zeros((len(sent), len(PLACE_WORDS)), dtype=np.int64)
        for word, at in enumerate((blocks.ids_at, blocks.lengths_at, blocks.weights_at)):
            places[index[used], word] = at[used]
        places[index[used], PLACE_WORDS.index("asked_at")] = np.where(owners[:, None], blocks.asked_at, -1)[used]
        for streams in self.arrays.sequence_streams:
            places[streams, PLACE_WORDS.index("base")] = np.cumsum(sent[streams]) - sent[streams]
        return _Outgoing(on_device(places, self.arrays.device), blocks.sizes.tolist())

    def _incoming(self, received: Numbers, samples: Numbers, requests: PoolRequests | None) -> _Incoming:
        """What stage `regroup` copies from the blocks of other ranks."""
        pools = np.zeros_like(received) if requests is None else requests.received_counts * requests.sources[:, None]
        blocks = self.arrays.receiving.blocks(received, samples, pools)
        total = int(samples.sum())
        columns, pooled, weighted = self.arrays.own_streams
        counts = received[:, columns].T  # [features, ranks]
        flat = counts.reshape(-1)
        words = {
            "ids_from": blocks.ids_at[:, columns].T,
            "count": counts,
            "values_to": (np.cumsum(flat) - flat).reshape(counts.shape),
            "lengths_from": np.where(pooled, blocks.lengths_at[:, columns].T, -1),
            "samples": np.broadcast_to(samples, counts.shape),
            "offsets_to": 1 + np.arange(len(columns))[:, None] * total + (np.cumsum(samples) - samples)[None],
            "weights_from": np.where(weighted, blocks.weights_at[:, columns].T, -1),
        }
        segments = np.stack([words[word].reshape(-1) for word in SEGMENT_WORDS], axis=1)
        sizes = blocks.sizes.tolist()
        per_feature = tuple(counts.sum(1).tolist())
        return _Incoming(on_device(segments, self.arrays.device), sizes, total, per_feature, blocks.asked_at)

    def _regroup(self, stages: Stages, words: Tensor, incoming: _Incoming) -> Batch | None:
        """The batch of this rank's own collection, from the words that the ranks sent; None if it holds no rows."""
        geometry, rank = self.arrays.geometry, self.arrays.rank
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
        weighted = bool(self.arrays.own_streams.weighted.any())
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
        """A batch without samples."""
        device = self.arrays.device
        empty = torch.zeros(0, dtype=torch.int64, device=device)
        return Batch(empty, torch.zeros(1, dtype=torch.int64, device=device), None, 0, None)

    def _raise_mistakes(self, headers: Numbers, own: Batch, failure: Exception | None) -> None:
        """Raises the mistakes that the headers report: the same kind of error on all ranks, with the rank that made the
        mistake."""
        calls = headers[:, _CALL]
        if failure is not None:
            raise failure
        # Where all ranks have a batch of the same call, other remaps explain a mistake in it better than its ids do.
        if (calls == calls[0]).all() and (headers[:, _MISTAKE] != REFUSED).all():
            self.remaps.compare(headers[:, FIXED : self.arrays.fixed_words])
        for rank, words in enumerate(headers.tolist()):
            if words[_MISTAKE]:
                self._raise_mistake(rank, words, own)
        if (calls != calls[0]).any():
            raise RankError(
                f"ranks are out of step: rank {calls.argmin()} makes call {calls.min()}, rank {calls.argmax()} call "
                f"{calls.max()}; every rank must call the module the same number of times, or use torch's Join"
            )

    def _raise_mistake(self, rank: int, words: list[int], own: Batch) -> None:
        spec = self.arrays.geometry.spec
        where = f"rank {rank}: "
        if words[_MISTAKE] == REFUSED:
            raise RankError(
                f"{where}its batch was refused; the output of that rank says why. No rank has looked anything up"
            )
        feature = spec.features[words[_FEATURE]]
        if words[_MISTAKE] == BAD_ID and not self.spec.table(feature.table).ids_are_rows:
            mistake = words[_FEATURE], words[_VALUE], words[_SAMPLE], words[_POSITION]
            raise IndexError(f"{where}{bad_id(self.spec, *mistake)}")
        if words[_MISTAKE] == BAD_ID:
            base = self.arrays.base(words[_FEATURE])
            raise IndexError(
                f"{where}feature {feature.name!r}: id {words[_VALUE]} of sample {words[_SAMPLE]}, position "
                f"{words[_POSITION]} is not a row of table {base.table!r}; allowed: 0 to {base.rows - 1} "
                f"({base.rows} rows)"
            )
        if rank == self.arrays.rank:
            try:
                raise_bad_input(spec, own.values, own.offsets, own.weights, own.batch, "zero")
            except ValueError as error:
                raise ValueError(f"{where}{error}") from None
        kind = MISTAKES[words[_MISTAKE] - 1]
        mistake_text = "a concat bag is too long" if kind == "LONG_CONCAT" else "the offsets are wrong"
        raise ValueError(
            f"{where}feature {feature.name!r}, sample {words[_SAMPLE]}: {mistake_text} ({words[_VALUE]}, "
            f"{words[_POSITION]}); the output of that rank says more"
        )


class _Outgoing(NamedTuple):
    """What follows from the sizes of a batch for the blocks that are sent."""

    places: Tensor
    """`[streams, PLACE_WORDS]` on the device: the positions of each stream in the blocks."""
    sizes: list[int]
    """The number of words of the block to each rank."""


class _Incoming(NamedTuple):
    """What follows from the sizes of the batches of all ranks for the blocks that are received."""

    segments: Tensor
    """`[segments, SEGMENT_WORDS]` on the device."""
    sizes: list[int]
    """The number of words of the block from each rank."""
    samples: int
    """The number of samples of all ranks."""
    per_feature: tuple[int, ...]
    """The number of ids of each feature of this rank's own collection."""
    lists_at: Numbers
    """`[ranks, streams]`: the positions of the lists of samples whose pools are requested."""


@dataclass(frozen=True, eq=False)
class _Counted:
    """The results of stage `count`."""

    lengths: Tensor
    slots: Tensor
    pools: Tensor | None
    divisors: Tensor
    header: Tensor
    mistake: Tensor


assert HEADER_WORDS == ("mistake", "feature", "sample", "position", "value", "batch", "flags", "call")
