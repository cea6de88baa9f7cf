"""The samples' side: partial pools and rows that came from owners to results, and gradients of results back to them.

Pooled columns are made by the stage kernels. Rows of sequence features lie in a table that came by the exchange;
turning
them into results is a lookup in it, and adding up the gradients of equal ids is that lookup's reduction: both by the
kernels
that every collection has, for a spec of such tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from embforge.codegen.dtypes import DTYPES
from embforge.codegen.layout import CollectionLayout, TableLayout, layout_of
from embforge.codegen.params import params_type
from embforge.codegen.plan import Plan
from embforge.codegen.sharding.geometry import INT32_ROWS, Geometry
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.codegen.stages import SOURCE_WORDS, StagePlan
from embforge.inputs import Batch
from embforge.launch.gradients import Gradients
from embforge.launch.kernels import Program, kernel_of
from embforge.launch.metadata import metadata_of, update_metadata_of
from embforge.launch.stages import stages_of
from embforge.sharded.exchange.buffers import Buffers, on_device
from embforge.sharded.stages.all2all import ALIGNMENT, Arrived, Room
from embforge.sharded.stages.data_distributor import Distributed
from embforge.sharded.stages.pool_dedup import Askers, Wanted
from embforge.sharded.stages.stage_metadata import Numbers, Wiring

_BLOCK_AT, _ROW_WIDTH, _OWN = (SOURCE_WORDS.index(word) for word in ("block_at", "row_width", "own"))
MOST_PLACED = 64
"""Different sizes of batches that are remembered."""
ABSENT_IDS = "zero"
"""A slot of -1 has no row."""


_Places = tuple[int, tuple[int, ...], int | None, tuple[bytes, bytes] | None]
"""What decides where blocks of partial pools begin."""


class Results(NamedTuple):
    """What a forward makes of a batch."""

    pooled: Tensor
    sequences: dict[int, Tensor]
    """By feature: `[ids, dim]` of those that are not pooled."""
    winners: Tensor | None


@dataclass(frozen=True)
class Network:
    """The samples' side of one module."""

    wiring: Wiring
    plan: StagePlan
    wire_dtype: str
    """Of rows and partial pools, as they are computed with."""
    backend: str
    arch: str
    kernels: str | None = None
    buffers: Buffers = field(default_factory=Buffers, compare=False, repr=False)
    _placed: dict[_Places, Tensor] = field(default_factory=dict, compare=False, repr=False)
    """A cache: where blocks begin decides what kernels are told of them."""

    @property
    def geometry(self) -> Geometry:
        return self.wiring.geometry

    def forward(self, done: Distributed, arrived: Arrived, keep: bool) -> Results:
        """`keep`: a backward will come."""
        partials, own = arrived.partials, arrived.own
        layout, size = self.geometry.layout, done.given.batch
        dtype = getattr(torch, DTYPES[self.geometry.spec.output_dtype].torch_name)
        pooled = self.buffers.empty("pooled", (size, layout.output_width), dtype, self.wiring.device)
        pieces = self.wiring.pieces[0]
        winners = None
        if self.wiring.winner_width and keep:
            winners = partials.new_empty((size, self.wiring.winner_width), dtype=torch.int32)
        if len(pieces):
            stages_of(self.plan, self.kernels).run(
                "network_forward",
                pieces=pieces,
                sources=self._sources(
                    self.wiring.pieces, arrived.begins, None if own is None else own.shape[1], arrived.wanted
                ),
                lengths=done.lengths,
                divisors=done.divisors,
                pools=None if arrived.wanted is None else arrived.wanted.pools,
                partials=partials,
                own_partials=own,
                pooled=pooled,
                winners=winners,
                num_pieces=len(pieces),
                batch=size,
                output_width=layout.output_width,
                divisor_width=self.wiring.divisor_width,
                winner_width=self.wiring.winner_width,
            )
        return Results(pooled, self._sequences(done, arrived.rows, pooled), winners)

    def backward(
        self, done: Distributed, grad: Tensor, winners: Tensor | None, room: Room, factor: Tensor | None
    ) -> None:
        """Gradients of all partial pools, to where there is room for them."""
        pieces = self.wiring.gradient_pieces[0]
        if len(pieces):
            stages_of(self.plan, self.kernels).run(
                "network_backward",
                pieces=pieces,
                sources=self._sources(
                    self.wiring.gradient_pieces, room.begins, None if room.own is None else room.own.shape[1]
                ),
                lengths=done.lengths,
                divisors=done.divisors,
                grad_pooled=grad,
                winners=winners,
                partials=room.partials,
                own_partials=room.own,
                factor=factor,
                num_pieces=len(pieces),
                batch=done.given.batch,
                output_width=self.geometry.layout.output_width,
                divisor_width=self.wiring.divisor_width,
                winner_width=self.wiring.winner_width,
            )

    def _sources(
        self,
        pieces: tuple[Tensor, Numbers, Numbers],
        begins: tuple[int, ...],
        own_width: int | None,
        wanted: Wanted | None = None,
    ) -> Tensor:
        """Partial pools with the places that their blocks have in this batch; usually those of the last one."""
        key = (id(pieces[2]), begins, own_width, None if wanted is None else wanted.asked.outgoing)
        found = self._placed.get(key)
        if found is None:
            _, owners, sources = pieces
            placed = sources.copy()
            if len(owners):
                if wanted is None:
                    placed[:, _BLOCK_AT] = np.array(begins)[owners]
                else:
                    placed = self._askers.placed(wanted.asked, begins, owners, sources)
                own = owners == self.wiring.rank
                if own_width is not None:
                    placed[own, _BLOCK_AT], placed[own, _ROW_WIDTH], placed[own, _OWN] = 0, own_width, 1
            found = on_device(placed, self.wiring.device)
            if len(self._placed) >= MOST_PLACED:
                self._placed.clear()
            self._placed[key] = found
        return found

    @cached_property
    def _askers(self) -> Askers:
        return Askers(self.wiring)

    # ---- Rows that travel one by one ----------------------------------------------------------------------

    @cached_property
    def sequence_spec(self) -> CollectionSpec | None:
        """Every sequence piece as a table of the rows that came, with the feature that picks from it."""
        tables, features = [], []
        for number, piece in enumerate(self.geometry.sequence_pieces):
            feature = self.geometry.spec.features[piece.feature]
            name = f"piece{number}"
            # INT32_ROWS: kernels take the true number of rows with every call.
            tables.append(TableSpec(name, INT32_ROWS, piece.width, self.wire_dtype))  # type: ignore[arg-type]
            features.append(
                FeatureSpec(name, name, feature.pooling, weighted=feature.weighted, hotness=feature.hotness)
            )
        if not tables:
            return None
        return CollectionSpec(tuple(tables), tuple(features), self.geometry.spec.output_dtype, "rows")

    @cached_property
    def sequence_layout(self) -> CollectionLayout:
        assert self.sequence_spec is not None
        return layout_of(self.sequence_spec)

    def _laid_out(self, rows: Sequence[Tensor]) -> list[Tensor]:
        return [_laid_out(placed, table) for placed, table in zip(self.sequence_layout.tables, rows, strict=True)]

    @cached_property
    def _layers(self) -> list[int]:
        """Of each sequence piece, its row of slots."""
        seen: dict[int, dict[tuple[int, ...], int]] = {}
        for bucketing in self.geometry.bucketings:
            of_feature = seen.setdefault(bucketing.feature, {})
            of_feature[bucketing.streams] = len(of_feature)
        return [seen[piece.feature][piece.streams] for piece in self.geometry.sequence_pieces]

    def load(self, trains: bool) -> None:
        """Builds and loads the kernels of sequences. Raises what `kernel_of` raises."""
        if self.sequence_spec is not None:
            for op in ("forward", "reduce") if trains else ("forward",):
                self._program(op)

    def _program(self, op: str) -> Any:
        assert self.sequence_spec is not None
        params = params_type(self.backend, op)()
        return kernel_of(
            Program(Plan(op, self.backend, self.arch, "int32", self.sequence_spec, params), self.kernels).text
        )

    def sequence_batch(self, done: Distributed) -> Batch:
        """Slots as ids of those tables."""
        given, pieces = done.given, self.geometry.sequence_pieces
        size = given.batch
        values, offsets, weights, counts, first = [], [], [], [], 0
        for layer, piece in zip(self._layers, pieces, strict=True):
            begin, end = done.borders[piece.feature], done.borders[piece.feature + 1]
            values.append(done.slots[layer, begin:end])
            borders = given.offsets[piece.feature * size : (piece.feature + 1) * size + 1].to(torch.int32)
            offsets.append(borders[:-1] - (begin - first) if begin != first else borders[:-1])
            if given.weights is not None:
                weights.append(given.weights[begin:end])
            first += end - begin
            counts.append(end - begin)
        end_of_all = torch.full((1,), first, dtype=torch.int32, device=self.wiring.device)
        return Batch(
            values[0].contiguous() if len(values) == 1 else torch.cat(values),
            torch.cat([*offsets, end_of_all]),
            None if given.weights is None else (weights[0] if len(weights) == 1 else torch.cat(weights)).detach(),
            size,
            tuple(counts),
        )

    def _sequences(self, done: Distributed, rows: Sequence[Tensor], pooled: Tensor) -> dict[int, Tensor]:
        if self.sequence_spec is None:
            return {}
        tables = self._laid_out(rows)
        batch = self.sequence_batch(done)
        layout = self.sequence_layout
        assert batch.rows_per_feature is not None
        sizes = [batch.rows_per_feature[f.index] * f.dim for f in layout.sequence_features]
        picked, flat = self._program("forward")(metadata_of(tables, ABSENT_IDS), tables, batch, sum(sizes), ABSENT_IDS)
        parts = dict(
            zip([f.index for f in layout.sequence_features], flat.split(sizes) if flat is not None else (), strict=True)
        )
        by_feature: dict[int, list[Tensor]] = {}
        for number, piece in enumerate(self.geometry.sequence_pieces):
            placed, whole = layout.features[number], self.geometry.layout.features[piece.feature]
            if placed.column is None:
                by_feature.setdefault(piece.feature, []).append(parts[number].view(-1, piece.width))
                continue
            # A slot of a concat bag is a whole row wide: its pieces stand a row apart.
            hotness, column = whole.width // whole.dim, whole.column
            assert column is not None
            target = pooled[:, column : column + whole.width].unflatten(1, (hotness, whole.dim))
            found = picked[:, placed.column : placed.column + placed.width]
            target[:, :, piece.begin : piece.begin + piece.width] = found.unflatten(1, (hotness, piece.width))
        return {
            feature: found[0] if len(found) == 1 else torch.cat(found, dim=1) for feature, found in by_feature.items()
        }

    def sequence_gradients(self, done: Distributed, grad: Tensor, sequences: dict[int, Tensor | None]) -> Gradients:
        """Gradients of results as gradients of the lookup in the rows that came."""
        layout, size = self.sequence_layout, done.given.batch
        dtype = grad.dtype
        pooled = grad.new_empty((size, layout.output_width))
        flat = []
        for number, piece in enumerate(self.geometry.sequence_pieces):
            placed, whole = layout.features[number], self.geometry.layout.features[piece.feature]
            columns = slice(piece.begin, piece.begin + piece.width)
            if placed.column is None:
                given = sequences.get(piece.feature)
                count = done.borders[piece.feature + 1] - done.borders[piece.feature]
                rows = grad.new_zeros((count, whole.dim)) if given is None else given
                flat.append(rows[:, columns].to(dtype).reshape(-1))
                continue
            hotness, column = whole.width // whole.dim, whole.column
            assert column is not None
            source = grad[:, column : column + whole.width].unflatten(1, (hotness, whole.dim))[:, :, columns]
            pooled[:, placed.column : placed.column + placed.width] = source.flatten(1)
        return Gradients(pooled, torch.cat(flat) if flat else None, None, None)

    def row_gradients(
        self, done: Distributed, batch: Batch, gradients: Gradients, rows: Sequence[Tensor], factor: Tensor | None
    ) -> list[Tensor]:
        """Of every sequence piece the gradients of the rows that came: of equal ids that share one, their sum."""
        if self.sequence_spec is None:
            return []
        tables = self._laid_out(rows)
        no_states = [table.new_empty((table.shape[0], 0), dtype=torch.float32) for table in tables]
        metadata = update_metadata_of(tables, no_states, [True] * len(tables), ABSENT_IDS)
        reduced = self._program("reduce")(metadata, tables, batch, gradients, ABSENT_IDS)
        found = []
        for table, (_, gradient) in zip(rows, reduced, strict=True):
            assert gradient.shape[0] == table.shape[0], "every row that came was asked for"
            found.append(gradient if factor is None else gradient * factor)
        return found

    def weight_gradient(self, batch: Batch, gradients: Gradients, rows: Sequence[Tensor]) -> Tensor:
        """Of the weights of sequence features, in the order of `sequence_batch`."""
        tables = self._laid_out(rows)
        no_states = [table.new_empty((table.shape[0], 0), dtype=torch.float32) for table in tables]
        metadata = update_metadata_of(tables, no_states, [True] * len(tables), ABSENT_IDS)
        found: Tensor = self._program("weight_gradient")(metadata, tables, batch, gradients, ABSENT_IDS)
        return found


def _laid_out(placed: TableLayout, rows: Tensor) -> Tensor:
    """Rows as kernels expect them: padded as the layout says, and an address even of no rows."""
    if rows.shape[0] and placed.stride_elements == rows.shape[1] and rows.data_ptr() % ALIGNMENT == 0:
        return rows
    block = rows.new_zeros((max(1, rows.shape[0]), placed.stride_elements))[:, : rows.shape[1]]
    block[: rows.shape[0]] = rows
    return block
