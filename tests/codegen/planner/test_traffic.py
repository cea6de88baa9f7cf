"""The formulas of docs/planning.md give, byte by byte, what real ranks count; and the planner's closed forms agree with
them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sharded.exact_traffic import Counted, count_ids, traffic_of
from support.sharded.ranks import run_ranks

import embforge as ef
from embforge.codegen.errors import PlanError
from embforge.codegen.planner.access import Access, access_of
from embforge.codegen.planner.cost import Step, costs_of, loads_of
from embforge.codegen.planner.simulate import sent_bytes
from embforge.codegen.planner.topology import load_topology
from embforge.codegen.planner.traffic import Wire, row_bytes, worth_requesting
from embforge.codegen.plans import update_named
from embforge.codegen.sharding.geometry import Geometry
from embforge.codegen.sharding.kinds import ColumnWise, Grid, Hierarchical, RowWise, ShardPlan, TableWise
from embforge.codegen.sharding.placement import place

SPEC = ef.CollectionSpec(
    [
        ef.TableSpec("users", 64, 12),
        ef.TableSpec("items", 64, 7),
        ef.TableSpec("words", 64, 8),
        ef.TableSpec("places", 5, 4),
    ],
    [
        ef.FeatureSpec("user", "users", weighted=True),
        ef.FeatureSpec("friends", "users", pooling="mean", padding_idx=3),
        ef.FeatureSpec("clicked", "items", pooling="max"),
        ef.FeatureSpec("last", "items", pooling="concat", hotness=4),
        ef.FeatureSpec("text", "words", pooling="none", padding_idx=0),
        ef.FeatureSpec("place", "places"),
    ],
)
CASES: list[tuple[dict[str, Any], dict[str, str]]] = [
    (dict(users=RowWise(), items=ColumnWise(), words=TableWise(), places="data_parallel"), {}),
    (dict(users=Hierarchical(), items=Grid(2), words=RowWise("block"), places=TableWise(1)), dict(duplicates="merge")),
    (
        dict(users=ColumnWise(3), items=Hierarchical("block"), words=ColumnWise(4), places=RowWise()),
        dict(forward="bf16", gradients="int8", duplicates="merge"),
    ),
    (dict(users=Grid(2), items=RowWise(), words=Grid(2), places=RowWise()), dict(forward="int8", gradients="fp16")),
    (dict(users=RowWise(), items=ColumnWise(), words=TableWise(), places=TableWise(1)), dict(pools="different")),
    (
        dict(users=Grid(2), items=Hierarchical(), words=RowWise(), places=RowWise("block")),
        dict(pools="different", forward="int8", duplicates="merge"),
    ),
]
"""Every kind, every pooling, every class of formats; row norms where columns are split."""


def batch_of(rank: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Batches of different sizes, one of them empty; with duplicates."""
    rng = np.random.default_rng(rank)
    size = (3, 0, 5, 2)[rank % 4]
    lengths = rng.integers(0, 5, len(SPEC.features) * size)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rows = [SPEC.table(feature.table).num_embeddings for feature in SPEC.features]
    most = np.repeat(np.repeat(rows, size), lengths)
    return (rng.random(len(most)) ** 3 * most).astype(np.int64), offsets.astype(np.int64)


def counters_of_rank(rank: int, size: int) -> list[dict[str, int]]:
    """What a rank's modules count in a step of each case."""
    torch.set_num_threads(1)
    found = []
    values, offsets = map(torch.from_numpy, batch_of(rank))
    for kinds, words in CASES:
        formats = ef.sharded.Formats(words.get("forward", "fp32"), words.get("gradients", "fp32"))  # type: ignore[arg-type]
        module = ef.sharded.ShardedEmbeddingCollection(
            SPEC,
            ShardPlan(kinds),
            optimizer=ef.optim.RowwiseAdagrad(lr=0.1),
            backend="reference",
            node_size=size // 2,
            duplicates=words.get("duplicates", "keep"),
            pools=words.get("pools", "all"),
            formats=formats,
        )
        module.reset_counters()
        weights = torch.ones(len(values), requires_grad=True)
        results = module.forward_dict(values, offsets, weights)
        torch.cat([_numbers(result) for result in results.values()]).sum().backward()
        found.append({name: count for name, count in module.counters().items() if count})
    return found


def _numbers(result: Any) -> torch.Tensor:
    return (result if isinstance(result, torch.Tensor) else result.values).float().reshape(-1)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_formulas_give_the_bytes_that_real_ranks_exchange(size: int) -> None:
    counted = run_ranks(size, counters_of_rank)
    batches = [batch_of(rank) for rank in range(size)]
    for number, (kinds, words) in enumerate(CASES):
        geometry = Geometry(place(ShardPlan(kinds), SPEC, size, size // 2))
        wire = Wire(**words, weight_gradients=True)  # type: ignore[arg-type]
        ids = count_ids(geometry, batches, wire.duplicates)
        traffic = traffic_of(geometry, ids, wire, update_named("rowwise_adagrad"))
        for rank in range(size):
            assert counted[rank][number] == traffic.sent(rank), (number, rank)


KINDS = st.sampled_from(
    [
        "data_parallel",
        TableWise(),
        TableWise(1),
        RowWise(),
        RowWise("block", (1, 0)),
        ColumnWise(2),
        ColumnWise(4, (0, 1)),
        Grid(2),
        Grid(),
        Hierarchical(),
    ]
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(KINDS, min_size=3, max_size=3),
    st.sampled_from([(2, 1), (2, 2), (4, 2), (8, 4), (8, 8)]),
    st.sampled_from(["fp32", "bf16", "int8"]),
    st.sampled_from(["sgd", "rowwise_adagrad"]),
)
def test_the_planner_expects_what_the_formulas_give(
    kinds: list[Any], sizes: tuple[int, int], format: Any, rule: str
) -> None:
    """Ids that spread evenly: 64 samples, tables of 64 rows, so every shard gets a whole number of them."""
    spec = ef.CollectionSpec(SPEC.tables[:3], SPEC.features[:5])
    n, m = sizes
    placement = place(ShardPlan(dict(zip(("users", "items", "words"), kinds, strict=True))), spec, n, m)
    update = update_named(rule)
    step = Step(64, Access(length=2.0), update, Wire(format, format, "keep", True))
    costs = costs_of(placement, load_topology("h100x8"), step)
    inside, outside = sent_bytes(loads_of(placement, costs))

    geometry = Geometry(placement)
    counts = [64 * 2 // stream.rows.shards for stream in geometry.streams]
    ids = np.tile(counts, (n, 1))
    exact = traffic_of(geometry, Counted((64,) * n, ids, np.zeros_like(ids)), step.wire, update)
    node = np.arange(n) // m
    same = node[:, None] == node
    for name, pairs in exact.pairs.items():
        if name in ("replicas", "row_norms"):
            continue  # an all-reduce has no links; norms want expected rows, which are no whole numbers
        assert np.allclose(inside.get(name, 0.0), (pairs * same).sum(axis=1)), name
        assert np.allclose(outside.get(name, 0.0), (pairs * ~same).sum(axis=1)), name


def test_every_remapped_table_is_a_word_of_all_headers() -> None:
    tables = (SPEC.tables[0], *(replace(table, remap=99) for table in SPEC.tables[1:]))
    found = []
    for spec in (SPEC, replace(SPEC, tables=tables)):
        placement = place(ShardPlan.row_wise(spec), spec, 4, 2)
        costs = costs_of(placement, load_topology("h100x8"), Step(64))
        found.append(sum(of["header"] for of in sent_bytes(loads_of(placement, costs))))
    assert np.array_equal(found[1], found[0] + 8 * 3 * 3)  # three tables, three other ranks


@pytest.mark.parametrize("kind", [ColumnWise(2), ColumnWise(4, (0, 1)), ColumnWise(4), Grid(2), Grid(3)])
def test_expected_bytes_of_norms_are_exact_if_all_rows_occur(kind: Any) -> None:
    """Then nothing is left to chance: expected rows are all rows."""
    spec = ef.CollectionSpec(SPEC.tables[:2], SPEC.features[:4])
    placement = place(ShardPlan({"users": kind, "items": "row_wise"}), spec, 4, 2)
    update = update_named("rowwise_adagrad")
    step = Step(64, Access(length=64.0), update)
    found = [
        of.get("row_norms", 0.0)
        for of in sent_bytes(loads_of(placement, costs_of(placement, load_topology("h100x8"), step)))
    ]
    batch = np.tile(np.arange(64), len(spec.features)), np.arange(64 * len(spec.features) + 1)
    geometry = Geometry(placement)
    exact = traffic_of(geometry, count_ids(geometry, [batch] * 4), step.wire, update).pairs["row_norms"]
    assert exact.any() and np.allclose(sum(found), exact.sum(axis=1))


def test_row_bytes_of_every_format() -> None:
    assert [row_bytes(format, 7) for format in ("fp32", "fp16", "bf16", "fp8", "int8")] == [28, 14, 14, 12, 12]


@pytest.mark.parametrize("skew", [0.0, 0.7, 1.0, 1.05, 2.0])
@pytest.mark.parametrize("rows", [3, 500, 50_000])
def test_expected_unique_ids_are_those_of_draws(skew: float, rows: int) -> None:
    from embforge.tuner.workload.laws import Uniform, Zipf

    law = Zipf(skew) if skew else Uniform()
    drawn = [len(np.unique(law.draw(np.random.default_rng(seed), 4000, rows))) for seed in range(20)]
    assert Access(skew).unique(4000, rows) == pytest.approx(np.mean(drawn), rel=0.02, abs=1)


@pytest.mark.parametrize("length", [1, 3, 20])
@pytest.mark.parametrize("skew", [0.0, 1.05])
@pytest.mark.parametrize("kind", [TableWise(1), RowWise(), Grid(2)])
def test_expected_pools_are_those_of_draws(kind: Any, skew: float, length: int) -> None:
    """Bags of one id that are equal or fall to other shards, and longer ones: what a rank asks each owner for."""
    from embforge.tuner.workload.laws import Uniform, Zipf

    spec = ef.CollectionSpec([ef.TableSpec("t", 5000, 8)], [ef.FeatureSpec("f", "t")])
    placement = place(ShardPlan({"t": kind}), spec, 4, 4)
    geometry, law, size = Geometry(placement), Zipf(skew) if skew else Uniform(), 2000
    offsets = np.arange(size + 1) * length
    batches = [(law.draw(np.random.default_rng(rank), size * length, 5000), offsets) for rank in range(4)]
    counted = count_ids(geometry, batches)
    step = Step(size, Access(skew, length), None, Wire(pools="different"))
    expected = loads_of(placement, costs_of(placement, load_topology("h100x8"), step))["requested"]
    for owner, streams in enumerate(geometry.streams_to):
        assert expected[owner] == pytest.approx(counted.asked[:, streams].sum(axis=1).mean(), rel=0.1, abs=8), owner


@pytest.mark.parametrize("by", ["modulo", "block"])
@pytest.mark.parametrize("skew", [0.0, 1.2])
def test_shares_of_shards_are_those_of_draws(by: Any, skew: float) -> None:
    """Hot rows make shards unequal: the planner sees the same ones as the workloads of `bench`."""
    from embforge.tuner.workload.laws import Uniform, Zipf

    rows, shards = 10_007, 8
    ids = (Zipf(skew) if skew else Uniform()).draw(np.random.default_rng(0), 400_000, rows)
    owners = ids % shards if by == "modulo" else ids // -(-rows // shards)
    shares = Access(skew).shares(rows, shards, by)
    assert shares.sum() == pytest.approx(1)
    assert np.bincount(owners, minlength=shards) / len(ids) == pytest.approx(shares, abs=0.004)
    if skew:
        assert shares.max() > 1.2 / shards


def test_workloads_that_are_not_known_are_named() -> None:
    assert access_of("zipf:1.05") == Access(1.05)
    for text in ("zipf:", "zipf:-1", "uniform:2", "hot"):
        with pytest.raises(PlanError, match=f"'{text}' is not known; allowed: uniform, zipf:S"):
            access_of(text)


def test_an_unknown_wire_format_lists_the_allowed_ones() -> None:
    with pytest.raises(PlanError, match="forward='fp64' is not known; allowed: fp32, fp16"):
        Wire("fp64")  # type: ignore[arg-type]


def test_pools_are_requested_one_by_one_only_if_a_quarter_is_saved() -> None:
    """10 samples of 8 columns: 80 numbers, of which 60 may travel."""
    assert worth_requesting(60, 10, 8) and not worth_requesting(61, 10, 8)
