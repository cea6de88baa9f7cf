"""Replicated tables: every rank looks up its own samples in its own copy; gradients of all are added by one
all-reduce."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from embforge.codegen.sharding.geometry import Geometry
from embforge.collection import EmbeddingCollection
from embforge.inputs import Batch
from embforge.launch.gradients import Gradients
from embforge.launch.kernels import kernel_of
from embforge.operator_arguments import sequence_elements
from embforge.sharded.exchange.collectives import Exchange
from embforge.sharded.stages.data_distributor import Distributed
from embforge.sharded.stages.model_forward import OwnOptions
from embforge.training.calls import run_forward_kernel, run_reduce_kernel, run_weight_gradient_kernel
from embforge.training.pending import Pass
from embforge.training.rule_groups import RuleGroups


class KeptReplicas(NamedTuple):
    """What a lookup in replicas keeps for its backward."""

    batch: Batch
    """The part of the rank's batch that is looked up here."""
    divisors: Tensor | None
    winners: Tensor | None


class Replicas:
    """The replicated tables of a collection on one rank."""

    def __init__(self, geometry: Geometry, exchange: Exchange, optimizer: RuleGroups, options: OwnOptions) -> None:
        assert geometry.replicated is not None
        self.exchange = exchange
        self.features = [
            index
            for index, feature in enumerate(geometry.spec.features)
            if geometry.placement.by_name[feature.table].replicated
        ]
        self.layout = geometry.layout
        # Gradients always wait here: they are added over ranks before they are used.
        self.module = EmbeddingCollection(geometry.replicated, optimizer=optimizer, accumulate=True, **options)

    def load(self, ids: torch.dtype, trains: bool) -> None:
        """Builds and loads the kernels of calls with such ids. Raises what `kernel_of` raises."""
        found = self.module.programs[ids]
        needed = (found.train, found.reduce, found.step) if trains else (found.forward,)
        for program in needed:
            kernel_of(program, needed)

    def forward(self, done: Distributed, pooled: Tensor, keep: bool) -> tuple[dict[int, Tensor], KeptReplicas]:
        """Writes columns of the pooled result; returns the rows of features that are not pooled."""
        module, batch = self.module, self._batch(done)
        programs = module.programs[batch.values.dtype]
        assert batch.rows_per_feature is not None  # `_batch` counts them
        rows = [batch.rows_per_feature[f.index] for f in module.layout.sequence_features]
        elements = sequence_elements(module.layout, rows) if rows else 0
        found = run_forward_kernel(
            programs.train if keep else programs.forward, self.module.table_memory(), batch, elements
        )
        for own, whole in self._columns():
            pooled[:, whole] = found.pooled[:, own]
        sizes = [count * f.dim for count, f in zip(rows, module.layout.sequence_features, strict=True)]
        parts = found.sequence.split(sizes) if found.sequence is not None else ()
        places = [self.features[f.index] for f in module.layout.sequence_features]
        dims = [f.dim for f in module.layout.sequence_features]
        sequences = {place: part.view(-1, dim) for place, part, dim in zip(places, parts, dims, strict=True)}
        return sequences, KeptReplicas(batch, found.divisors, found.winners)

    def backward(self, kept: KeptReplicas, grad: Tensor, sequences: dict[int, Tensor | None]) -> None:
        """Leaves the gradients of this rank's samples for `step`."""
        batch = kept.batch
        gradients = self._gradients(kept, grad, sequences)
        reduced = run_reduce_kernel(
            self.module.programs[batch.values.dtype].reduce, self.module.table_memory(), batch, gradients
        )
        self.module.trainer.waiting.append(Pass(reduced, []))

    def weight_gradient(
        self, done: Distributed, kept: KeptReplicas, grad: Tensor, sequences: dict[int, Tensor | None]
    ) -> Tensor:
        """Of the weights of this rank's batch; 0 for ids of other tables."""
        batch = kept.batch
        gradients = self._gradients(kept, grad, sequences)
        program = self.module.programs[batch.values.dtype].weight_gradient
        own = run_weight_gradient_kernel(program, self.module.table_memory(), batch, gradients)
        found, first = torch.zeros(done.given.values.numel(), dtype=torch.float32, device=grad.device), 0
        for feature, count in zip(self.features, batch.rows_per_feature or (), strict=True):
            begin = done.borders[feature]
            found[begin : begin + count] = own[first : first + count]
            first += count
        return found

    def _gradients(self, kept: KeptReplicas, grad: Tensor, sequences: dict[int, Tensor | None]) -> Gradients:
        batch, divisors, winners = kept
        assert batch.rows_per_feature is not None  # `_batch` counts them
        layout = self.module.layout
        pooled = grad.new_empty((grad.shape[0], layout.output_width))
        for own, whole in self._columns():
            pooled[:, own] = grad[:, whole]
        flat = []
        for feature in layout.sequence_features:
            given = sequences.get(self.features[feature.index])
            if given is None:
                given = grad.new_zeros((batch.rows_per_feature[feature.index], feature.dim))
            flat.append(given.to(grad.dtype).reshape(-1))
        return Gradients(pooled, torch.cat(flat) if flat else None, divisors, winners)

    def step(self, factor: Tensor | None = None) -> None:
        """One update of all replicas alike, from the gradients of all ranks since the last."""
        trainer = self.module.trainer
        tables = self.module.spec.tables
        width = [table.embedding_dim + 1 for table in tables]  # the last column tells whether a row occurs
        sizes = [table.num_embeddings * w for table, w in zip(tables, width, strict=True)]
        flat = torch.zeros(sum(sizes), dtype=torch.float32, device=self.module.device)
        blocks = [part.view(-1, w) for part, w in zip(flat.split(sizes), width, strict=True)]
        for one in trainer.waiting:
            for block, (rows, gradient) in zip(blocks, one.reduced, strict=True):
                block[rows, :-1] += gradient  # rows of a pass are different ones
                block[rows, -1] = 1
        self.exchange.all_reduce("replicas", flat)
        reduced = []
        for block in blocks:
            rows = block[:, -1].nonzero()[:, 0]
            gradient = block[rows, :-1]
            reduced.append((rows, gradient if factor is None else gradient * factor))
        trainer.waiting = [Pass(reduced, [])]
        self.module.step()

    def _batch(self, done: Distributed) -> Batch:
        given, size = done.given, done.given.batch
        parts, offsets, weights, first = [], [], [], 0
        counts = []
        for feature in self.features:
            begin, end = done.borders[feature], done.borders[feature + 1]
            parts.append(given.values[begin:end])
            offsets.append(given.offsets[feature * size : (feature + 1) * size] - (begin - first))
            if given.weights is not None:
                weights.append(given.weights[begin:end].detach())
            first += end - begin
            counts.append(end - begin)
        last = given.offsets.new_full((1,), first)
        return Batch(
            torch.cat(parts), torch.cat([*offsets, last]), torch.cat(weights) if weights else None, size, tuple(counts)
        )

    def _columns(self) -> Iterator[tuple[slice, slice]]:
        """Of each pooled feature, its columns among those of the replicated ones and in the whole."""
        for own, place in zip(self.module.layout.features, self.features, strict=True):
            whole = self.layout.features[place]
            if own.column is not None and whole.column is not None:
                yield slice(own.column, own.column + own.width), slice(whole.column, whole.column + whole.width)
