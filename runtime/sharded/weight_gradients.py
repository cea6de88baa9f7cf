"""Gradients of per-sample weights: owners have the rows, the ranks of the samples have the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embforge.inputs import Batch
from embforge.launch.gradients import Gradients
from embforge.sharded.stages.data_distributor import Distributed


def weight_gradients(
    module: Any,
    done: Distributed,
    kept: dict[str, Any],
    grad: Tensor,
    pooled: Tensor,
    local: Gradients | None,
    sequence_batch: Batch | None,
    sequence_gradients: Gradients | None,
    given: dict[int, Tensor | None],
) -> Tensor:
    """fp32, one an id of this rank's batch. All ranks must call: owners compute products of rows and gradients."""
    found = torch.zeros(done.given.values.numel(), dtype=torch.float32, device=grad.device)
    _add_pooled(module, done, grad, pooled, _from_owners(module, done, local), found)
    if sequence_batch is not None and sequence_gradients is not None:
        of_rows = module.network.weight_gradient(sequence_batch, sequence_gradients, kept["rows"])
        first = 0
        for piece, count in zip(module.geometry.sequence_pieces, sequence_batch.rows_per_feature or (), strict=True):
            begin = done.borders[piece.feature]
            found[begin : begin + count] += of_rows[first : first + count]
            first += count
    if module.replicas is not None:
        found += module.replicas.weight_gradient(done, kept, grad, given)
    return found


def _from_owners(module: Any, done: Distributed, local: Gradients | None) -> dict[int, Tensor]:
    """Of every weighted stream that this rank sent: products of the gradient of a bag and the row of an id."""
    geometry, rank, world = module.geometry, module._ranks.rank, module.geometry.world_size
    mine = [s for s in geometry.streams_to[rank] if geometry.streams[s].weighted]
    out: list[list[Tensor]] = [[] for _ in range(world)]
    if local is not None and module.owner is not None and mine:
        products = module.owner.weight_gradient(done.local, local)
        if module.gradient_factor is not None:  # these are gradients of one rank's numbers, which nobody averages
            products = products / module.gradient_factor
        parts = products.split(list(done.local.rows_per_feature))  # type: ignore[union-attr, arg-type]
        numbers = {stream: number for number, stream in enumerate(geometry.streams_to[rank])}
        for stream in mine:
            counts = done.received[:, numbers[stream]].tolist()
            # Pieces of columns that share ids: the products of their parts of a row add up.
            own = [parts[i] for i, f in enumerate(module.owner.local.features) if f.stream == stream]
            total = own[0] if len(own) == 1 else torch.stack(own).sum(0)
            for source, part in enumerate(total.split(counts)):
                out[source].append(part)
    coming = [[s for s in streams if geometry.streams[s].weighted] for streams in geometry.streams_to]
    flat = [part for parts_of in out for part in parts_of]
    received = module._wires.all_to_all(
        "weight_gradients",
        torch.cat(flat) if flat else torch.empty(0, dtype=torch.float32, device=module._device),
        [sum(part.numel() for part in parts_of) for parts_of in out],
        [int(sum(done.sent[s] for s in streams)) for streams in coming],
    )
    wanted = [s for streams in coming for s in streams]
    return dict(zip(wanted, received.split([int(done.sent[s]) for s in wanted]), strict=True))


def _add_pooled(
    module: Any, done: Distributed, grad: Tensor, pooled: Tensor, products: dict[int, Tensor], found: Tensor
) -> None:
    geometry, given = module.geometry, done.given
    corrected: set[int] = set()
    for bucketing in geometry.bucketings:
        streams = [geometry.streams[s] for s in bucketing.streams]
        if not streams[0].weighted:
            continue
        feature = bucketing.feature
        begin, end = done.borders[feature], done.borders[feature + 1]
        ids = given.values[begin:end].to(torch.int64)
        rows = int(module.distributor.wiring.features[feature, 0])
        padding = geometry.spec.features[feature].padding_idx
        present = (ids >= 0) & (ids < rows)
        if padding is not None:
            present &= ids != padding
        if len(streams) == 1:
            found[begin:end] += torch.where(present, products[bucketing.streams[0]], 0.0)
        else:
            keys = ids + int(module.distributor.wiring.features[feature, 2])
            part = streams[0].rows
            owner = keys % part.shards if part.by == "modulo" else keys // part.capacity
            for shard, stream in enumerate(bucketing.streams):
                places = ((owner == shard) & present).nonzero()[:, 0]
                found[begin:end].index_add_(0, places, products[stream])
        if feature not in corrected:
            corrected.add(feature)
            _correct(module, done, grad, pooled, feature, present, found)


def _correct(
    module: Any, done: Distributed, grad: Tensor, pooled: Tensor, feature: int, present: Tensor, found: Tensor
) -> None:
    """What a weight does to the divisor of its bag."""
    geometry, given, size = module.geometry, done.given, done.given.batch
    placed = geometry.layout.features[feature]
    column = geometry.layout.divisor_column.get(feature)
    if column is None or not size:
        return
    divisor = done.divisors[:, column]
    columns = slice(placed.column, placed.column + placed.width)
    product = (grad[:, columns].float() * pooled[:, columns].float()).sum(1)
    squared = placed.feature.pooling == "sqrtn"
    share = torch.where(divisor != 0, product / (divisor * divisor if squared else divisor), 0.0)
    lengths = given.offsets[feature * size : (feature + 1) * size + 1].diff()
    of_ids = share.repeat_interleave(lengths)
    begin, end = done.borders[feature], done.borders[feature + 1]
    if squared and given.weights is not None:
        of_ids = of_ids * given.weights[begin:end].detach()
    found[begin:end] -= torch.where(present, of_ids, 0.0)
