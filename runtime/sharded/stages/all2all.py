"""Vectors between ranks: results from the owners of rows to the ranks of the samples, gradients back.

A block from rank to rank is sections of rows: the pooled columns that take the direct way (of all samples, or feature
by feature what was asked for: `pool_dedup.py`), then the rows of each sequence feature. All tables' blocks go in one
all-to-all, large gradients point to point. Hierarchical columns take two more: `hierarchical.py`.
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
from embforge.sharded.stages.hierarchical import ByNodes
from embforge.sharded.stages.pool_dedup import Askers, Wanted
from embforge.sharded.stages.stage_metadata import Wiring

ALIGNMENT = 32
"""Bytes of the widest load."""
POOLED = -1
"""The key of the section of pooled columns; others are features of the owner's collection."""


class Section(NamedTuple):
    """Rows that travel together: runs of them, each as many rows of columns of some widths."""

    key: int
    runs: list[tuple[int, list[int]]]

    @property
    def rows(self) -> int:
        return sum(rows for rows, _ in self.runs)

    def size(self, format: str) -> int:
        """Bytes on the wire."""
        return sum(rows * row_bytes(format, widths) for rows, widths in self.runs)


class Arrived(NamedTuple):
    """What the owners sent for this rank's samples."""

    partials: Tensor
    """Partial pools of all other ranks (and behind them of nodes), flat."""
    begins: tuple[int, ...]
    """Where the block of each begins, then the end."""
    own: Tensor | None
    """`[samples, columns]` of this rank itself, where its kernel left them."""
    wanted: Wanted | None
    """Which pools came, if ranks ask for them."""
    rows: list[Tensor]
    """Of every sequence piece, shard by shard."""


class Room(NamedTuple):
    """Where gradients of partial pools go."""

    partials: Tensor
    begins: tuple[int, ...]
    own: Tensor | None
    """For what this rank owns itself: a part of `whole`, or what all ranks get alike."""
    whole: Tensor | None
    """`[samples of all ranks, columns]`: what the owner's backward will read."""


@dataclass(frozen=True)
class Vectors:
    """The exchange of vectors of one module."""

    wiring: Wiring
    exchange: Exchange
    forward_wire: Wire
    backward_wire: Wire
    plan: StagePlan
    kernels: str | None = None

    @property
    def rank(self) -> int:
        return self.wiring.rank

    @cached_property
    def sequence_locals(self) -> tuple[tuple[int, ...], ...]:
        """Of each rank's own collection, the features whose rows travel one by one."""
        return tuple(
            () if local is None else tuple(f.index for f in local.layout.sequence_features)
            for local in self.wiring.geometry.locals
        )

    @cached_property
    def widths(self) -> tuple[list[int], ...]:
        """Of each rank, the direct pooled columns by feature."""
        return tuple(direct_widths(local) for local in self.wiring.geometry.locals)

    def _rows(self, done: Distributed, owner: int, index: int, source: int) -> int:
        """Rows of a sequence feature of an owner's collection for a source; this rank is one of the two."""
        local = self.wiring.geometry.locals[owner]
        assert local is not None
        stream = local.features[index].stream
        if source == self.rank:
            return int(done.sent[stream])
        return int(done.received[source, self.wiring.stream_numbers[stream]])

    def sections(self, done: Distributed, owner: int, source: int) -> list[Section]:
        """What travels between an owner of rows and a source of samples."""
        local = self.wiring.geometry.locals[owner]
        if local is None:
            return []
        pooled = [Section(POOLED, [(done.samples[source], self.widths[owner])])] if self._travels(owner, source) else []
        return pooled + [
            Section(index, [(self._rows(done, owner, index, source), [local.layout.features[index].dim])])
            for index in self.sequence_locals[owner]
        ]

    def _arriving(self, done: Distributed, owner: int) -> list[Section]:
        """What comes of an owner's results: its pools, or those of them that this rank asked for."""
        found = self.sections(done, owner, self.rank)
        if done.wanted is None or not done.wanted.asked.owners[owner]:
            return found
        asked = Section(POOLED, self.askers.runs(done.wanted.asked, owner))
        return [asked if section.key == POOLED else section for section in found]

    @cached_property
    def askers(self) -> Askers:
        """Who asks whom for what."""
        return Askers(self.wiring)

    @cached_property
    def _by_nodes(self) -> ByNodes:
        return ByNodes(self.wiring, self.exchange, self.forward_wire, self.backward_wire, self.plan, self.kernels)

    def _travels(self, owner: int, source: int) -> bool:
        """Whether pools do; what a rank has for itself lies where it is wanted."""
        return bool(self.widths[owner]) and owner != source

    def _trade(
        self,
        name: str,
        wire: Wire,
        out: list[dict[int, Tensor]],
        shapes: list[list[Section]],
    ) -> list[dict[int, Tensor]]:
        """Sections of bytes to each rank; of each rank the sections that came, as bytes."""
        sent = [sum(part.numel() for part in parts.values()) for parts in out]
        sizes = [[section.size(wire.format) for section in shape] for shape in shapes]
        flat = joined([part for parts in out for part in parts.values()], self.wiring.device)
        received = self.exchange.all_to_all(name, flat, sent, [sum(of_rank) for of_rank in sizes])
        found = iter(received.split([size for of_rank in sizes for size in of_rank]))
        return [{section.key: next(found) for section in shape} for shape in shapes]

    def load(self) -> None:
        """Builds and loads the stages that stand beside the exchange. Raises what `stages_of` raises."""
        stages_of(self.plan, self.kernels)
        if self._by_nodes.width:
            self._by_nodes.load()

    # ---- Forward ------------------------------------------------------------------------------------------

    def to_samples(self, done: Distributed, pooled: Tensor | None, sequence: Tensor | None) -> Arrived:
        """An owner's results to the ranks of their samples."""
        geometry, wire = self.wiring.geometry, self.forward_wire
        world = geometry.world_size
        local = geometry.locals[self.rank]
        out: list[dict[int, Tensor]] = [{} for _ in range(world)]
        own: Tensor | None = None
        if local is not None:
            if self.widths[self.rank]:
                assert pooled is not None
                begin = sum(done.samples[: self.rank])
                own = pooled[begin : begin + done.samples[self.rank]].to(wire.dtype)
                for rank, part in enumerate(self._pools(done, pooled[:, : local.direct_width])):
                    if rank != self.rank:
                        out[rank][POOLED] = part
            first = 0
            for index in self.sequence_locals[self.rank]:
                assert sequence is not None
                width = local.layout.features[index].dim
                counts = [self._rows(done, self.rank, index, rank) for rank in range(world)]
                numbers = sequence[first : first + sum(counts) * width].view(-1, width)
                first += sum(counts) * width
                encoded = wire.encode(numbers, [width])
                row = row_bytes(wire.format, [width])
                for rank, part in enumerate(encoded.split([row * count for count in counts])):
                    out[rank][index] = part
        shapes = [self._arriving(done, owner) for owner in range(world)]
        came = self._trade("vectors", wire, out, shapes)
        partials = self._partials(came, shapes)
        begins = self._begins(done, done.wanted)
        if self._by_nodes.width:
            assert local is not None and pooled is not None
            nodes = self._by_nodes.to_samples(done.samples, pooled[:, local.direct_width :])
            partials = torch.cat([partials, nodes.view(-1)])
        return Arrived(partials, begins, own, done.wanted, self._sequence_rows(came, shapes))

    def _pools(self, done: Distributed, pooled: Tensor) -> Sequence[Tensor]:
        """Bytes of pools for every rank: of all its samples, or of those that it asks for."""
        wire, widths = self.forward_wire, self.widths[self.rank]
        encoded, row = wire.encode(pooled, widths), row_bytes(wire.format, widths)
        whole: Sequence[Tensor] = encoded.split([row * count for count in done.samples])
        if done.wanted is None or not done.wanted.asked.sources.any():
            return whole
        picks, sizes = self.askers.picks(done.wanted, done.samples, wire.format)
        picked = self.exchange.buffers.empty("picked", (sum(sizes),), torch.uint8, self.wiring.device)
        stages_of(self.plan, self.kernels).run(
            "gather",
            picks=on_device(picks, self.wiring.device),
            words=done.wanted.words,
            rows=encoded,
            picked=picked,
            num_picks=len(picks),
            row_bytes=row,
        )
        asking = done.wanted.asked.sources.tolist()
        return [some if asks else all_ for some, all_, asks in zip(picked.split(sizes), whole, asking, strict=True)]

    def _begins(self, done: Distributed, wanted: Wanted | None = None) -> tuple[int, ...]:
        """Where the block of each rank (and behind them of each node) begins among partial pools or their gradients;
        the last: how many numbers there are. A rank's own block lies elsewhere."""
        samples = done.samples[self.rank]
        if wanted is None:
            sizes = [samples * sum(widths) * (rank != self.rank) for rank, widths in enumerate(self.widths)]
        else:
            sizes = self.askers.numbers(wanted.asked, samples).tolist()
        if self._by_nodes.width:
            sizes += [samples * self._by_nodes.width] * self.wiring.geometry.placement.nodes
        return tuple(accumulate(sizes, initial=0))

    def _partials(self, came: list[dict[int, Tensor]], shapes: list[list[Section]]) -> Tensor:
        """The pooled sections side by side; no copy where bytes are numbers and nothing stands between them."""
        wire = self.forward_wire
        pooled = [
            (parts[POOLED], section)
            for parts, shape in zip(came, shapes, strict=True)
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
            return joined(numbers, self.wiring.device, wire.dtype)
        return joined([part for part, _ in pooled], self.wiring.device).view(wire.dtype)

    def _sequence_rows(self, came: list[dict[int, Tensor]], shapes: list[list[Section]]) -> list[Tensor]:
        wire, found = self.forward_wire, []
        for piece in self.wiring.geometry.sequence_pieces:
            held = list(zip(piece.owners, piece.local_features, strict=True))
            rows = sum(section.rows for owner, index in held for section in shapes[owner] if section.key == index)
            parts = [came[owner][index] for owner, index in held]
            found.append(wire.decode(joined(parts, self.wiring.device), rows, [piece.width]))
        return found

    # ---- Backward -----------------------------------------------------------------------------------------

    @cached_property
    def _lands(self) -> bool:
        """Whether gradients come in as the owner's backward reads them, and nothing with them; on all ranks alike."""
        return not self.wiring.geometry.sequence_pieces and self.backward_wire.format not in PACKED

    def _large(self, samples: Sequence[int]) -> bool:
        """Whether some rank sends or gets many bytes of gradients; on all ranks alike."""
        rows = [row_bytes(self.backward_wire.format, widths) for widths in self.widths]
        return max(max(samples) * sum(rows), sum(samples) * max(rows)) > SHORT_BYTES

    def room(self, done: Distributed) -> Room:
        """Where gradients of partial pools are to be written; what a rank has for itself, to its place in `whole`."""
        wire, device, empty = self.backward_wire, self.wiring.device, self.exchange.buffers.empty
        width, samples = sum(self.widths[self.rank]), done.samples[self.rank]
        begins, begin = self._begins(done), sum(done.samples[: self.rank])
        whole = empty("whole", (done.total, width), wire.dtype, device) if width else None
        own = None if whole is None else whole[begin : begin + samples]
        if self.wiring.alike and own is not None:
            return Room(own.new_empty(0), begins, own, whole)
        return Room(empty("partials", (begins[-1],), wire.dtype, device), begins, own, whole)

    def to_owners(
        self, done: Distributed, room: Room, sequences: Sequence[Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of partial pools, as `room` holds them, and of the rows of every sequence piece to the owners.

        Returns the gradients of this rank's own results: pooled, and sequence.
        """
        geometry, wire = self.wiring.geometry, self.backward_wire
        world = geometry.world_size
        out = self._outgoing(done, room, sequences)
        shapes: list[list[Section]] = []
        came: list[dict[int, Tensor]] = []
        if self._lands:
            nothing = room.partials.new_empty(0, dtype=torch.uint8)
            blocks = [nothing] * world if room.whole is None else room.whole.split(list(done.samples))
            into = [block.reshape(-1).view(torch.uint8) for block in blocks]
            sent = [parts.get(POOLED, nothing) for parts in out]
            self.exchange.to_places("gradients", sent, into, self._large(done.samples))
        else:
            shapes = [self.sections(done, self.rank, source) for source in range(world)]
            came = self._trade("gradients", wire, out, shapes)
        hierarchical = None
        if self._by_nodes.width:
            hierarchical = self._by_nodes.to_owners(done.samples, room.partials[room.begins[world] :])
        local = geometry.locals[self.rank]
        if local is None:
            return None, None
        pooled = room.whole
        for rank, parts in enumerate(came):
            if POOLED in parts:
                assert pooled is not None
                rows = wire.decode(parts[POOLED], done.samples[rank], self.widths[self.rank])
                pooled.split(list(done.samples))[rank].copy_(rows)
        if hierarchical is not None:
            behind = hierarchical.to(wire.dtype)
            pooled = behind if pooled is None else torch.cat([pooled, behind], dim=1)
        sequence = []
        for index in self.sequence_locals[self.rank]:
            count = sum(section.rows for shape in shapes for section in shape if section.key == index)
            rows_in = joined([parts[index] for parts in came], self.wiring.device)
            sequence.append(wire.decode(rows_in, count, [local.layout.features[index].dim]).view(-1))
        if pooled is None:
            pooled = torch.empty((done.total, 0), dtype=wire.dtype, device=self.wiring.device)
        return pooled, _aligned(joined(sequence, self.wiring.device, wire.dtype)) if sequence else None

    def _outgoing(self, done: Distributed, room: Room, sequences: Sequence[Tensor]) -> list[dict[int, Tensor]]:
        """Bytes for every owner, by section."""
        geometry, wire = self.wiring.geometry, self.backward_wire
        out: list[dict[int, Tensor]] = [{} for _ in range(geometry.world_size)]
        same: Tensor | None = None
        if self.wiring.alike and room.own is not None and geometry.world_size > 1:
            same = wire.encode(room.own, self.widths[self.rank])
        for owner, parts in enumerate(out):
            if self._travels(owner, self.rank):
                numbers = room.partials[room.begins[owner] : room.begins[owner + 1]]
                shaped = numbers.view(-1, sum(self.widths[owner])) if same is None else numbers
                parts[POOLED] = wire.encode(shaped, self.widths[owner]) if same is None else same
            parts |= dict.fromkeys(self.sequence_locals[owner], room.partials.new_empty(0, dtype=torch.uint8))
        for piece, rows in zip(geometry.sequence_pieces, sequences, strict=True):
            encoded = wire.encode(rows, [piece.width])
            sizes = [int(done.sent[stream]) * row_bytes(wire.format, [piece.width]) for stream in piece.streams]
            for owner, index, part in zip(piece.owners, piece.local_features, encoded.split(sizes), strict=True):
                out[owner][index] = part
        return out


def _aligned(numbers: Tensor) -> Tensor:
    """Where kernels may load whole vectors; sections of a block begin anywhere."""
    return numbers if numbers.data_ptr() % ALIGNMENT == 0 else numbers.clone()
