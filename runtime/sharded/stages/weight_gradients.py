"""Gradients of per-sample weights. The owners have the rows for them, the ranks of the samples have the weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embforge.codegen.poolings import Divisor
from embforge.codegen.sharding.geometry import Geometry
from embforge.inputs import Batch
from embforge.launch.gradients import Gradients
from embforge.sharded.exchange.collectives import Exchange
from embforge.sharded.stages.data_distributor import Distributed
from embforge.sharded.stages.model_forward import Owner
from embforge.sharded.stages.network import Network
from embforge.sharded.stages.stage_metadata import StageArrays


@dataclass(frozen=True)
class WeightGradients:
    """Computes the gradients of the weights of this rank's batch: fp32, one per id."""

    arrays: StageArrays
    exchange: Exchange
    owner: Owner | None
    network: Network
    factor: Tensor | None
    """The factor by which the gradients of rows are multiplied; None for 1."""

    @property
    def geometry(self) -> Geometry:
        return self.arrays.geometry

    def of_pools(self, distributed: Distributed, grad: Tensor, pooled: Tensor, local: Gradients | None) -> Tensor:
        """The gradients of weights of pooled features, 0 for others. All ranks must call, because owners compute the
        products of rows and gradients. `local` has the gradients of this rank's own results."""
        result = torch.zeros(distributed.input.values.numel(), dtype=torch.float32, device=grad.device)
        self._add_pooled(distributed, grad, pooled, self._from_owners(distributed, local), result)
        return result

    def add_of_rows(
        self, result: Tensor, distributed: Distributed, batch: Batch, gradients: Gradients, rows: list[Tensor]
    ) -> None:
        """Adds the gradients of weights of features that are not pooled to `result`. `rows` are the received rows of
        these features; `batch` and `gradients` are those of the lookup in them."""
        of_rows = self.network.weight_gradient(batch, gradients, rows)
        first = 0
        for piece, count in zip(self.geometry.sequence_pieces, batch.rows_per_feature or (), strict=True):
            begin = distributed.borders[piece.feature]
            result[begin : begin + count] += of_rows[first : first + count]
            first += count

    def _from_owners(self, distributed: Distributed, local: Gradients | None) -> dict[int, Tensor]:
        """For each weighted stream that this rank sent, the products of the bag's gradient and the row of each id."""
        geometry, rank, world = self.geometry, self.arrays.rank, self.geometry.world_size
        own_streams = [s for s in geometry.streams_to[rank] if geometry.streams[s].weighted]
        outgoing: list[list[Tensor]] = [[] for _ in range(world)]
        if local is not None and self.owner is not None and own_streams:
            # A rank that holds rows gets ids.
            assert distributed.local is not None and distributed.local.rows_per_feature is not None
            products = self.owner.weight_gradient(distributed.local, local)
            if self.factor is not None:  # gradients of weights belong to one rank, so they are not averaged
                products = products / self.factor
            parts = products.split(list(distributed.local.rows_per_feature))
            numbers = {stream: number for number, stream in enumerate(geometry.streams_to[rank])}
            for stream in own_streams:
                counts = distributed.received[:, numbers[stream]].tolist()
                # Pieces of columns share the ids of a stream; their products add up to that of the whole row.
                own = [parts[i] for i, f in enumerate(self.owner.local.features) if f.stream == stream]
                total = own[0] if len(own) == 1 else torch.stack(own).sum(0)
                for source, part in enumerate(total.split(counts)):
                    outgoing[source].append(part)
        sent_streams = [[s for s in streams if geometry.streams[s].weighted] for streams in geometry.streams_to]
        flat = [part for of_rank in outgoing for part in of_rank]
        received = self.exchange.all_to_all(
            "weight_gradients",
            torch.cat(flat) if flat else torch.empty(0, dtype=torch.float32, device=self.arrays.device),
            [sum(part.numel() for part in of_rank) for of_rank in outgoing],
            [int(sum(distributed.sent[s] for s in streams)) for streams in sent_streams],
        )
        in_order = [s for streams in sent_streams for s in streams]
        return dict(zip(in_order, received.split([int(distributed.sent[s]) for s in in_order]), strict=True))

    def _add_pooled(
        self, distributed: Distributed, grad: Tensor, pooled: Tensor, products: dict[int, Tensor], result: Tensor
    ) -> None:
        """Adds the products of each stream to `result`, at the positions of its ids, and corrects them for divisors."""
        geometry, batch = self.geometry, distributed.input
        corrected: set[int] = set()
        for bucketing in geometry.bucketings:
            streams = [geometry.streams[s] for s in bucketing.streams]
            if not streams[0].weighted:
                continue
            feature = bucketing.feature
            begin, end = distributed.borders[feature], distributed.borders[feature + 1]
            ids = batch.values[begin:end].to(torch.int64)
            rows = int(self.arrays.features[feature, 0])
            padding = geometry.spec.features[feature].padding_idx
            present = (ids >= 0) & (ids < rows)
            if padding is not None:
                present &= ids != padding
            if len(streams) == 1:
                result[begin:end] += torch.where(present, products[bucketing.streams[0]], 0.0)
            else:
                keys = ids + int(self.arrays.features[feature, 2])
                rows_of_shard = streams[0].rows
                modulo = rows_of_shard.by == "modulo"
                owner = keys % rows_of_shard.shards if modulo else keys // rows_of_shard.capacity
                for shard, stream in enumerate(bucketing.streams):
                    positions = ((owner == shard) & present).nonzero()[:, 0]
                    result[begin:end].index_add_(0, positions, products[stream])
            if feature not in corrected:
                corrected.add(feature)
                self._correct(distributed, grad, pooled, feature, present, result)

    def _correct(
        self, distributed: Distributed, grad: Tensor, pooled: Tensor, feature: int, present: Tensor, result: Tensor
    ) -> None:
        """Subtracts the part of a weight's gradient that comes through the divisor of its bag."""
        geometry, batch, size = self.geometry, distributed.input, distributed.input.batch
        layout = geometry.layout.features[feature]
        column = geometry.layout.divisor_column.get(feature)
        if column is None or not size:
            return
        assert layout.column is not None  # a feature whose pooling divides is pooled
        divisor = distributed.divisors[:, column]
        columns = slice(layout.column, layout.column + layout.width)
        product = (grad[:, columns].float() * pooled[:, columns].float()).sum(1)
        squared = layout.feature.kind.divisor is Divisor.ROOT
        share = torch.where(divisor != 0, product / (divisor * divisor if squared else divisor), 0.0)
        lengths = batch.offsets[feature * size : (feature + 1) * size + 1].diff()
        of_ids = share.repeat_interleave(lengths)
        begin, end = distributed.borders[feature], distributed.borders[feature + 1]
        if squared and batch.weights is not None:
            of_ids = of_ids * batch.weights[begin:end].detach()
        result[begin:end] -= torch.where(present, of_ids, 0.0)
