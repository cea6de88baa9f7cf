"""Gradients of per-sample weights: owners have the rows, the ranks of the samples have the weights."""

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
from embforge.sharded.stages.stage_metadata import Wiring


@dataclass(frozen=True)
class WeightGradients:
    """The gradients of the weights of this rank's batch: fp32, one per id."""

    wiring: Wiring
    exchange: Exchange
    owner: Owner | None
    network: Network
    factor: Tensor | None
    """What the gradients of rows are multiplied by."""

    @property
    def geometry(self) -> Geometry:
        return self.wiring.geometry

    def of_pools(self, done: Distributed, grad: Tensor, pooled: Tensor, local: Gradients | None) -> Tensor:
        """Those of pooled features, 0 for others. All ranks must call: owners compute products of rows and gradients.

        `local`: the gradients of the owner's results.
        """
        found = torch.zeros(done.given.values.numel(), dtype=torch.float32, device=grad.device)
        self._add_pooled(done, grad, pooled, self._from_owners(done, local), found)
        return found

    def add_of_rows(
        self, found: Tensor, done: Distributed, batch: Batch, gradients: Gradients, rows: list[Tensor]
    ) -> None:
        """Adds those of features that are not pooled, whose rows came here: `batch` and `gradients` are the lookup in
        these."""
        of_rows = self.network.weight_gradient(batch, gradients, rows)
        first = 0
        for piece, count in zip(self.geometry.sequence_pieces, batch.rows_per_feature or (), strict=True):
            begin = done.borders[piece.feature]
            found[begin : begin + count] += of_rows[first : first + count]
            first += count

    def _from_owners(self, done: Distributed, local: Gradients | None) -> dict[int, Tensor]:
        """Of every weighted stream that this rank sent: products of the gradient of a bag and the row of an id."""
        geometry, rank, world = self.geometry, self.wiring.rank, self.geometry.world_size
        mine = [s for s in geometry.streams_to[rank] if geometry.streams[s].weighted]
        out: list[list[Tensor]] = [[] for _ in range(world)]
        if local is not None and self.owner is not None and mine:
            assert done.local is not None and done.local.rows_per_feature is not None  # a rank that holds rows gets ids
            products = self.owner.weight_gradient(done.local, local)
            if self.factor is not None:  # these are gradients of one rank's numbers, which nobody averages
                products = products / self.factor
            parts = products.split(list(done.local.rows_per_feature))
            numbers = {stream: number for number, stream in enumerate(geometry.streams_to[rank])}
            for stream in mine:
                counts = done.received[:, numbers[stream]].tolist()
                # Pieces of columns that share ids: the products of their parts of a row add up.
                own = [parts[i] for i, f in enumerate(self.owner.local.features) if f.stream == stream]
                total = own[0] if len(own) == 1 else torch.stack(own).sum(0)
                for source, part in enumerate(total.split(counts)):
                    out[source].append(part)
        coming = [[s for s in streams if geometry.streams[s].weighted] for streams in geometry.streams_to]
        flat = [part for parts_of in out for part in parts_of]
        received = self.exchange.all_to_all(
            "weight_gradients",
            torch.cat(flat) if flat else torch.empty(0, dtype=torch.float32, device=self.wiring.device),
            [sum(part.numel() for part in parts_of) for parts_of in out],
            [int(sum(done.sent[s] for s in streams)) for streams in coming],
        )
        wanted = [s for streams in coming for s in streams]
        return dict(zip(wanted, received.split([int(done.sent[s]) for s in wanted]), strict=True))

    def _add_pooled(
        self, done: Distributed, grad: Tensor, pooled: Tensor, products: dict[int, Tensor], found: Tensor
    ) -> None:
        geometry, given = self.geometry, done.given
        corrected: set[int] = set()
        for bucketing in geometry.bucketings:
            streams = [geometry.streams[s] for s in bucketing.streams]
            if not streams[0].weighted:
                continue
            feature = bucketing.feature
            begin, end = done.borders[feature], done.borders[feature + 1]
            ids = given.values[begin:end].to(torch.int64)
            rows = int(self.wiring.features[feature, 0])
            padding = geometry.spec.features[feature].padding_idx
            present = (ids >= 0) & (ids < rows)
            if padding is not None:
                present &= ids != padding
            if len(streams) == 1:
                found[begin:end] += torch.where(present, products[bucketing.streams[0]], 0.0)
            else:
                keys = ids + int(self.wiring.features[feature, 2])
                part = streams[0].rows
                owner = keys % part.shards if part.by == "modulo" else keys // part.capacity
                for shard, stream in enumerate(bucketing.streams):
                    places = ((owner == shard) & present).nonzero()[:, 0]
                    found[begin:end].index_add_(0, places, products[stream])
            if feature not in corrected:
                corrected.add(feature)
                self._correct(done, grad, pooled, feature, present, found)

    def _correct(
        self, done: Distributed, grad: Tensor, pooled: Tensor, feature: int, present: Tensor, found: Tensor
    ) -> None:
        """What a weight does to the divisor of its bag."""
        geometry, given, size = self.geometry, done.given, done.given.batch
        placed = geometry.layout.features[feature]
        column = geometry.layout.divisor_column.get(feature)
        if column is None or not size:
            return
        assert placed.column is not None  # what divides is pooled
        divisor = done.divisors[:, column]
        columns = slice(placed.column, placed.column + placed.width)
        product = (grad[:, columns].float() * pooled[:, columns].float()).sum(1)
        squared = placed.feature.kind.divisor is Divisor.ROOT
        share = torch.where(divisor != 0, product / (divisor * divisor if squared else divisor), 0.0)
        lengths = given.offsets[feature * size : (feature + 1) * size + 1].diff()
        of_ids = share.repeat_interleave(lengths)
        begin, end = done.borders[feature], done.borders[feature + 1]
        if squared and given.weights is not None:
            of_ids = of_ids * given.weights[begin:end].detach()
        found[begin:end] -= torch.where(present, of_ids, 0.0)
