"""Plans that are searched for fit into memory, obey constraints, and are no worse than one kind for all tables; what
does not fit is named before anything is allocated."""

from __future__ import annotations

import re
import tomllib
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embforge.codegen.errors import PlanError
from embforge.codegen.layout import layout_of
from embforge.codegen.planner.access import Access
from embforge.codegen.planner.constants import with_tuned
from embforge.codegen.planner.cost import METRICS, Costs, Step, costs_of, loads_of
from embforge.codegen.planner.memory import check_memory
from embforge.codegen.planner.search import choose
from embforge.codegen.planner.simulate import simulate
from embforge.codegen.planner.topology import Link, Topology, load_topology, topology_from
from embforge.codegen.plans import update_named
from embforge.codegen.reading.numbers import size
from embforge.codegen.sharding.geometry import Geometry
from embforge.codegen.sharding.kinds import KINDS, DataParallel, ShardPlan, TableWise
from embforge.codegen.sharding.placement import place
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec

SPEC = CollectionSpec(
    [
        TableSpec("countries", 200, 8),
        TableSpec("users", 400_000, 64),
        TableSpec("items", 90_000, 32, dtype="bf16"),
        TableSpec("words", 30_000, 128),
    ],
    [
        FeatureSpec("country", "countries"),
        FeatureSpec("user", "users"),
        FeatureSpec("clicked", "items", hotness=20, weighted=True),
        FeatureSpec("bought", "items", hotness=3, pooling="mean"),
        FeatureSpec("text", "words", pooling="none", hotness=8),
    ],
)
ADAM = update_named("adam")


def topology(memory: float = 1e9, nodes: int = 2, ranks: int = 4) -> Topology:
    return Topology(
        "test", nodes, ranks, memory, 1e12, 5e11, Link(1e11, 1e-5, 1e-7), Link(1e10, 2e-5, 2e-7), 4e-6, usable=1.0
    )


def seconds(plan: ShardPlan, where: Topology, step: Step) -> float:
    return simulate(place(plan, SPEC, where.world_size, where.ranks_per_node), where, step).seconds


@pytest.mark.parametrize("nodes", [1, 2, 16])
@pytest.mark.parametrize("rule", ["none", "sgd", "rowwise_adagrad"])
def test_no_single_kind_is_better(nodes: int, rule: str) -> None:
    where, step = topology(nodes=nodes), Step(512, Access(1.05), update_named(rule))
    found = seconds(choose(SPEC, where, step=step).plan, where, step)
    for kind in KINDS:
        assert found <= seconds(ShardPlan({table.name: kind for table in SPEC.tables}), where, step) * (1 + 1e-9), kind


@settings(max_examples=25, deadline=None)
@given(st.floats(5e6, 6e8), st.sampled_from([(1, 1), (1, 3), (1, 8), (4, 2)]), st.sampled_from(["sgd", "adam"]))
def test_a_chosen_plan_fits_into_memory_or_the_error_names_the_table(
    memory: float, ranks: tuple[int, int], rule: str
) -> None:
    where, update = topology(memory, *ranks), update_named(rule)
    try:
        plan = choose(SPEC, where, batch_size=64, update=update).plan
    except PlanError as error:
        named = re.match(
            r"shard plan: table '(\w+)' does not fit: .* that is ([\d.]+ [kMGT]?B) more than the", str(error)
        )
        assert named and named[1] in {table.name for table in SPEC.tables}
        rows = sum(table.num_embeddings * table.embedding_dim for table in SPEC.tables)
        assert memory * where.world_size < 16 * rows + 64 * where.world_size * 2e5, "there was plenty of room"
        return
    placement = place(plan, SPEC, where.world_size, where.ranks_per_node)
    check_memory(placement, [update] * len(placement.tables), where, batch_size=64)
    assert simulate(placement, where, Step(64, update=update)).fits


def test_memory_is_that_of_the_ranks_own_collections() -> None:
    where = topology()
    kinds: dict[str, Any] = dict(countries="data_parallel", users="row_wise", items="column_wise", words="grid")
    placement = place(ShardPlan(kinds), SPEC, 8, 4)
    loads = loads_of(placement, costs_of(placement, where, Step(64, update=ADAM)))
    geometry = Geometry(placement)
    assert geometry.replicated is not None
    replicas = sum(
        one.table.num_embeddings * (one.stride_bytes + one.state_stride_bytes)
        for one in layout_of(geometry.replicated, ADAM).tables
    )
    gradient = 4 * 200 * (8 + 1)
    for rank, local in enumerate(geometry.locals):
        assert local is not None
        own = sum(
            one.table.num_embeddings * (one.stride_bytes + one.state_stride_bytes)
            for one in layout_of(local.spec, ADAM).tables
        )
        assert loads["memory"][rank] == own + replicas + gradient


def test_a_table_that_does_not_fit_is_named_with_its_bytes() -> None:
    where = topology(memory=150e6, nodes=1)
    plan = ShardPlan({"users": TableWise(2), "words": "row_wise", "items": "row_wise", "countries": "row_wise"})
    users = 400_000 * 64 * 12
    with pytest.raises(PlanError) as found:
        check_memory(place(plan, SPEC, 4), [ADAM] * len(SPEC.tables), where)
    assert "table 'users' does not fit: table_wise on 4 ranks puts 307 MB" in str(found.value)
    assert "on rank 2" in str(found.value) and f"{size(users - 150e6)} more than the 150 MB" in str(found.value)
    check_memory(place(ShardPlan.row_wise(SPEC), SPEC, 4), [ADAM] * len(SPEC.tables), where)


def test_constraints_are_obeyed_and_checked() -> None:
    allowed = {"countries": ["row_wise"], "users": ["grid", "hierarchical"], "items": ["data_parallel"]}
    plan = choose(SPEC, topology(), constraints=allowed, update=ADAM).plan
    for table, kinds in allowed.items():
        assert plan.kind(table).name in kinds
    with pytest.raises(PlanError, match="'users': 'rows' is not known; allowed: data_parallel"):
        choose(SPEC, topology(), constraints={"users": ["rows"]})
    with pytest.raises(ValueError, match="'absent' does not exist"):
        choose(SPEC, topology(), constraints={"absent": ["row_wise"]})
    with pytest.raises(PlanError, match="table 'users' does not fit: data_parallel"):
        choose(SPEC, topology(memory=3e8), constraints={"users": ["data_parallel"]}, update=ADAM)


def test_small_hot_tables_are_replicated_and_large_ones_split() -> None:
    many = CollectionSpec(
        [TableSpec("huge", 4_000_000, 64), *(TableSpec(f"s{i}", 50, 16) for i in range(30))],
        [FeatureSpec("huge", "huge"), *(FeatureSpec(f"s{i}", f"s{i}", hotness=30) for i in range(30))],
    )
    found = choose(many, topology(memory=9e8), batch_size=4096, update=update_named("sgd"))
    assert {found.plan.kind(f"s{i}") for i in range(30)} == {DataParallel()}
    huge = next(choice for choice in found.choices if choice.table == "huge")
    assert huge.memory < 9e8 and "1.02 GB, more than a rank's 900 MB" in huge.why
    assert "s0: data_parallel: small" in found.plan.explanation


def test_searching_twice_gives_the_same_plan() -> None:
    plans = [ShardPlan.auto(SPEC, topology(), update=ADAM, workload="zipf:1.2") for _ in range(2)]
    assert plans[0] == plans[1] and plans[0].digest() == plans[1].digest()


def test_shares_of_tables_add_up_whatever_their_order() -> None:
    """What the search adds and takes away again leaves what a whole evaluation finds."""
    where, step = topology(), Step(64, Access(1.05), ADAM)
    costs = Costs(SPEC, where, step)
    placement = place(ShardPlan.hierarchical(SPEC), SPEC, 8, 4)
    loads = loads_of(placement, costs)
    for table_placement in placement.tables[:2]:
        loads.add(costs.share(table_placement), -1)
    rest = loads_of(type(placement)(SPEC, 8, 4, placement.tables[2:]), costs)
    assert loads.values.shape == (len(METRICS), 8)
    assert np.allclose(loads.values, rest.values) and np.allclose(loads.totals, rest.totals)


def test_a_plan_for_a_thousand_ranks_holds_every_row() -> None:
    tables = [TableSpec(f"t{i}", 3000 * (i + 1), 16 << i % 3) for i in range(12)]
    spec = CollectionSpec(tables, [FeatureSpec(f"f{i}", f"t{i}", hotness=1 + i % 7) for i in range(12)])
    where, step = load_topology("h100x8").of_size(1024), Step(update=update_named("sgd"), access=Access(1.05))
    plan = choose(spec, where, step=step).plan
    found = simulate(place(plan, spec, 1024, 8), where, step)
    held = 0
    for table in tables:
        rows, dim = table.num_embeddings, table.embedding_dim
        held += 1024 * 4 * rows * (2 * dim + 1) if plan.kind(table.name) == DataParallel() else 4 * rows * dim
    assert found.world_size == 1024 and found.fits
    assert held <= found.memory.mean * 1024 <= 1.5 * held  # shards are as large as the largest


@pytest.mark.parametrize("name", ["h100x8", "a100x8", "laptop"])
def test_shipped_topologies_say_that_they_are_assumptions(name: str) -> None:
    found = load_topology(name)
    assert not found.measured and "not measured" in found.source
    assert topology_from(tomllib.loads(found.to_toml()), "x") == found


def test_mistakes_in_a_topology_are_named() -> None:
    text = topology().to_toml()
    for old, new, message in (
        ("gb_s = 100.0", "gb_s = 0", "node_link.gb_s=0 is not allowed; allowed: a number above 0"),
        ("[rail]", "[rails]", "unknown field 'rails' (did you mean 'rail'?); allowed: hardware, measured"),
        ("ranks_per_node = 4", "ranks_per_node = 0", "ranks_per_node=0 is not allowed; allowed: a whole number"),
        ("usable = 1.0", "usable = 1.5", "rank.usable=1.5 is not allowed; allowed: a share"),
        ("memory_gb = 1.0\n", "", "field 'rank.memory_gb' is missing"),
    ):
        assert old in text
        with pytest.raises(PlanError, match=re.escape(message)):
            topology_from(tomllib.loads(text.replace(old, new, 1)), "broken")
    with pytest.raises(PlanError, match="12 ranks on nodes of 8; allowed: 1 to 8, and multiples of 8"):
        load_topology("h100x8").of_size(12)
    with pytest.raises(PlanError, match="nowhere: no such topology file, and no such example; examples: a100x8"):
        load_topology("nowhere")


def test_tuned_results_of_the_same_hardware_give_the_constants(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from embforge.codegen.params import CpuParams
    from embforge.codegen.tuned.record import Gain, Hardware, Key, Record, Traffic
    from embforge.codegen.tuned.shape import shape_of
    from embforge.tuner.store import save

    monkeypatch.setenv("EMBFORGE_TUNED_DIR", str(tmp_path))
    hardware = Hardware("cpu", "a CPU", {"vendor": "v", "family": "1", "model": "2", "simd": "avx2"}, {"cores": 2})
    key = Key("forward", "cpu", None, shape_of(SPEC), hardware, Traffic(100.0, 6.6, 0.0), "int64", "warm")
    times = dict.fromkeys(("default", "best", "duplicate"), (0.001, 0.002, 0.003))
    params = asdict(CpuParams())
    save(Record(key, params, "uniform,batch=100", Gain(1.0, 1.0, 1.0), 0.01, times, {}, "2026-01-01T00:00:00Z"), "user")
    where = topology()
    assert with_tuned(where, SPEC, None) == (where, [])
    other = replace(where, hardware=(("simd", "neon"),))
    assert with_tuned(other, SPEC, None) == (other, [])
    same, notes = with_tuned(replace(where, hardware=(("vendor", "v"), ("simd", "avx2"))), SPEC, None)
    rows = 64 + 256 + (20 + 3) * 64 + 8 * 512  # of a sample, in whole lines
    pools = 4 * (8 + 64 + 2 * 32 + 8 * 128)
    assert same.lookup_bandwidth == pytest.approx(100 * (rows + pools) / 2e-3)
    assert same.update_bandwidth == where.update_bandwidth and "2026-01-01" in notes[0]
