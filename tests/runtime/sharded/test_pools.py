"""Exchanging only different pools gives the bits of exchanging all, with fewer bytes if bags are empty or equal."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.selections import SELECTIONS
from support.sharded.ranks import run_ranks
from torch import Tensor

import embforge as ef
from embforge.codegen.sharding.kinds import ColumnWise, DataParallel, Grid, Hierarchical, RowWise, ShardPlan, TableWise

TABLES = {"a": (40, 12), "b": (300, 7), "c": (50, 16), "d": (9, 4)}
SPEC = ef.CollectionSpec(
    [ef.TableSpec(name, rows, dim) for name, (rows, dim) in TABLES.items()],
    [
        ef.FeatureSpec("one", "a"),
        ef.FeatureSpec("some", "b", pooling="mean", padding_idx=3),
        ef.FeatureSpec("most", "c", pooling="max"),
        ef.FeatureSpec("least", "c", pooling="min"),
        *(ef.FeatureSpec(name, "c", pooling=name) for name in SELECTIONS if name not in ("max", "min")),
        ef.FeatureSpec("heavy", "c", pooling="sqrtn", weighted=True),
        ef.FeatureSpec("row", "d", pooling="none"),
        ef.FeatureSpec("other", "a", pooling="sum", padding_idx=1),
    ],
)
PLANS: list[dict[str, Any]] = [
    dict(a=TableWise(0), b=TableWise(1), c=TableWise(1), d=RowWise()),
    dict(a=RowWise(), b=RowWise("block"), c=RowWise(), d=TableWise(0)),
    dict(a=ColumnWise(2), b=Grid(2), c=ColumnWise(), d=RowWise()),
    dict(a=Hierarchical(), b=TableWise(0), c=RowWise(), d=DataParallel()),
]
FORMATS = (ef.sharded.Formats("bf16", "fp16"), ef.sharded.Formats("int8"), ef.sharded.Formats("fp8"))
STEPS = 3


class Ran(NamedTuple):
    """The observations of one rank."""

    results: list[Tensor]
    rows: list[Tensor]
    counters: dict[str, int]


def batch_of(rank: int, step: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """A batch with bags of up to `most` ids, of a different size on every rank; a few ids are no rows."""
    rng = np.random.default_rng([rank, step, most])
    size = (60, 35, 0, 50)[(rank + step) % 4]
    lengths = rng.integers(0, most + 1, len(SPEC.features) * size)
    rows = np.repeat([SPEC.table(f.table).num_embeddings for f in SPEC.features], size)
    values = (rng.random(lengths.sum()) ** 2 * np.repeat(rows, lengths)).astype(np.int64)
    values[rng.random(len(values)) < 0.03] = -1
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return torch.from_numpy(values), torch.from_numpy(offsets), torch.from_numpy(rng.random(len(values))).float()


def trained(rank: int, size: int, kinds: dict[str, Any], pools: str, most: int, **options: Any) -> Ran:
    torch.set_num_threads(1)
    module = ef.sharded.ShardedEmbeddingCollection(
        SPEC, ShardPlan(kinds), optimizer=ef.optim.SGD(lr=0.1), pools=pools, bounds_check="zero",
        node_size=size // 2 if size % 2 == 0 else size, **options,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    tables = {name: torch.randn(shape, generator=generator) for name, shape in TABLES.items()}
    tables["a"][5:9] = -0.0
    tables["c"][:2] = -0.0
    module.load_full(tables)
    module.reset_counters()
    results = []
    for step in range(STEPS):
        values, offsets, weights = batch_of(rank, step, most)
        found = module.forward_dict(values, offsets, weights)
        results += [result.detach().clone() for result in found.values()]
        sum((result.float() * 0.5).square().sum() for result in found.values()).backward()  # type: ignore[union-attr]
    counters = module.counters()
    return Ran(results, [module.full(name) for name in TABLES], counters)


class Compared(NamedTuple):
    """A training with requested pools and one with all pools: their byte counters, and whether they agree."""

    same: bool
    """Whether results and rows have the same bits."""
    asked: dict[str, int]
    every: dict[str, int]


def compare(one: Ran, other: Ran) -> Compared:
    pairs = zip(one.results + one.rows, other.results + other.rows, strict=True)
    return Compared(all(torch.equal(_bits(a), _bits(b)) for a, b in pairs), one.counters, other.counters)


def _bits(numbers: Tensor) -> Tensor:
    """The bits of a tensor, in which -0 and 0 differ."""
    return numbers.contiguous().view(torch.uint8)


def both(rank: int, size: int, backend: str, most: int) -> list[Compared]:
    cases: list[dict[str, Any]] = [{"kinds": kinds} for kinds in PLANS]
    if backend == "cpu":
        cases += [{"kinds": PLANS[number], "formats": FORMATS[number]} for number in (0, 1, 2)]
    return [
        compare(
            *(trained(rank, size, pools=pools, most=most, backend=backend, **case) for pools in ("different", "all"))
        )
        for case in cases
    ]


@pytest.mark.parametrize(
    ("size", "backend", "most"),
    [
        (2, "reference", 1),
        (4, "reference", 2),
        (3, "reference", 9),
        pytest.param(2, "cpu", 1, marks=pytest.mark.soak),
        pytest.param(4, "cpu", 2, marks=pytest.mark.soak),
        pytest.param(3, "cpu", 9, marks=pytest.mark.soak),
    ],
)
def test_results_and_rows_are_the_same_bits(size: int, backend: str, most: int) -> None:
    found = run_ranks(size, both, backend, most)
    for number in range(len(found[0])):
        assert all(found[rank][number].same for rank in range(size)), number
        for rank in range(size):
            _, asked, every = found[rank][number]
            assert asked.get("gradients", 0) == every.get("gradients", 0)
        vectors = [
            sum(getattr(found[r][number], which).get("vectors", 0) for r in range(size)) for which in ("asked", "every")
        ]
        assert vectors[0] < 0.8 * vectors[1] if most == 1 else vectors[0] <= vectors[1], (number, vectors)


@pytest.mark.soak
def test_the_kernels_of_gpus_give_the_same_bits() -> None:
    assert all(same for found in run_ranks(2, on_simt) for same in found)


def on_simt(rank: int, size: int) -> list[bool]:
    return [
        compare(*(trained(rank, size, kinds, "different", 1, backend=backend) for backend in ("simt", "cpu"))).same
        for kinds in PLANS[:2]
    ]


def test_wrong_values_of_pools_are_refused() -> None:
    plan = ShardPlan.row_wise(SPEC)
    with pytest.raises(ValueError, match="pools='some' is not known; allowed: all, different, or None"):
        ef.sharded.ShardedEmbeddingCollection(SPEC, plan, optimizer=ef.optim.SGD(lr=0.1), pools="some")
    summed = ef.CollectionSpec(SPEC.tables[:1], SPEC.features[:1])
    with pytest.raises(ValueError, match="a reduce-scatter adds pools of all bags; allowed: 'all'"):
        ef.sharded.DistributedSparseEmbedding(summed, optimizer=ef.optim.SGD(lr=0.1), pools="different")
