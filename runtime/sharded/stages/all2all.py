"""The exchange of vectors: results go from the owners of rows to the ranks of the samples, gradients back.

A block from one rank to another consists of sections: the pooled columns that are sent directly (of all samples, or for
each feature the requested ones, see `pool_dedup.py`), then the rows of each sequence feature. The blocks of all tables
are sent in one all-to-all, large gradients point to point. Hierarchical columns take two more exchanges, see
`hierarchical.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from embforge.codegen.stages import StagePlan
from embforge.launch.stages import stages_of
from embforge.sharded.exchange.buffers import on_device
from embforge.sharded.exchange.collectives import Exchange, joined
from embforge.sharded.exchange.formats import PACKED, direct_widths, row_bytes
from embforge.sharded.exchange.waiting import SHORT_BYTES
from embforge.sharded.exchange.wire import Wire
from embforge.sharded.stages.data_distributor import Distributed
from embforge.sharded.stages.hierarchical import HierarchicalVectors
from embforge.sharded.stages.pool_dedup import PoolRequester, RequestedPools
from embforge.sharded.stages.stage_metadata import StageArrays

ALIGNMENT = 32
"""The bytes of the widest load of a kernel."""
POOLED = -1
"""The key of the section of pooled columns. The other keys are the indices of features in the owner's collection."""


class Section(NamedTuple):
    """Rows of a block that belong together."""

    key: int
    runs: list[tuple[int, list[int]]]
    """Runs of rows with the same columns: for each, the number of rows, and the widths of the features in a row."""

    @property
    def rows(self) -> int:
        """The number of rows."""
        return sum(rows for rows, _ in self.runs)

    def size(self, format: str) -> int:
        """The number of bytes on the wire, in a format."""
        return sum(rows * row_bytes(format, widths) for rows, widths in self.runs)


class ReceivedVectors(NamedTuple):
    """The results that the owners sent for this rank's samples."""

    partials: Tensor
    """Partial pools from all other ranks, and after them from nodes, flat."""
    begins: tuple[int, ...]
    """Where the block of each rank and node begins in `partials`, and where the last one ends."""
    own: Tensor | None
    """`[samples, columns]` partial pools of this rank itself, in the memory that its kernel wrote them to."""
    requested: RequestedPools | None
    """The pools that were requested; None if the owners sent a pool of every bag."""
    rows: list[Tensor]
    """The received rows of each sequence piece, shard by shard."""


class GradientBuffers(NamedTuple):
    """The memory into which the gradients of partial pools are written."""

    partials: Tensor
    """Gradients for all other ranks, and after them for nodes, flat."""
    begins: tuple[int, ...]
    """Where the block of each rank and node begins in `partials`, and where the last one ends."""
    own: Tensor | None
    """Gradients for this rank itself, which are a part of `whole`. If all ranks get the same gradients, they are sent
    from here, too."""
    whole: Tensor | None
    """`[samples of all ranks, columns]` gradients that the backward of this rank's own collection reads."""


@dataclass(frozen=True)
class Vectors:
    """The exchange of vectors of one module."""

    arrays: StageArrays
    exchange: Exchange
    forward_wire: Wire
    backward_wire: Wire
    plan: StagePlan
    kernels: str | None = None

    @property
    def rank(self) -> int:
        return self.arrays.rank

    @cached_property
    def sequence_locals(self) -> tuple[tuple[int, ...], ...]:
        """For each rank, the features of its own collection whose rows are sent one by one."""
        return tuple(
            () if local is None else tuple(f.index for f in local.layout.sequence_features)
            for local in self.arrays.geometry.locals
        )

    @cached_property
    def widths(self) -> tuple[list[int], ...]:
        """For each rank, the widths of the pooled features of its own collection that are sent directly."""
        return tuple(direct_widths(local) for local in self.arrays.geometry.locals)

    def _rows(self, distributed: Distributed, owner: int, index: int, source: int) -> int:
        """How many rows of a sequence feature an owner sends to a source of samples. This rank is one of the two;
        `index` is the feature's in the owner's collection."""
        local = self.arrays.geometry.locals[owner]
        assert local is not None
        stream = local.features[index].stream
        if source == self.rank:
            return int(distributed.sent[stream])
        return int(distributed.received[source, self.arrays.stream_numbers[stream]])

    def sections(self, distributed: Distributed, owner: int, source: int) -> list[Section]:
        """The sections of the block between an owner of rows and a source of samples."""
        local = self.arrays.geometry.locals[owner]
        if local is None:
            return []
        sections = [
            Section(index, [(self._rows(distributed, owner, index, source), [local.layout.features[index].dim])])
            for index in self.sequence_locals[owner]
        ]
        if self._sends_pools(owner, source):
            sections.insert(0, Section(POOLED, [(distributed.samples[source], self.widths[owner])]))
        return sections

    def _received_sections(self, distributed: Distributed, owner: int) -> list[Section]:
        """The sections that this rank receives from an owner: all its pools, or those that this rank requested."""
        sections = self.sections(distributed, owner, self.rank)
        if distributed.requested is None or not distributed.requested.requests.owners[owner]:
            return sections
        requested = Section(POOLED, self.pool_requester.requested_runs(distributed.requested.requests, owner))
        return [requested if section.key == POOLED else section for section in sections]

    @cached_property
    def pool_requester(self) -> PoolRequester:
        """What decides which pools are requested."""
        return PoolRequester(self.arrays)

    @cached_property
    def _hierarchical(self) -> HierarchicalVectors:
        return HierarchicalVectors(
            self.arrays, self.exchange, self.forward_wire, self.backward_wire, self.plan, self.kernels
        )

    def _sends_pools(self, owner: int, source: int) -> bool:
        """Whether an owner sends pools to a source. A rank does not send to itself: its pools stay where they are."""
        return bool(self.widths[owner]) and owner != source

    def _exchange_sections(
        self,
        name: str,
        wire: Wire,
        out: list[dict[int, Tensor]],
        shapes: list[list[Section]],
    ) -> list[dict[int, Tensor]]:
        """Sends sections of bytes, `out`, to each rank. Returns the sections of bytes that each rank sent, of which
        `shapes` says what they are."""
        sent = [sum(part.numel() for part in parts.values()) for parts in out]
        sizes = [[section.size(wire.format) for section in shape] for shape in shapes]
        flat = joined([part for parts in out for part in parts.values()], self.arrays.device)
        received = self.exchange.all_to_all(name, flat, sent, [sum(of_rank) for of_rank in sizes])
        parts_in_order = iter(received.split([size for of_rank in sizes for size in of_rank]))
        return [{section.key: next(parts_in_order) for section in shape} for shape in shapes]

    def load(self) -> None:
        """Builds and loads the stages that the exchange uses. Raises what `stages_of` raises."""
        stages_of(self.plan, self.kernels)
        if self._hierarchical.width:
            self._hierarchical.load()

    # ---- Forward ------------------------------------------------------------------------------------------

    def to_samples(self, distributed: Distributed, pooled: Tensor | None, sequence: Tensor | None) -> ReceivedVectors:
        """Sends the results of this rank's own collection to the ranks of their samples. Returns what the owners sent
        for the samples of this rank."""
        geometry, wire = self.arrays.geometry, self.forward_wire
        world = geometry.world_size
        local = geometry.locals[self.rank]
        out: list[dict[int, Tensor]] = [{} for _ in range(world)]
        own: Tensor | None = None
        if local is not None:
            if self.widths[self.rank]:
                assert pooled is not None
                begin = sum(distributed.samples[: self.rank])
                own = pooled[begin : begin + distributed.samples[self.rank]].to(wire.dtype)
                for rank, part in enumerate(self._pools(distributed, pooled[:, : local.direct_width])):
                    if rank != self.rank:
                        out[rank][POOLED] = part
            first = 0
            for index in self.sequence_locals[self.rank]:
                assert sequence is not None
                width = local.layout.features[index].dim
                counts = [self._rows(distributed, self.rank, index, rank) for rank in range(world)]
                numbers = sequence[first : first + sum(counts) * width].view(-1, width)
                first += sum(counts) * width
                encoded = wire.encode(numbers, [width])
                row = row_bytes(wire.format, [width])
                for rank, part in enumerate(encoded.split([row * count for count in counts])):
                    out[rank][index] = part
        shapes = [self._received_sections(distributed, owner) for owner in range(world)]
        received = self._exchange_sections("vectors", wire, out, shapes)
        partials = self._partials(received, shapes)
        begins = self._begins(distributed, distributed.requested)
        if self._hierarchical.width:
            assert local is not None and pooled is not None
            nodes = self._hierarchical.to_samples(distributed.samples, pooled[:, local.direct_width :])
            partials = torch.cat([partials, nodes.view(-1)])
        return ReceivedVectors(partials, begins, own, distributed.requested, self._sequence_rows(received, shapes))

    def _pools(self, distributed: Distributed, pooled: Tensor) -> Sequence[Tensor]:
        """The bytes of pools for every rank: of all its samples, or of the pools that it requests."""
        wire, widths = self.forward_wire, self.widths[self.rank]
        encoded, row = wire.encode(pooled, widths), row_bytes(wire.format, widths)
        of_all_samples: Sequence[Tensor] = encoded.split([row * count for count in distributed.samples])
        if distributed.requested is None or not distributed.requested.requests.sources.any():
            return of_all_samples
        picks, sizes = self.pool_requester.picks(distributed.requested, distributed.samples, wire.format)
        picked = self.exchange.buffers.empty("picked", (sum(sizes),), torch.uint8, self.arrays.device)
        stages_of(self.plan, self.kernels).run(
            "gather",
            picks=on_device(picks, self.arrays.device),
            words=distributed.requested.words,
            rows=encoded,
            picked=picked,
            num_picks=len(picks),
            row_bytes=row,
        )
        sources = distributed.requested.requests.sources
        parts = zip(picked.split(sizes), of_all_samples, sources.tolist(), strict=True)
        return [requested if requests_pools else whole for requested, whole, requests_pools in parts]

    def _begins(self, distributed: Distributed, requested: RequestedPools | None = None) -> tuple[int, ...]:
        """Where the block of each rank, and after them of each node, begins among partial pools or their gradients, and
        where the last one ends. The block of this rank itself is empty, because its pools are not sent."""
        samples = distributed.samples[self.rank]
        if requested is None:
            sizes = [samples * sum(widths) * (rank != self.rank) for rank, widths in enumerate(self.widths)]
        else:
            sizes = self.pool_requester.received_numbers(requested.requests, samples).tolist()
        if self._hierarchical.width:
            sizes += [samples * self._hierarchical.width] * self.arrays.geometry.placement.nodes
        return tuple(accumulate(sizes, initial=0))

    def _partials(self, received: list[dict[int, Tensor]], shapes: list[list[Section]]) -> Tensor:
        """The pooled sections of all blocks, decoded, as one tensor. Not a copy if the bytes are numbers already and
        the sections are adjacent."""
        wire = self.forward_wire
        pooled = [
            (parts[POOLED], section)
            for parts, shape in zip(received, shapes, strict=True)
            for section in shape
            if section.key == POOLED
        ]
        if wire.format in PACKED:
            numbers = [
                wire.decode(run, rows, widths).view(-1)
                for part, section in pooled
                for run, (rows, widths) in zip(
                    part.split([rows * row_bytes(wire.format, widths) for rows, widths in section.runs]),
                    section.runs,
                    strict=True,
                )
            ]
            return joined(numbers, self.arrays.device, wire.dtype)
        return joined([part for part, _ in pooled], self.arrays.device).view(wire.dtype)

    def _sequence_rows(self, received: list[dict[int, Tensor]], shapes: list[list[Section]]) -> list[Tensor]:
        """The rows of each sequence piece, decoded, shard by shard."""
        wire, of_pieces = self.forward_wire, []
        for piece in self.arrays.geometry.sequence_pieces:
            shards = list(zip(piece.owners, piece.local_features, strict=True))
            rows = sum(section.rows for owner, index in shards for section in shapes[owner] if section.key == index)
            parts = [received[owner][index] for owner, index in shards]
            of_pieces.append(wire.decode(joined(parts, self.arrays.device), rows, [piece.width]))
        return of_pieces

    # ---- Backward -----------------------------------------------------------------------------------------

    @cached_property
    def _receives_in_place(self) -> bool:
        """Whether gradients are received into the memory that the owner's backward reads: they are not packed, and
        blocks contain nothing else. The same on all ranks."""
        return not self.arrays.geometry.sequence_pieces and self.backward_wire.format not in PACKED

    def _large(self, samples: Sequence[int]) -> bool:
        """Whether some rank sends or receives many bytes of gradients. The same on all ranks."""
        rows = [row_bytes(self.backward_wire.format, widths) for widths in self.widths]
        return max(max(samples) * sum(rows), sum(samples) * max(rows)) > SHORT_BYTES

    def gradient_buffers(self, distributed: Distributed) -> GradientBuffers:
        """Memory for the gradients of partial pools of a batch."""
        wire, device, empty = self.backward_wire, self.arrays.device, self.exchange.buffers.empty
        width, samples = sum(self.widths[self.rank]), distributed.samples[self.rank]
        begins, begin = self._begins(distributed), sum(distributed.samples[: self.rank])
        whole = empty("whole", (distributed.total, width), wire.dtype, device) if width else None
        own = None if whole is None else whole[begin : begin + samples]
        if self.arrays.gradients_are_equal and own is not None:
            return GradientBuffers(own.new_empty(0), begins, own, whole)
        return GradientBuffers(empty("partials", (begins[-1],), wire.dtype, device), begins, own, whole)

    def to_owners(
        self, distributed: Distributed, buffers: GradientBuffers, sequences: Sequence[Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Sends the gradients of partial pools, from their buffers, and of the rows of each sequence piece to the
        owners. Returns the gradients of the results of this rank's own collection: pooled, and sequence."""
        geometry, wire = self.arrays.geometry, self.backward_wire
        world = geometry.world_size
        out = self._outgoing(distributed, buffers, sequences)
        shapes: list[list[Section]] = []
        received: list[dict[int, Tensor]] = []
        if self._receives_in_place:
            nothing = buffers.partials.new_empty(0, dtype=torch.uint8)
            blocks = [nothing] * world if buffers.whole is None else buffers.whole.split(list(distributed.samples))
            into = [block.reshape(-1).view(torch.uint8) for block in blocks]
            sent = [parts.get(POOLED, nothing) for parts in out]
            self.exchange.exchange_blocks("gradients", sent, into, self._large(distributed.samples))
        else:
            shapes = [self.sections(distributed, self.rank, source) for source in range(world)]
            received = self._exchange_sections("gradients", wire, out, shapes)
        hierarchical = None
        if self._hierarchical.width:
            hierarchical = self._hierarchical.to_owners(distributed.samples, buffers.partials[buffers.begins[world] :])
        local = geometry.locals[self.rank]
        if local is None:
            return None, None
        pooled = buffers.whole
        for rank, parts in enumerate(received):
            if POOLED in parts:
                assert pooled is not None
                rows = wire.decode(parts[POOLED], distributed.samples[rank], self.widths[self.rank])
                pooled.split(list(distributed.samples))[rank].copy_(rows)
        if hierarchical is not None:
            last_columns = hierarchical.to(wire.dtype)
            pooled = last_columns if pooled is None else torch.cat([pooled, last_columns], dim=1)
        sequence = []
        for index in self.sequence_locals[self.rank]:
            count = sum(section.rows for shape in shapes for section in shape if section.key == index)
            encoded = joined([parts[index] for parts in received], self.arrays.device)
            sequence.append(wire.decode(encoded, count, [local.layout.features[index].dim]).view(-1))
        if pooled is None:
            pooled = torch.empty((distributed.total, 0), dtype=wire.dtype, device=self.arrays.device)
        return pooled, _aligned(joined(sequence, self.arrays.device, wire.dtype)) if sequence else None

    def _outgoing(
        self, distributed: Distributed, buffers: GradientBuffers, sequences: Sequence[Tensor]
    ) -> list[dict[int, Tensor]]:
        """The bytes for every owner, by section."""
        geometry, wire = self.arrays.geometry, self.backward_wire
        out: list[dict[int, Tensor]] = [{} for _ in range(geometry.world_size)]
        for_all: Tensor | None = None
        if self.arrays.gradients_are_equal and buffers.own is not None and geometry.world_size > 1:
            for_all = wire.encode(buffers.own, self.widths[self.rank])
        for owner, parts in enumerate(out):
            if self._sends_pools(owner, self.rank):
                if for_all is None:
                    numbers = buffers.partials[buffers.begins[owner] : buffers.begins[owner + 1]]
                    parts[POOLED] = wire.encode(numbers.view(-1, sum(self.widths[owner])), self.widths[owner])
                else:
                    parts[POOLED] = for_all
            parts |= dict.fromkeys(self.sequence_locals[owner], buffers.partials.new_empty(0, dtype=torch.uint8))
        for piece, rows in zip(geometry.sequence_pieces, sequences, strict=True):
            encoded = wire.encode(rows, [piece.width])
            sizes = [int(distributed.sent[stream]) * row_bytes(wire.format, [piece.width]) for stream in piece.streams]
            for owner, index, part in zip(piece.owners, piece.local_features, encoded.split(sizes), strict=True):
                out[owner][index] = part
        return out


def _aligned(numbers: Tensor) -> Tensor:
    """Numbers at an address from which kernels can load whole vectors; sections of a block may begin anywhere."""
    return numbers if numbers.data_ptr() % ALIGNMENT == 0 else numbers.clone()
