"""The work of the ranks of the samples: they combine the partial pools and rows that owners sent into results, and turn
the gradients of results into gradients for the owners.

Stage kernels compute pooled columns. The rows of sequence features were received as a table: a lookup in that table
gives the results, and the reduction of that lookup adds up the gradients of equal ids. Both use the kernels that every
collection has, for a spec of such tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

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
from embforge.number_formats import torch_dtype
from embforge.sharded.exchange.buffers import Buffers, on_device
from embforge.sharded.stages.all2all import ALIGNMENT, GradientBuffers, ReceivedVectors
from embforge.sharded.stages.data_distributor import Distributed
from embforge.sharded.stages.pool_dedup import PoolRequester, RequestedPools
from embforge.sharded.stages.stage_metadata import PieceArrays, StageArrays

_BLOCK_AT, _ROW_WIDTH, _OWN = (SOURCE_WORDS.index(word) for word in ("block_at", "row_width", "own"))
MOST_REMEMBERED = 64
"""The most sizes of batches whose sources are remembered."""
ABSENT_IDS = "zero"
"""The `bounds_check` of lookups in received rows: an id without a row has slot -1, and is absent."""


_SourcesKey = tuple[int, tuple[int, ...], int | None, tuple[bytes, bytes] | None]
"""What determines the positions of partial pools in a batch."""


class Results(NamedTuple):
    """The results of a forward."""

    pooled: Tensor
    sequences: dict[int, Tensor]
    """`[ids, dim]` of each feature that is not pooled."""
    winners: Tensor | None
    """int32 `[samples, columns that are selected]`: which partial pool won."""


@dataclass(frozen=True)
class Network:
    """Computes results and gradients for the samples of this rank, for one module."""

    arrays: StageArrays
    plan: StagePlan
    wire_dtype: str
    """The dtype of received rows and partial pools, after they are decoded."""
    backend: str
    arch: str
    kernels: str | None = None
    buffers: Buffers = field(default_factory=Buffers, compare=False, repr=False)
    _remembered: dict[_SourcesKey, Tensor] = field(default_factory=dict, compare=False, repr=False)
    """A cache of `_sources`."""

    @property
    def geometry(self) -> Geometry:
        return self.arrays.geometry

    def forward(self, distributed: Distributed, received: ReceivedVectors, keep: bool) -> Results:
        """The results of a batch. `keep` says whether winners are kept for a backward."""
        partials, own = received.partials, received.own
        layout, size = self.geometry.layout, distributed.input.batch
        dtype = torch_dtype(self.geometry.spec.output_dtype)
        pooled = self.buffers.empty("pooled", (size, layout.output_width), dtype, self.arrays.device)
        pieces = self.arrays.pieces.pieces
        winners = None
        if self.arrays.winner_width and keep:
            winners = partials.new_empty((size, self.arrays.winner_width), dtype=torch.int32)
        if len(pieces):
            stages_of(self.plan, self.kernels).run(
                "network_forward",
                pieces=pieces,
                sources=self._sources(
                    self.arrays.pieces, received.begins, None if own is None else own.shape[1], received.requested
                ),
                lengths=distributed.lengths,
                divisors=distributed.divisors,
                pools=None if received.requested is None else received.requested.pools,
                partials=partials,
                own_partials=own,
                pooled=pooled,
                winners=winners,
                num_pieces=len(pieces),
                batch=size,
                output_width=layout.output_width,
                divisor_width=self.arrays.divisor_width,
                winner_width=self.arrays.winner_width,
            )
        return Results(pooled, self._sequences(distributed, received.rows, pooled), winners)

    def backward(
        self,
        distributed: Distributed,
        grad: Tensor,
        winners: Tensor | None,
        buffers: GradientBuffers,
        factor: Tensor | None,
    ) -> None:
        """Writes the gradients of all partial pools into their buffers."""
        pieces = self.arrays.gradient_pieces.pieces
        if len(pieces):
            stages_of(self.plan, self.kernels).run(
                "network_backward",
                pieces=pieces,
                sources=self._sources(
                    self.arrays.gradient_pieces,
                    buffers.begins,
                    None if buffers.own is None else buffers.own.shape[1],
                ),
                lengths=distributed.lengths,
                divisors=distributed.divisors,
                grad_pooled=grad,
                winners=winners,
                partials=buffers.partials,
                own_partials=buffers.own,
                factor=factor,
                num_pieces=len(pieces),
                batch=distributed.input.batch,
                output_width=self.geometry.layout.output_width,
                divisor_width=self.arrays.divisor_width,
                winner_width=self.arrays.winner_width,
            )

    def _sources(
        self,
        pieces: PieceArrays,
        begins: tuple[int, ...],
        own_width: int | None,
        requested: RequestedPools | None = None,
    ) -> Tensor:
        """The sources of partial pools with their positions in this batch, which often are those of an earlier one.
        `begins` says where the block of each owner begins, `own_width` how wide the rows of this rank's own block
        are."""
        key = (id(pieces.sources), begins, own_width, None if requested is None else requested.requests.sent_key)
        kept = self._remembered.get(key)
        if kept is None:
            _, owners, sources = pieces
            in_batch = sources.copy()
            if len(owners):
                if requested is None:
                    in_batch[:, _BLOCK_AT] = np.array(begins)[owners]
                else:
                    in_batch = self._pool_requester.sources_in_batch(requested.requests, begins, owners, sources)
                own = owners == self.arrays.rank
                if own_width is not None:
                    in_batch[own, _BLOCK_AT], in_batch[own, _ROW_WIDTH], in_batch[own, _OWN] = 0, own_width, 1
            kept = on_device(in_batch, self.arrays.device)
            if len(self._remembered) >= MOST_REMEMBERED:
                self._remembered.clear()
            self._remembered[key] = kept
        return kept

    @cached_property
    def _pool_requester(self) -> PoolRequester:
        return PoolRequester(self.arrays)

    # ---- Rows that are sent one by one --------------------------------------------------------------------

    @cached_property
    def sequence_spec(self) -> CollectionSpec | None:
        """A spec with a table of received rows for each sequence piece, and a feature that looks them up."""
        tables, features = [], []
        for number, piece in enumerate(self.geometry.sequence_pieces):
            feature = self.geometry.spec.features[piece.feature]
            name = f"piece{number}"
            # INT32_ROWS is an upper limit: kernels get the number of rows with every call.
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

    def _as_tables(self, rows: Sequence[Tensor]) -> list[Tensor]:
        return [_as_table(layout, table) for layout, table in zip(self.sequence_layout.tables, rows, strict=True)]

    @cached_property
    def _layers(self) -> list[int]:
        """For each sequence piece, its row of `slots`."""
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

    def sequence_batch(self, distributed: Distributed) -> Batch:
        """The batch of a lookup in the received rows: ids are the slots of the rows."""
        batch, pieces = distributed.input, self.geometry.sequence_pieces
        size = batch.batch
        values, offsets, weights, counts, first = [], [], [], [], 0
        for layer, piece in zip(self._layers, pieces, strict=True):
            begin, end = distributed.borders[piece.feature], distributed.borders[piece.feature + 1]
            values.append(distributed.slots[layer, begin:end])
            borders = batch.offsets[piece.feature * size : (piece.feature + 1) * size + 1].to(torch.int32)
            offsets.append(borders[:-1] - (begin - first) if begin != first else borders[:-1])
            if batch.weights is not None:
                weights.append(batch.weights[begin:end])
            first += end - begin
            counts.append(end - begin)
        end_of_all = torch.full((1,), first, dtype=torch.int32, device=self.arrays.device)
        return Batch(
            values[0].contiguous() if len(values) == 1 else torch.cat(values),
            torch.cat([*offsets, end_of_all]),
            None if batch.weights is None else (weights[0] if len(weights) == 1 else torch.cat(weights)).detach(),
            size,
            tuple(counts),
        )

    def _sequences(self, distributed: Distributed, rows: Sequence[Tensor], pooled: Tensor) -> dict[int, Tensor]:
        if self.sequence_spec is None:
            return {}
        tables = self._as_tables(rows)
        batch = self.sequence_batch(distributed)
        layout = self.sequence_layout
        assert batch.rows_per_feature is not None
        sizes = [batch.rows_per_feature[f.index] * f.dim for f in layout.sequence_features]
        pooled_rows, flat = self._program("forward")(
            metadata_of(tables, ABSENT_IDS), tables, batch, sum(sizes), ABSENT_IDS
        )
        of_pieces = dict(
            zip([f.index for f in layout.sequence_features], flat.split(sizes) if flat is not None else (), strict=True)
        )
        by_feature: dict[int, list[Tensor]] = {}
        for number, piece in enumerate(self.geometry.sequence_pieces):
            of_piece, whole = layout.features[number], self.geometry.layout.features[piece.feature]
            if of_piece.column is None:
                by_feature.setdefault(piece.feature, []).append(of_pieces[number].view(-1, piece.width))
                continue
            # A slot of a concat bag is as wide as a whole row, so the columns of a piece are in each slot.
            hotness, column = whole.width // whole.dim, whole.column
            assert column is not None
            target = pooled[:, column : column + whole.width].unflatten(1, (hotness, whole.dim))
            slots = pooled_rows[:, of_piece.column : of_piece.column + of_piece.width]
            target[:, :, piece.begin : piece.begin + piece.width] = slots.unflatten(1, (hotness, piece.width))
        return {
            feature: parts[0] if len(parts) == 1 else torch.cat(parts, dim=1) for feature, parts in by_feature.items()
        }

    def sequence_gradients(
        self, distributed: Distributed, grad: Tensor, sequences: dict[int, Tensor | None]
    ) -> Gradients:
        """The gradients of results as gradients of the lookup in the received rows."""
        layout, size = self.sequence_layout, distributed.input.batch
        dtype = grad.dtype
        pooled = grad.new_empty((size, layout.output_width))
        flat = []
        for number, piece in enumerate(self.geometry.sequence_pieces):
            of_piece, whole = layout.features[number], self.geometry.layout.features[piece.feature]
            columns = slice(piece.begin, piece.begin + piece.width)
            if of_piece.column is None:
                gradient = sequences.get(piece.feature)
                count = distributed.borders[piece.feature + 1] - distributed.borders[piece.feature]
                rows = grad.new_zeros((count, whole.dim)) if gradient is None else gradient
                flat.append(rows[:, columns].to(dtype).reshape(-1))
                continue
            hotness, column = whole.width // whole.dim, whole.column
            assert column is not None
            source = grad[:, column : column + whole.width].unflatten(1, (hotness, whole.dim))[:, :, columns]
            pooled[:, of_piece.column : of_piece.column + of_piece.width] = source.flatten(1)
        return Gradients(pooled, torch.cat(flat) if flat else None, None, None)

    def row_gradients(
        self,
        distributed: Distributed,
        batch: Batch,
        gradients: Gradients,
        rows: Sequence[Tensor],
        factor: Tensor | None,
    ) -> list[Tensor]:
        """For each sequence piece, the gradients of the received rows. If equal ids share a row, their gradients are
        added up."""
        if self.sequence_spec is None:
            return []
        tables = self._as_tables(rows)
        no_states = [table.new_empty((table.shape[0], 0), dtype=torch.float32) for table in tables]
        metadata = update_metadata_of(tables, no_states, [True] * len(tables), ABSENT_IDS)
        reduced = self._program("reduce")(metadata, tables, batch, gradients, ABSENT_IDS)
        result = []
        for table, (_, gradient) in zip(rows, reduced, strict=True):
            assert gradient.shape[0] == table.shape[0], "a row was received that no id looks up"
            result.append(gradient if factor is None else gradient * factor)
        return result

    def weight_gradient(self, batch: Batch, gradients: Gradients, rows: Sequence[Tensor]) -> Tensor:
        """The gradients of the weights of sequence features, in the order of `sequence_batch`."""
        tables = self._as_tables(rows)
        no_states = [table.new_empty((table.shape[0], 0), dtype=torch.float32) for table in tables]
        metadata = update_metadata_of(tables, no_states, [True] * len(tables), ABSENT_IDS)
        gradient: Tensor = self._program("weight_gradient")(metadata, tables, batch, gradients, ABSENT_IDS)
        return gradient


def _as_table(layout: TableLayout, rows: Tensor) -> Tensor:
    """Rows as kernels expect them: aligned, with the stride of the layout, and at least one row, so that they have an
    address."""
    if rows.shape[0] and layout.stride_elements == rows.shape[1] and rows.data_ptr() % ALIGNMENT == 0:
        return rows
    table = rows.new_zeros((max(1, rows.shape[0]), layout.stride_elements))[:, : rows.shape[1]]
    table[: rows.shape[0]] = rows
    return table
