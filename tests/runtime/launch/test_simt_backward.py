"""The CUDA backward on the SIMT executor gives the reference's bits, and writes nothing if its input is wrong."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from support.selections import SELECTIONS
from support.training import (
    NUMBERS,
    RULES,
    Module,
    batch_of,
    compare,
    compare_reduce,
    compare_weights,
    gradients_of,
    metadata_of,
    module_of,
    plan_of,
    reference_of,
    step,
)

from embforge.codegen.plan import Plan
from embforge.codegen.rules import builtin
from embforge.codegen.rules.rule import Rule, State
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.codegen.targets.cuda.backward_geometry import key_dtype
from embforge.inputs import Batch
from embforge.launch.kernels import Program, kernel_of
from embforge.verify.cases import Case, draw_batch

ONE = CollectionSpec((TableSpec("t", 20, 8),), (FeatureSpec("f", "t"),), name="one")
RUNS = [[[0] * 1000, [1], [2, 2], [3] * 64, [4] * 65, [5] * 5000, [], [6] * 40, [7] * 128, [8] * 4096, [9] * 4097]]
"""Numbers of occurrences around a chunk (64), a chunk of chunks, and the plan's limit above which runs wait."""
POOLINGS = CollectionSpec(
    (
        TableSpec("a", 30, 12),
        TableSpec("b", 30, 7, "bf16"),
        TableSpec("d", 30, 16, "fp8_e4m3"),
        TableSpec("e", 30, 6, "fp16"),
        TableSpec("g", 30, 15),
        TableSpec("h", 30, 9, "fp8_e5m2"),
    ),
    (
        FeatureSpec("mean", "a", "mean", weighted=True),
        FeatureSpec("max", "b", "max"),
        FeatureSpec("none", "d", "none"),
        FeatureSpec("concat", "e", "concat", hotness=3),
        FeatureSpec("sqrtn", "g", "sqrtn", padding_idx=3),
        FeatureSpec("shared", "a", padding_idx=0),
        FeatureSpec("weighted_none", "g", "none", weighted=True, padding_idx=2),
        *(
            FeatureSpec(f"shared_{name}", "a", name, padding_idx=padding)
            for name, padding in zip(SELECTIONS, cycle((None, 1)), strict=False)
        ),
        FeatureSpec("range", "h"),
    ),
    name="poolings",
)


def drawn(spec: CollectionSpec, case: Case, seed: int = 0) -> Batch:
    values, offsets, weights = draw_batch(spec, case, seed)
    return Batch(values, offsets, weights, case.batch, None)


def with_output(spec: CollectionSpec, dtype: Any) -> CollectionSpec:
    return CollectionSpec(spec.tables, spec.features, output_dtype=dtype, name=spec.name)


def cases_of(id_dtype: Any) -> tuple[Case, ...]:
    return (
        Case(5, "edges", "zipf", id_dtype),
        Case(4, "usual", "same", id_dtype, weights="absent"),
        Case(3, "none", id_dtype=id_dtype),
        Case(0, id_dtype=id_dtype),
    )


# ---- bits -----------------------------------------------------------------------------------------------------------


def test_runs_of_every_length_end_in_the_references_bits_under_every_schedule() -> None:
    plan = plan_of(ONE, builtin.sgd())
    batch = batch_of(RUNS, torch.int64)
    compare(plan, batch, steps=2)  # each step has a schedule of its own


@pytest.mark.parametrize(("medium_run", "block"), [pytest.param(16, 128, marks=pytest.mark.soak), (64, 512)])
def test_no_parameter_changes_a_bit(medium_run: int, block: int) -> None:
    plan = plan_of(ONE, builtin.sgd(), medium_run=medium_run, block=block, pipeline=(8, 2), vector_bytes=8)
    compare(plan, batch_of(RUNS, torch.int64))


@pytest.mark.parametrize(
    ("rule", "output", "arch", "id_dtype"),
    [
        (builtin.adam(), "fp32", "sm_90", "int64"),
        (builtin.rowwise_adagrad(), "bf16", "sm_75", "int32"),
        (builtin.lamb(), "fp16", "sm_100", "int64"),
    ],
    ids=lambda value: value.name if isinstance(value, Rule) else str(value),
)
def test_all_poolings_and_dtypes_have_the_references_bits(rule: Rule, output: str, arch: str, id_dtype: str) -> None:
    spec = with_output(POOLINGS, output)
    plan = plan_of(spec, rule, arch, id_dtype)
    for case in cases_of(id_dtype):
        compare(plan, drawn(spec, case), steps=2)
    bad = drawn(spec, Case(5, bad_ids=True, id_dtype=id_dtype))  # type: ignore[arg-type]
    compare(plan, bad, bounds_check="zero", frozen=("g",), grad_scale=1024.0)


@pytest.mark.parametrize(
    "rule", [pytest.param(builtin.sgd(), marks=pytest.mark.soak), builtin.lars(True)], ids=lambda rule: rule.name
)
def test_wide_rows_are_updated_in_tiles(rule: Rule) -> None:
    spec = CollectionSpec(
        (TableSpec("t", 9, 1000, "bf16"), TableSpec("u", 9, 33)),
        (FeatureSpec("f", "t"), FeatureSpec("g", "u")),
        name="wide",
    )
    plan = plan_of(spec, rule, rounding="nearest")
    compare(plan, drawn(spec, Case(6, "edges")))


def test_a_rule_that_keeps_a_number_of_a_row_but_adds_nothing_up() -> None:
    rule = Rule("counting", ("n = n + 1", "w -= lr * g / n"), (State("n", "row"),))
    spec = CollectionSpec(
        (TableSpec("t", 9, 15), TableSpec("u", 9, 160)), (FeatureSpec("f", "t"), FeatureSpec("g", "u")), name="counting"
    )
    compare(plan_of(spec, rule), drawn(spec, Case(5)), steps=2)


def test_more_rows_than_keys_of_32_bits_can_number() -> None:
    def spec_of(rows: int) -> CollectionSpec:
        features = (FeatureSpec("f", "t"), FeatureSpec("g", "u"))
        return CollectionSpec((TableSpec("t", rows, 8), TableSpec("u", rows, 8)), features, name="many_rows")

    # The tables have 20 rows each, not as many as the spec says: this tests how rows are numbered.
    plan, small = (plan_of(spec_of(rows), builtin.sgd()) for rows in (2**30, 20))
    assert key_dtype(replace(plan, target="cuda")) == "int64"
    module, truth = replace(module_of(small), plan=plan), module_of(reference_of(small))
    batch = batch_of([[[1, 2], [19]], [[0, 1], [19, 19]]], torch.int64)
    gradients = gradients_of(truth, batch)
    step(module, batch, gradients)
    step(truth, batch, gradients)
    assert all(map(torch.equal, module.everything(), truth.everything()))


@pytest.mark.parametrize(
    ("output", "id_dtype"), [pytest.param("fp32", "int64", marks=pytest.mark.soak), ("bf16", "int32")]
)
def test_reductions_have_the_references_bits(output: str, id_dtype: str) -> None:
    spec = with_output(POOLINGS, output)
    plan = plan_of(spec, None, id_dtype=id_dtype, op="reduce")
    for case in cases_of(id_dtype):
        compare_reduce(plan, drawn(spec, case))
    bad = drawn(spec, Case(5, bad_ids=True, id_dtype=id_dtype))  # type: ignore[arg-type]
    compare_reduce(plan, bad, bounds_check="zero", frozen=("g",))


@pytest.mark.parametrize(
    ("output", "id_dtype"), [pytest.param("fp32", "int64", marks=pytest.mark.soak), ("fp16", "int32")]
)
def test_gradients_of_weights_have_the_references_bits(output: Any, id_dtype: str) -> None:
    poolings = ("sum", "mean", "sqrtn", "none", "concat", "sum")
    features = [
        FeatureSpec(f"{pooling}{i}", "ab"[i % 2], pooling, weighted=i < 5, padding_idx=i, hotness=2)  # type: ignore[arg-type]
        for i, pooling in enumerate(poolings)
    ]
    tables = (TableSpec("a", 30, 150), TableSpec("b", 30, 7, "bf16"))
    spec = CollectionSpec(tables, tuple(features), output_dtype=output, name="weights")
    plan = plan_of(spec, None, id_dtype=id_dtype, op="weight_gradient")
    for case in (*cases_of(id_dtype), Case(2, "split", id_dtype=id_dtype)):  # type: ignore[arg-type]
        compare_weights(plan, drawn(spec, case))
    bad = drawn(spec, Case(5, bad_ids=True, id_dtype=id_dtype))  # type: ignore[arg-type]
    compare_weights(plan, bad, bounds_check="zero")


@pytest.mark.soak
def test_a_row_that_occurs_more_than_64_times_4096_times() -> None:
    compare(plan_of(ONE, builtin.sgd()), batch_of([[[3] * 300_000, [4] * 5000, [3] * 7]], torch.int64))


@pytest.mark.soak
@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_120"])
@pytest.mark.parametrize("output", ["fp32", "bf16"])
def test_every_rule_has_the_references_bits(arch: str, output: str) -> None:
    spec = with_output(POOLINGS, output)
    for rule in RULES:
        plan = plan_of(spec, rule, arch)
        compare(plan, drawn(spec, Case(6, "edges", "zipf")), steps=3)


# ---- nothing is written ---------------------------------------------------------------------------------------------


def unchanged(plan: Plan, batch: Batch, bounds_check: str = "error", **how: Any) -> tuple[Module, Any]:
    """A module, and a step of it that must change nothing."""
    module = module_of(plan, **how)
    before = [tensor.clone() for tensor in module.everything()]

    def run(gradients: Any) -> torch.Tensor:
        try:
            return step(module, batch, gradients, bounds_check)
        finally:
            for found, old in zip(module.everything(), before, strict=True):
                assert torch.equal(found, old)

    return module, run


def test_gradients_that_are_not_finite_change_nothing_if_the_loss_was_scaled() -> None:
    """The infinite gradient is one of a load of four numbers, or one of those after the last such load."""
    spec = CollectionSpec(
        (TableSpec("t", 20, 7),), (FeatureSpec("f", "t"), FeatureSpec("n", "t", "none")), name="finite"
    )
    plan = plan_of(spec, builtin.sgd())
    batch = batch_of([[[1], [2, 3]], [[4], [5]]], torch.int64)
    for number in (torch.inf, torch.nan):
        for name, element in (("pooled", 11), ("pooled", 12), ("pooled", 13), ("sequence", 3), ("sequence", 13)):
            module, run = unchanged(plan, batch, grad_scale=2.0)
            gradients = gradients_of(module, batch)
            getattr(gradients, name).view(-1)[element] = number
            assert run(gradients).tolist() == [torch.inf]
    gradients.sequence[3] = torch.nan  # type: ignore[index]
    module = module_of(plan, grad_scale=0.0)
    assert step(module, batch, gradients).tolist() == [0.0]
    assert module.counters[0] == 7
    assert bool(module.tables[0].isnan().any())


@pytest.mark.parametrize(
    ("bags", "offsets", "error", "message"),
    [
        ([[[1], [2, 20]]], None, IndexError, r"feature 'f': id 20 of sample 1, position 1 is not a row of table 't'"),
        ([[[-1], [2]]], None, IndexError, r"id -1 of sample 0, position 0"),
        ([[[1], [2, 3]]], [0, 5, 3], ValueError, r"offsets must never fall"),
        ([[[1], [2, 3]]], [1, 2, 3], ValueError, r"offsets must start at 0"),
        ([[[1], [2, 3]]], [0, 1, 2], ValueError, r"offsets end at 2"),
    ],
)
def test_bad_input_raises_and_changes_nothing(bags: Any, offsets: Any, error: Any, message: str) -> None:
    plan = plan_of(ONE, builtin.sgd())
    batch = batch_of(bags, torch.int64)
    _, run = unchanged(plan, batch)
    gradients = gradients_of(module_of(plan), batch)
    if offsets:
        batch.offsets.copy_(torch.tensor(offsets))
    with pytest.raises(error, match=message):
        run(gradients)


def test_an_unchecked_id_that_is_no_row_is_the_callers_mistake() -> None:
    plan = plan_of(ONE, builtin.sgd())
    batch = batch_of([[[1], [20]]], torch.int64)
    _, run = unchanged(plan, batch, "unchecked")
    with pytest.raises(IndexError, match="id 20 of sample 1"):
        run(gradients_of(module_of(plan), batch))
    compare(plan, batch_of([[[1], [19, 1]]], torch.int64), bounds_check="unchecked")


def test_bad_input_of_reductions_and_of_gradients_of_weights_raises() -> None:
    spec = CollectionSpec(
        (TableSpec("t", 20, 8),), (FeatureSpec("f", "t", "concat", weighted=True, hotness=2),), name="long"
    )
    batch = batch_of([[[1], [2, 3]]], torch.int64)
    for op in ("reduce", "weight_gradient"):
        plan = plan_of(spec, None, op=op)
        module = module_of(plan)
        gradients = gradients_of(module, batch)
        kernel = kernel_of(Program(plan).text)
        bad = batch._replace(values=torch.tensor([1, 2, 99]))
        with pytest.raises(IndexError, match="id 99 of sample 1, position 1"):
            kernel(metadata_of(module, "error"), module.tables, bad, gradients, "error")
        long = batch._replace(offsets=torch.tensor([0, 0, 3]))
        with pytest.raises(ValueError, match="hotness=2 allows 2"):
            kernel(metadata_of(module, "error"), module.tables, long, gradients, "error")


def test_a_batch_without_bags_has_no_ids() -> None:
    plan = plan_of(ONE, builtin.sgd())
    batch = Batch(torch.tensor([1]), torch.tensor([0]), None, 0, None)
    _, run = unchanged(plan, batch)
    with pytest.raises(ValueError, match="offsets has no bag for them"):
        run(gradients_of(module_of(plan), batch._replace(values=torch.tensor([], dtype=torch.int64))))


def test_hyper_numbers_reach_the_rule() -> None:
    plan = plan_of(ONE, builtin.sgd())
    module = module_of(plan)
    before = module.tables[0].clone()
    batch = batch_of([[[3]]], torch.int64)
    gradients = gradients_of(module, batch)
    step(module, batch, gradients)
    assert torch.equal(module.tables[0][3], before[3] - torch.tensor(NUMBERS["lr"]) * gradients.pooled[0])
