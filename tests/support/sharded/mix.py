"""A small collection of all kinds of features and shard plans, and helpers for tests of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

import embforge as ef
from embforge.sharded import ColumnWise, DataParallel, RowWise, ShardedEmbeddingCollection, ShardPlan, TableWise

SPEC = ef.CollectionSpec(
    (
        ef.TableSpec("rows", 9, 4),
        ef.TableSpec("whole", 7, 4),
        ef.TableSpec("columns", 8, 8),
        ef.TableSpec("copied", 5, 4),
    ),
    (
        ef.FeatureSpec("sum", "rows"),
        ef.FeatureSpec("mean", "rows", "mean", weighted=True),
        ef.FeatureSpec("none", "whole", "none"),
        ef.FeatureSpec("concat", "whole", "concat", hotness=3),
        ef.FeatureSpec("max", "columns", "max"),
        ef.FeatureSpec("row_none", "rows", "none"),
        ef.FeatureSpec("copied", "copied", "mean"),
        ef.FeatureSpec("copied_none", "copied", "none"),
    ),
)
PLAN = ShardPlan({"rows": RowWise(), "whole": TableWise(0), "columns": ColumnWise(2), "copied": DataParallel()})
Batch = tuple[Tensor, Tensor, Tensor]


def made(spec: ef.CollectionSpec = SPEC, plan: ShardPlan = PLAN, **options: Any) -> ShardedEmbeddingCollection:
    """A sharded module whose rows do not depend on the number of ranks, by the reference, which compiles nothing."""
    options = {"optimizer": ef.optim.Adagrad(lr=0.1), "backend": "reference"} | options
    module = ShardedEmbeddingCollection(spec, plan, **options)
    module.load_full(rows_of(spec))
    return module


def unsharded(spec: ef.CollectionSpec = SPEC, **options: Any) -> ef.EmbeddingCollection:
    """The same collection as one unsharded module."""
    module = ef.EmbeddingCollection(spec, **({"optimizer": ef.optim.Adagrad(lr=0.1), "backend": "reference"} | options))
    for name, rows in rows_of(spec).items():
        module.weight(name).copy_(rows)
    return module


def rows_of(spec: ef.CollectionSpec) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {t.name: torch.randn(t.num_embeddings, t.embedding_dim, generator=generator) for t in spec.tables}


def batch_of(
    seed: int, size: int, spec: ef.CollectionSpec = SPEC, dtype: torch.dtype = torch.int64, least: int = 0
) -> Batch:
    """A batch with bags of up to 3 ids."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(least, 4, (len(spec.features) * size,), generator=generator)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    values = []
    for number, feature in enumerate(spec.features):
        count = int(lengths[number * size : (number + 1) * size].sum())
        values.append(torch.randint(spec.table(feature.table).num_embeddings, (count,), generator=generator))
    joined = torch.cat(values)
    return joined.to(dtype), offsets.to(dtype), torch.rand(joined.numel(), generator=generator) + 0.5


def joined(batches: Sequence[Batch], spec: ef.CollectionSpec = SPEC) -> Batch:
    """The batches of several ranks as one batch."""
    count = len(spec.features)
    values, weights, lengths = [], [], []
    for feature in range(count):
        for ids, offsets, factors in batches:
            size = (offsets.numel() - 1) // count
            borders = offsets[feature * size : (feature + 1) * size + 1]
            first, last = (int(borders[0]), int(borders[-1])) if size else (0, 0)
            values.append(ids[first:last])
            weights.append(factors[first:last])
            lengths.append(borders.diff())
    offsets = torch.nn.functional.pad(torch.cat(lengths).cumsum(0), (1, 0))
    return torch.cat(values), offsets.to(values[0].dtype), torch.cat(weights)


def loss_of(results: dict[str, Tensor]) -> Tensor:
    """A loss that gives every number of the results a gradient of its own, the same on any rank."""
    return sum((result * result).sum() + result.sum() for result in results.values())  # type: ignore[return-value]


def step(module: Any, batch: Batch) -> dict[str, Tensor]:
    """Makes one training step and returns the results."""
    results: dict[str, Tensor] = module.forward_dict(*batch)
    loss_of(results).backward()  # type: ignore[no-untyped-call]
    return results


def full_rows(module: ShardedEmbeddingCollection) -> dict[str, Tensor]:
    return {table.name: module.full(table.name) for table in module.spec.tables}


def outcome(call: Callable[[], Any]) -> tuple[str, str]:
    """The type and the message of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


SHORT = timedelta(seconds=3)
"""The timeout of groups in which a rank never comes: tests wait until it is over."""
LONG = timedelta(seconds=1200)
"""A timeout that no test reaches: a call that fails earlier fails for another reason."""
