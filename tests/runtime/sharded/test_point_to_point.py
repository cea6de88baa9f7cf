"""Gradients that are sent point to point give the same bits and bytes as an all-to-all, for all placements of rows and
samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.sharded.ranks import run_ranks
from torch import Tensor

import embforge as ef
from embforge.codegen.sharding.kinds import ColumnWise, Hierarchical, RowWise, ShardPlan, TableWise
from embforge.sharded.stages import all2all as vectors

SPEC = ef.CollectionSpec(
    [ef.TableSpec("a", 40, 12), ef.TableSpec("b", 30, 7)],
    [ef.FeatureSpec("fa", "a"), ef.FeatureSpec("fb", "b", pooling="mean"), ef.FeatureSpec("ga", "a", pooling="sqrtn")],
)
MAXIMA = ef.CollectionSpec(SPEC.tables, [*SPEC.features, ef.FeatureSpec("ma", "a", pooling="max")])
CASES: list[tuple[ef.CollectionSpec, dict[str, Any]]] = [
    (SPEC, dict(a=RowWise(), b=RowWise("block"))),  # the same gradients for all
    (SPEC, dict(a=TableWise(1), b=TableWise(0))),  # other ranks hold nothing
    (MAXIMA, dict(a=ColumnWise(2), b=RowWise())),
    (MAXIMA, dict(a=Hierarchical(), b=TableWise(2))),
]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_point_to_point_and_all_to_all_give_the_same(size: int) -> None:
    for found in run_ranks(size, both_ways):
        assert all(same and bytes_ > 0 for same, bytes_ in found), found


def both_ways(rank: int, size: int) -> list[tuple[bool, int]]:
    return [_compare(rank, None, spec, kinds) for spec, kinds in CASES[: 4 if size > 2 else 3]]


def test_a_group_of_some_ranks_sends_point_to_point() -> None:
    """The group's ranks have other numbers than the program's."""
    for rank, found in enumerate(run_ranks(4, in_a_part)):
        assert rank == 0 or (found[0] and found[1] > 0), (rank, found)


def in_a_part(rank: int, size: int) -> tuple[bool, int]:
    group = dist.new_group([1, 2, 3])
    return (True, 0) if rank == 0 else _compare(rank - 1, group, *CASES[0])


def _compare(rank: int, group: Any, spec: ef.CollectionSpec, kinds: dict[str, Any]) -> tuple[bool, int]:
    """Whether rows have the same bits and as many bytes were sent, and how many bytes."""
    found: list[tuple[list[Tensor], int]] = []
    usual = vectors.SHORT_BYTES
    for limit in (0, 2**40):
        vectors.SHORT_BYTES = limit  # type: ignore[misc]
        found.append(_trained(rank, group, spec, kinds))
    vectors.SHORT_BYTES = usual  # type: ignore[misc]
    (rows, sent), (other_rows, other_sent) = found
    same = all(torch.equal(one, other) for one, other in zip(rows, other_rows, strict=True))
    return same and sent == other_sent, sent


def _trained(rank: int, group: Any, spec: ef.CollectionSpec, kinds: dict[str, Any]) -> tuple[list[Tensor], int]:
    ranks = dist.get_world_size(group)
    module = ef.sharded.ShardedEmbeddingCollection(
        spec, ShardPlan(kinds), group, ef.optim.SGD(lr=0.1), backend="reference", node_size=2 if ranks == 4 else None
    )
    generator = torch.Generator().manual_seed(0)
    module.load_full({t.name: torch.randn(t.num_embeddings, t.embedding_dim, generator=generator) for t in spec.tables})
    for step in range(3):
        drawn = torch.Generator().manual_seed(10 * step + rank)
        size = (5, 0, 3, 2)[(rank + step) % 4]  # every rank has none at times
        lengths = torch.randint(0, 3, (len(spec.features) * size,), generator=drawn)
        values = torch.randint(0, 30, (int(lengths.sum()),), generator=drawn)
        module(values, lengths=lengths).square().sum().backward()
    return [module.full(table.name) for table in spec.tables], module.counters().get("gradients", 0)
