"""Backwards on the CPU give the reference's bits for every instruction set, number of threads, ids and rule."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.selections import SELECTIONS
from support.training import compare_dense
from torch import Tensor

from embforge import optim
from embforge.codegen.build import build
from embforge.codegen.machine import X86_NEEDS, host_isa
from embforge.codegen.params import CpuBackwardParams
from embforge.codegen.plan import Plan
from embforge.codegen.rules import builtin
from embforge.codegen.rules.rule import Rule, Update
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.collection import EmbeddingCollection
from embforge.inputs import Batch
from embforge.launch.cpu.backward import CpuBackward, CpuReduce, CpuWeightGradient
from embforge.launch.gradients import Gradients
from embforge.launch.metadata import update_metadata_of
from embforge.launch.reference.backward import ReferenceBackward, ReferenceReduce, ReferenceWeightGradient
from embforge.launch.reference.forward_train import lookup_train
from embforge.storage.states import allocate_section, state_views
from embforge.verify.cases import Case, draw_batch, draw_tables

CPU = torch.device("cpu")
SMALL = CpuBackwardParams(tile_vectors=2, grain_bytes=16384, radix_bits=8)
"""Parameters that give small batches many tiles, passes and threads."""


def runnable() -> list[str]:
    """The instruction sets that this machine can run."""
    order = [*X86_NEEDS, "generic"]
    best = host_isa()
    return order[order.index(best) :] if best in order else [best, "generic"]


def rich_spec(output_dtype: str = "fp32") -> CollectionSpec:
    """A spec with every pooling, weighted or not, and tables of all dtypes, with one feature or several."""
    tables = (
        TableSpec("wide", 300, 130),
        TableSpec("odd", 70_000, 21, "bf16"),
        TableSpec("thin", 40, 1, "fp16"),
        TableSpec("bytes", 500, 45, "fp8_e4m3"),
        TableSpec("single", 1, 8),
        TableSpec("range", 400, 37, "fp8_e5m2"),
    )
    features = (
        FeatureSpec("sum", "wide", "sum"),
        FeatureSpec("mean", "odd", "mean", padding_idx=3),
        FeatureSpec("max", "bytes", "max", padding_idx=1),
        FeatureSpec("weighted_mean", "bytes", "mean", weighted=True),
        FeatureSpec("concat", "wide", "concat", hotness=200, padding_idx=7),
        FeatureSpec("none", "thin", "none", padding_idx=2),
        FeatureSpec("weighted_none", "odd", "none", weighted=True, padding_idx=3),
        FeatureSpec("weighted_sqrtn", "odd", "sqrtn", weighted=True),
        *(FeatureSpec(name, "odd", name, padding_idx=3) for name in SELECTIONS if name != "max"),
        FeatureSpec("one_row", "single", "sqrtn"),
        FeatureSpec("far", "range", "sum"),
        FeatureSpec("more_none", "thin", "none"),
    )
    return CollectionSpec(tables, features, output_dtype)


@dataclass
class World:
    """All that a backward reads and writes."""

    tables: tuple[Tensor, ...]
    sections: tuple[Tensor | None, ...]
    hyper: Tensor
    counters: Tensor
    batch: Batch
    gradients: Gradients
    trainable: Sequence[bool]

    def copy(self) -> World:
        raws = [t.untyped_storage().clone() for t in self.tables]
        tables = tuple(
            t.new_empty(0).set_(raw, t.storage_offset(), t.shape, t.stride())  # type: ignore[call-overload]
            for t, raw in zip(self.tables, raws, strict=True)
        )
        sections = tuple(None if s is None else s.clone() for s in self.sections)
        return World(
            tables, sections, self.hyper, self.counters.clone(), self.batch, self.gradients, list(self.trainable)
        )

    def run(self, kernel: Any, bounds_check: str = "error") -> Any:
        metadata = update_metadata_of(self.tables, self.sections, self.trainable, bounds_check)
        if kernel.plan.op != "backward":
            return kernel(metadata, self.tables, self.batch, self.gradients, bounds_check)
        return kernel(
            metadata, self.tables, self.sections, self.batch, self.gradients, self.hyper, self.counters, bounds_check
        )

    def bits(self) -> list[Tensor]:
        tensors = [*self.tables, *(section for section in self.sections if section is not None)]
        empty = torch.empty(0, dtype=torch.uint8)
        return [empty.new_empty(0).set_(t.untyped_storage()) for t in tensors] + [self.counters]  # type: ignore[call-overload]


def world_of(
    plan: Plan, case: Case, seed: int = 0, hyper: Sequence[float] = (0.1, 0.0), trainable: Sequence[bool] | None = None
) -> World:
    spec = plan.spec
    values, offsets, weights = draw_batch(spec, case, seed)
    tables = draw_tables(spec, seed)
    sections = tuple(allocate_section(layout, CPU) for layout in plan.layout.tables)
    for layout, table, section in zip(plan.layout.tables, tables, sections, strict=True):
        for state in state_views(layout, table, section).values():
            state.copy_(torch.rand(state.shape, generator=torch.Generator().manual_seed(seed)) * 0.1)
    weights = weights if weights is None else weights + 1.5
    batch = Batch(values, offsets, weights, case.batch, None)
    bounds = "zero" if case.bad_ids else "error"
    pooled, sequence, divisors, winners = lookup_train(spec, values, offsets, weights, tables, bounds_check=bounds)
    generator = torch.Generator().manual_seed(seed + 1)
    grads = [None if x is None else torch.randn(x.shape, generator=generator).to(x.dtype) for x in (pooled, sequence)]
    assert grads[0] is not None
    gradients = Gradients(grads[0], grads[1], divisors, winners)
    counters = torch.tensor([6, 123456789012345], dtype=torch.int64)
    chosen = [True] * len(tables) if trainable is None else list(trainable)
    return World(tables, sections, torch.tensor(hyper, dtype=torch.float64), counters, batch, gradients, chosen)


def plan_of(
    spec: CollectionSpec, op: str = "backward", rule: Rule | None = None, rounding: Any = "stochastic", **changes: Any
) -> Plan:
    update = Update(rule or builtin.rowwise_adagrad(), rounding) if op == "backward" else None
    changed = {"id_dtype": "int64", "params": SMALL, "isa": host_isa()} | changes
    return Plan(op, "cpu", changed["isa"], changed["id_dtype"], spec, changed["params"], update)


def assert_same_update(kernel: CpuBackward, world: World, bounds_check: str = "error") -> None:
    wanted = world.copy()
    verdict = wanted.run(ReferenceBackward(kernel.plan), bounds_check)
    for threads in (1, 2, 3):
        got = world.copy()
        torch.set_num_threads(threads)
        try:
            assert torch.equal(got.run(kernel, bounds_check), verdict)
        finally:
            torch.set_num_threads(2)
        for place, (have, want) in enumerate(zip(got.bits(), wanted.bits(), strict=True)):
            assert torch.equal(have, want), (threads, place)


HYPER = {"rowwise_adagrad": (0.1, 0.0, 1e-10), "adam": (0.1, 0.0, 0.9, 0.999, 1e-8), "sgd": (0.1, 0.0)}


@pytest.mark.parametrize("isa", runnable())
def test_isa_gives_the_references_bits(isa: str) -> None:
    plan = plan_of(rich_spec(), isa=isa)
    kernel = CpuBackward(plan, build(plan).binary)
    for case in (Case(40, "edges", "zipf"), Case(7, "usual", "same"), Case(0), Case(9, "none"), Case(300, "one")):
        assert_same_update(kernel, world_of(plan, case, hyper=HYPER["rowwise_adagrad"]))


@pytest.mark.parametrize(
    ("rule", "output_dtype", "id_dtype", "rounding"),
    [
        (builtin.adam(), "bf16", "int32", "nearest"),
        (builtin.sgd(), "fp16", "int64", "stochastic"),
    ],
)
def test_rules_outputs_and_ids(rule: Rule, output_dtype: str, id_dtype: Any, rounding: str) -> None:
    plan = plan_of(rich_spec(output_dtype), rule=rule, rounding=rounding, id_dtype=id_dtype, params=CpuBackwardParams())
    kernel = CpuBackward(plan, build(plan).binary)
    hyper = HYPER[rule.name]
    assert_same_update(kernel, world_of(plan, Case(50, "usual", "zipf", id_dtype), hyper=hyper))
    assert_same_update(kernel, world_of(plan, Case(30, "edges", id_dtype=id_dtype, weights="absent"), hyper=hyper))
    frozen = [index % 2 == 0 for index in range(len(plan.spec.tables))]
    assert_same_update(kernel, world_of(plan, Case(30, "edges", id_dtype=id_dtype), hyper=hyper, trainable=frozen))
    world = world_of(plan, Case(30, "usual", id_dtype=id_dtype, bad_ids=True), hyper=hyper)
    assert_same_update(kernel, world, bounds_check="zero")
    scaled = (hyper[0], 1024.0, *hyper[2:])
    assert_same_update(kernel, world_of(plan, Case(30, "usual", id_dtype=id_dtype), hyper=scaled))


def hot_spec() -> CollectionSpec:
    tables = (TableSpec("hot", 1000, 5), TableSpec("cold", 3_000_000, 8, "bf16"))
    features = (FeatureSpec("f", "hot"), FeatureSpec("g", "hot", weighted=True), FeatureSpec("h", "cold", "mean"))
    return CollectionSpec(tables, features)


def test_hot_ids_and_many_ids() -> None:
    """Runs have four levels of the canonical sum and are split between threads; threads sort tables together."""
    plan = plan_of(hot_spec(), rule=builtin.sgd(), params=CpuBackwardParams())
    kernel = CpuBackward(plan, build(plan).binary)
    lengths = torch.full((3, 2), 20_000)
    lengths[0, 1] = 64 * 4096 + 9000
    offsets = torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0))
    values = torch.randint(0, 1000, (int(offsets[-1]),), generator=torch.Generator().manual_seed(1))
    values[offsets[1] : offsets[2]] = 77
    values[offsets[4] :] *= 2999
    world = world_of(plan, Case(2))
    world.batch = Batch(values, offsets, torch.rand(values.numel()), 2, None)
    assert_same_update(kernel, world)


def test_concat_bags_that_threads_share() -> None:
    """A thread that starts within a bag must start within the gradients of its slots."""
    spec = CollectionSpec((TableSpec("t", 3000, 3),), (FeatureSpec("f", "t", "concat", hotness=700),))
    plan = plan_of(spec, rule=builtin.sgd())
    kernel = CpuBackward(plan, build(plan).binary)
    world = world_of(plan, Case(2))
    values = torch.randint(0, 3000, (100 * 690,), generator=torch.Generator().manual_seed(5))
    world.batch = Batch(values, torch.arange(101) * 690, None, 100, None)
    world.gradients = world.gradients._replace(pooled=torch.randn(100, 2100))
    assert_same_update(kernel, world)


def test_states_of_hot_rows_and_shared_sorts() -> None:
    """A narrow table and a rule with both kinds of states; threads share the sort and the longest run."""
    spec = CollectionSpec((TableSpec("t", 5000, 12, "bf16"),), (FeatureSpec("f", "t"), FeatureSpec("g", "t", "mean")))
    plan = plan_of(spec, rule=builtin.rowwise_adam())
    kernel = CpuBackward(plan, build(plan).binary)
    world = world_of(plan, Case(2), hyper=HYPER["adam"])
    values = torch.randint(0, 5000, (52_000,), generator=torch.Generator().manual_seed(3))
    values[8_000:20_500] = 4321
    divisors = torch.tensor([[21_000.0], [9_000.0]])
    world.batch = Batch(values, torch.tensor([0, 15_000, 22_000, 43_000, 52_000]), None, 2, None)
    world.gradients = world.gradients._replace(divisors=divisors)
    assert_same_update(kernel, world)


def test_nothing_changes_where_a_backward_fails() -> None:
    plan = plan_of(rich_spec())
    kernel = CpuBackward(plan, build(plan).binary)
    hyper = HYPER["rowwise_adagrad"]
    world = world_of(plan, Case(20), hyper=hyper)
    before = world.copy()
    world.batch.values[-1] = 40  # of table 'thin'
    with pytest.raises(IndexError, match=r"id 40 .* 'thin'"):
        world.run(kernel)
    world.batch.values[-1] = 0
    world.batch.offsets[5] += 10_000
    with pytest.raises(ValueError, match="offsets"):
        world.run(kernel)
    world.batch.offsets[5] -= 10_000
    world.hyper[1] = 8.0
    for part in (world.gradients.pooled, world.gradients.sequence):
        assert part is not None
        part.view(-1)[-1] = torch.inf
        assert world.run(kernel).tolist() == [torch.inf]
        part.view(-1)[-1] = torch.nan
        assert world.run(kernel).tolist() == [torch.inf]
        part.view(-1)[-1] = 1.0
    for have, want in zip(world.bits(), before.bits(), strict=True):
        assert torch.equal(have, want)
    assert world.run(kernel).tolist() == [0.0]
    assert world.counters[0] == before.counters[0] + 1


def test_nothing_changes_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(rich_spec())
    kernel = CpuBackward(plan, build(plan).binary)
    world = world_of(plan, Case(20), hyper=HYPER["rowwise_adagrad"])
    before = world.copy()

    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("not enough memory")

    for allocation, error in (("empty", MemoryError), ("zeros", RuntimeError)):
        with monkeypatch.context() as patched:
            metadata = update_metadata_of(world.tables, world.sections, world.trainable, "error")
            given = (world.batch, world.gradients, world.hyper, world.counters, "error")
            patched.setattr(torch, allocation, full)
            with pytest.raises(error, match="memory"):
                kernel(metadata, world.tables, world.sections, *given)
        assert all(torch.equal(a, b) for a, b in zip(world.bits(), before.bits(), strict=True))
    assert world.run(kernel).tolist() == [0.0]


def test_too_large_is_what_does_not_fit() -> None:
    """A table of this many rows leaves 24 bits, next to a row's number, for the place of its gradients."""
    tables = (TableSpec("long", 2**40, 4), TableSpec("wide", 10, 1024))
    plan = plan_of(CollectionSpec(tables, (FeatureSpec("f", "long"), FeatureSpec("g", "wide"))), "reduce")
    kernel = CpuReduce(plan, build(plan).binary)
    rows = tuple(torch.zeros(10, table.embedding_dim) for table in tables)
    metadata = update_metadata_of(rows, rows, [True, True], "error")  # no rule: no states

    def found(batch: int, of_long: int, of_wide: int) -> list[list[int]]:
        """The rows that occur if the first bags of the features have these numbers of ids."""
        offsets = torch.full((2 * batch + 1,), of_long)
        offsets[0], offsets[batch + 1 :] = 0, of_long + of_wide
        given = Batch(torch.ones(of_long + of_wide, dtype=torch.int64), offsets, None, batch, None)
        pooled = torch.empty(batch, 1028)  # not all of it is read, or has memory
        pooled[0] = 1.0
        reduced = kernel(metadata, rows, given, Gradients(pooled, None, None, None), "error")
        return [ids.tolist() for ids, _ in reduced]

    assert found(1, 1, 2**14) == [[1], [1]]  # many ids, few gradients
    assert found(2**14, 0, 1) == [[], [1]]  # gradients that are not this table's
    with pytest.raises(ValueError, match="too many for one backward"):
        found(2**14, 1, 1)


def test_flushing_denormals_changes_nothing() -> None:
    """torch sets the mode of the calling thread alone: results would depend on which thread computes them."""
    spec = CollectionSpec((TableSpec("t", 3000, 16),), (FeatureSpec("f", "t", "mean", weighted=True),))
    values = torch.randint(0, 3000, (20_000,), generator=torch.Generator().manual_seed(1))
    tiny = torch.rand(5_000, 16, generator=torch.Generator().manual_seed(2)) * 1e-37

    def run(threads: int, flush: bool) -> list[Tensor]:
        module = EmbeddingCollection(spec, backend="cpu", optimizer=optim.Adam(lr=1e-36))
        module.weight("t").copy_(tiny[:3000] * 0.01)
        weights = torch.ones(20_000, requires_grad=True)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        torch.set_flush_denormal(flush)
        try:
            results = module(values, torch.arange(0, 20_001, 4), weights)
            results.backward(tiny)
        finally:
            torch.set_flush_denormal(False)
            torch.set_num_threads(before)
        assert weights.grad is not None
        return [results.detach(), weights.grad, module.weight("t"), *module.optimizer_state("t").values()]

    wanted = run(1, False)
    assert 0 < float(wanted[0].abs().max()) < 1.1e-38
    for threads in (1, 2):
        for have, want in zip(run(threads, True), wanted, strict=True):
            assert torch.equal(have.view(torch.int32), want.view(torch.int32))


def test_threads_share_a_kernel() -> None:
    plan = plan_of(rich_spec())
    kernel = CpuBackward(plan, build(plan).binary)
    wanted = [world_of(plan, Case(60, "edges"), seed, HYPER["rowwise_adagrad"]) for seed in range(4)]
    got = [world.copy() for world in wanted]
    for world in wanted:
        world.run(kernel)
    threads = [threading.Thread(target=world.run, args=(kernel,)) for world in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(got, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.bits(), other.bits(), strict=True))


def test_reduced_gradients_have_the_references_bits() -> None:
    plan = plan_of(rich_spec("bf16"), "reduce")
    kernel = CpuReduce(plan, build(plan).binary)
    for case in (Case(40, "edges", "zipf"), Case(0), Case(30, "usual", "same"), Case(500, "usual", bad_ids=True)):
        frozen = [index != 1 or case.batch != 40 for index in range(len(plan.spec.tables))]
        world = world_of(plan, case, trainable=frozen)
        bounds = "zero" if case.bad_ids else "error"
        wanted = world.run(ReferenceReduce(plan), bounds)
        for (rows, grads), (want_rows, want_grads) in zip(world.run(kernel, bounds), wanted, strict=True):
            assert torch.equal(rows, want_rows)
            assert torch.equal(grads.view(torch.int32), want_grads.view(torch.int32))
        compare_dense(plan, world.batch, world.gradients, wanted, world.trainable, bounds)


@pytest.mark.parametrize("isa", [host_isa(), "generic"])
def test_weight_gradients_have_the_references_bits(isa: str) -> None:
    plan = plan_of(rich_spec("fp16" if isa == "generic" else "fp32"), "weight_gradient", isa=isa)
    kernel = CpuWeightGradient(plan, build(plan).binary)
    for case in (Case(40, "edges"), Case(0), Case(30, "usual", weights="absent"), Case(30, "usual", bad_ids=True)):
        world = world_of(plan, case)
        bounds = "zero" if case.bad_ids else "error"
        got, want = world.run(kernel, bounds), world.run(ReferenceWeightGradient(plan), bounds)
        assert torch.equal(got.view(torch.int32), want.view(torch.int32))
    with pytest.raises(IndexError, match="is not a row of table"):
        world.run(kernel)
