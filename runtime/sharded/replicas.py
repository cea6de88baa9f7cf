"""Replicated tables: every rank looks up its samples in its own copy of these tables, and one all-reduce adds up the
gradients of all ranks."""

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
from embforge.sharded.stages.model_forward import CollectionOptions
from embforge.training.calls import run_forward_kernel, run_reduce_kernel, run_weight_gradient_kernel
from embforge.training.pending import Pass
from embforge.training.rule_groups import RuleGroups


class KeptReplicas(NamedTuple):
    """What a lookup in replicated tables keeps for its backward."""

    batch: Batch
    """The part of the rank's batch with ids of replicated tables."""
    divisors: Tensor | None
    winners: Tensor | None


class Replicas:
    """The replicated tables of a collection on one rank."""

    def __init__(
        self, geometry: Geometry, exchange: Exchange, optimizer: RuleGroups, options: CollectionOptions
    ) -> None:
        assert geometry.replicated is not None
        self.exchange = exchange
        self.features = [
            index
            for index, feature in enumerate(geometry.spec.features)
            if geometry.placement.by_name[feature.table].replicated
        ]
        self.layout = geometry.layout
        # Gradients always accumulate here, because they are added up over ranks before they are used.
        self.module = EmbeddingCollection(geometry.replicated, optimizer=optimizer, accumulate=True, **options)

    def load(self, ids: torch.dtype, trains: bool) -> None:
        """Builds and loads the kernels of calls with ids of this dtype. Raises what `kernel_of` raises."""
        programs = self.module.programs[ids]
        needed = (programs.train, programs.reduce, programs.step) if trains else (programs.forward,)
        for program in needed:
            kernel_of(program, needed)

    def forward(self, distributed: Distributed, pooled: Tensor, keep: bool) -> tuple[dict[int, Tensor], KeptReplicas]:
        """Looks up ids of replicated tables. Writes their columns of the pooled result, and returns the rows of
        features that are not pooled, and what the backward needs."""
        module, batch = self.module, self._batch(distributed)
        programs = module.programs[batch.values.dtype]
        assert batch.rows_per_feature is not None  # `_batch` counts them
        rows = [batch.rows_per_feature[f.index] for f in module.layout.sequence_features]
        elements = sequence_elements(module.layout, rows) if rows else 0
        results = run_forward_kernel(
            programs.train if keep else programs.forward, self.module.table_memory(), batch, elements
        )
        for own, whole in self._columns():
            pooled[:, whole] = results.pooled[:, own]
        sizes = [count * f.dim for count, f in zip(rows, module.layout.sequence_features, strict=True)]
        parts = results.sequence.split(sizes) if results.sequence is not None else ()
        sequences = {
            self.features[feature.index]: part.view(-1, feature.dim)
            for feature, part in zip(module.layout.sequence_features, parts, strict=True)
        }
        return sequences, KeptReplicas(batch, results.divisors, results.winners)

    def backward(self, kept: KeptReplicas, grad: Tensor, sequences: dict[int, Tensor | None]) -> None:
        """Reduces the gradients of this rank's samples and keeps them for `step`."""
        batch = kept.batch
        gradients = self._gradients(kept, grad, sequences)
        reduced = run_reduce_kernel(
            self.module.programs[batch.values.dtype].reduce, self.module.table_memory(), batch, gradients
        )
        self.module.trainer.keep(Pass(reduced, []))

    def weight_gradient(
        self, distributed: Distributed, kept: KeptReplicas, grad: Tensor, sequences: dict[int, Tensor | None]
    ) -> Tensor:
        """The gradients of the weights of this rank's batch; 0 for ids of other tables."""
        batch = kept.batch
        gradients = self._gradients(kept, grad, sequences)
        program = self.module.programs[batch.values.dtype].weight_gradient
        own = run_weight_gradient_kernel(program, self.module.table_memory(), batch, gradients)
        result, first = torch.zeros(distributed.input.values.numel(), dtype=torch.float32, device=grad.device), 0
        for feature, count in zip(self.features, batch.rows_per_feature or (), strict=True):
            begin = distributed.borders[feature]
            result[begin : begin + count] = own[first : first + count]
            first += count
        return result

    def _gradients(self, kept: KeptReplicas, grad: Tensor, sequences: dict[int, Tensor | None]) -> Gradients:
        batch, divisors, winners = kept
        assert batch.rows_per_feature is not None  # `_batch` counts them
        layout = self.module.layout
        pooled = grad.new_empty((grad.shape[0], layout.output_width))
        for own, whole in self._columns():
            pooled[:, own] = grad[:, whole]
        flat = []
        for feature in layout.sequence_features:
            gradient = sequences.get(self.features[feature.index])
            if gradient is None:
                gradient = grad.new_zeros((batch.rows_per_feature[feature.index], feature.dim))
            flat.append(gradient.to(grad.dtype).reshape(-1))
        return Gradients(pooled, torch.cat(flat) if flat else None, divisors, winners)

    def step(self, factor: Tensor | None = None) -> None:
        """Updates the replicas of all ranks in the same way, by the gradients of all ranks since the last update."""
        trainer = self.module.trainer
        tables = self.module.spec.tables
        widths = [table.embedding_dim + 1 for table in tables]  # the last column says whether a row occurs
        sizes = [table.num_embeddings * width for table, width in zip(tables, widths, strict=True)]
        flat = torch.zeros(sum(sizes), dtype=torch.float32, device=self.module.device)
        blocks = [part.view(-1, width) for part, width in zip(flat.split(sizes), widths, strict=True)]
        for backward in trainer.waiting:
            for block, (rows, gradient) in zip(blocks, backward.reduced, strict=True):
                block[rows, :-1] += gradient  # a row occurs only once in a reduced backward
                block[rows, -1] = 1
        self.exchange.all_reduce("replicas", flat)
        reduced = []
        for block in blocks:
            rows = block[:, -1].nonzero()[:, 0]
            gradient = block[rows, :-1]
            reduced.append((rows, gradient if factor is None else gradient * factor))
        trainer.waiting = [Pass(reduced, [])]
        self.module.step()

    def _batch(self, distributed: Distributed) -> Batch:
        """The part of a rank's batch with ids of replicated tables."""
        batch, size = distributed.input, distributed.input.batch
        parts, offsets, weights, first = [], [], [], 0
        counts = []
        for feature in self.features:
            begin, end = distributed.borders[feature], distributed.borders[feature + 1]
            parts.append(batch.values[begin:end])
            offsets.append(batch.offsets[feature * size : (feature + 1) * size] - (begin - first))
            if batch.weights is not None:
                weights.append(batch.weights[begin:end].detach())
            first += end - begin
            counts.append(end - begin)
        last = batch.offsets.new_full((1,), first)
        return Batch(
            torch.cat(parts), torch.cat([*offsets, last]), torch.cat(weights) if weights else None, size, tuple(counts)
        )

    def _columns(self) -> Iterator[tuple[slice, slice]]:
        """For each pooled feature of replicated tables, its columns among these features, and among all features."""
        for own, feature in zip(self.module.layout.features, self.features, strict=True):
            whole = self.layout.features[feature]
            if own.column is not None and whole.column is not None:
                yield slice(own.column, own.column + own.width), slice(whole.column, whole.column + whole.width)
