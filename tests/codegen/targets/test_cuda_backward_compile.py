"""Every claim about the CUDA backward that a compiler can settle: no spills, registers, bytes in flight."""

from __future__ import annotations

from dataclasses import fields
from itertools import cycle
from typing import Any

import pytest
from support.selections import SELECTIONS
from support.training import RULES, plan_of

from embforge import optim
from embforge.codegen.build import build, source_of
from embforge.codegen.dtypes import OUTPUT_DTYPES, TABLE_DTYPES
from embforge.codegen.errors import PlanError
from embforge.codegen.params import CudaBackwardParams
from embforge.codegen.plan import Plan
from embforge.codegen.rules import builtin
from embforge.codegen.rules.rule import Rule, Update
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.codegen.targets import check_plan
from embforge.codegen.targets.cuda.arch import ARCHS
from embforge.codegen.targets.cuda.backward_geometry import row_buckets
from embforge.codegen.targets.cuda.shared_memory import SCALARS, shared_bytes
from embforge.collection import EmbeddingCollection
from embforge.verify.pairwise import covering

USUAL = CollectionSpec((TableSpec("t", 100_000, 128),), (FeatureSpec("f", "t"),), name="d128")
MIXED = CollectionSpec(
    (
        TableSpec("wide", 1000, 1000),
        TableSpec("usual", 1000, 64),
        TableSpec("odd", 1000, 33, "bf16"),
        TableSpec("half", 1000, 96, "fp16"),
        TableSpec("small", 1000, 16, "fp8_e4m3"),
        TableSpec("range", 1000, 24, "fp8_e5m2"),
        TableSpec("tail", 1000, 15),
    ),
    (
        FeatureSpec("sum", "wide"),
        FeatureSpec("mean", "usual", "mean", weighted=True),
        *(FeatureSpec(name, table, name) for name, table in zip(SELECTIONS, cycle(("odd", "wide")), strict=False)),
        FeatureSpec("concat", "half", "concat", hotness=3),
        FeatureSpec("none", "small", "none"),
        FeatureSpec("narrow", "range", "mean"),
        FeatureSpec("sqrtn", "tail", "sqrtn", padding_idx=3),
    ),
    name="backward_mixed",
)
MOST_REGISTERS = 64
WANTED_BYTES = {"sm_90": 32 << 10, "sm_100": 64 << 10}


def cuda_plan(spec: CollectionSpec, rule: Rule | None, arch: str, op: str = "backward", **params: Any) -> Plan:
    update = None if rule is None else Update(rule)
    return Plan(op, "cuda", arch, "int64", spec, CudaBackwardParams(**params), update)


def figures_of(plan: Plan) -> list[dict[str, Any]]:
    """The figures of a plan's kernels, none of which may spill."""
    figures = build(plan, resources=True).resources
    for kernel in figures:
        assert kernel["spill_bytes"] == 0, kernel
        assert kernel["local_instructions"] == 0, kernel
    return figures


def test_registers_of_the_usual_table() -> None:
    figures = figures_of(cuda_plan(USUAL, builtin.sgd(), "sm_90"))
    assert len(figures) == 7
    for kernel in figures:
        assert kernel["registers"] <= MOST_REGISTERS, kernel


@pytest.mark.parametrize("arch", WANTED_BYTES)
def test_bytes_in_flight_of_the_usual_table(arch: str) -> None:
    loops = [k["bytes_in_flight"] for k in figures_of(cuda_plan(USUAL, builtin.sgd(), arch)) if k["bytes_in_flight"]]
    assert len(loops) == 2  # of chunks and of rows
    assert min(loops) >= WANTED_BYTES[arch]


@pytest.mark.parametrize(
    ("rule", "arch", "op"),
    [
        (builtin.rowwise_adagrad(), "sm_75", "backward"),
        (builtin.lamb(True), "sm_120", "backward"),
        (None, "sm_100", "reduce"),
        (None, "sm_80", "weight_gradient"),
    ],
)
def test_no_kernel_of_the_backward_spills(rule: Rule | None, arch: str, op: str) -> None:
    figures_of(cuda_plan(MIXED, rule, arch, op))


def test_lanes_of_eight_elements_spill_nothing() -> None:
    spec = CollectionSpec(
        (TableSpec("t", 1000, 64, "bf16"),), (FeatureSpec("f", "t"),), output_dtype="bf16", name="eight"
    )
    plan = cuda_plan(spec, builtin.sgd(), "sm_90")
    assert row_buckets(plan)[0].elements == 8
    figures_of(plan)


@pytest.mark.soak
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_no_rule_spills_on_any_architecture(rule: Rule, arch: str) -> None:
    figures_of(cuda_plan(MIXED, rule, arch))
    figures_of(cuda_plan(USUAL, rule, arch))


@pytest.mark.soak
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("output", ["fp32", "fp16", "bf16"])
def test_usual_rules_and_reductions_spill_on_no_architecture(output: Any, arch: str) -> None:
    spec = CollectionSpec(MIXED.tables, MIXED.features, output_dtype=output, name=MIXED.name)
    for op in ("reduce", "weight_gradient"):
        figures_of(cuda_plan(spec, None, arch, op))
    for rule in (builtin.sgd(), builtin.rmsprop(), builtin.rowwise_adagrad(), builtin.adam(), builtin.lamb(True)):
        figures_of(cuda_plan(spec, rule, arch))


@pytest.mark.soak
@pytest.mark.parametrize("params", [{"pipeline": (2, 5)}, {"pipeline": (8, 2)}, {"block": 512}, {"vector_bytes": 8}])
@pytest.mark.parametrize("rule", [builtin.sgd(), builtin.rowwise_adagrad(), builtin.adam(), builtin.lamb(True)])
def test_no_plan_field_spills(rule: Rule, params: dict[str, Any]) -> None:
    figures_of(cuda_plan(MIXED, rule, "sm_90", **params))


@pytest.mark.parametrize("block", [pytest.param(128, marks=pytest.mark.soak), 512])
def test_every_block_size_compiles(block: int) -> None:
    figures_of(cuda_plan(USUAL, builtin.adam(), "sm_89", block=block))


def test_thousands_of_features_compile() -> None:
    tables = tuple(TableSpec(f"t{i}", 1000, 8) for i in range(50))
    features = tuple(FeatureSpec(f"f{i}", f"t{i % 50}") for i in range(1000))
    plan = cuda_plan(CollectionSpec(tables, features, name="many"), builtin.sgd(), "sm_90")
    assert "__device__ const Feature FEATURES[]" in source_of(plan)
    assert build(plan).binary.stat().st_size > 0


def test_simt_runs_the_same_symbols() -> None:
    plan = plan_of(USUAL, builtin.sgd())
    assert plan.symbol == cuda_plan(USUAL, builtin.sgd(), "sm_90").uri


FEW_LANES = {
    output: CollectionSpec((TableSpec("t", 1000, 8, "fp16"),), (FeatureSpec("f", "t"),), output, name="few_lanes")
    for output in ("fp32", "fp16")
}
"""A row is one or two lanes, so that a block holds the sums of as many rows as it can."""


def test_a_block_without_the_shared_memory_is_refused_when_its_plan_is_made() -> None:
    message = r"plan field block=512: a block of op 'backward' needs 49216 bytes of shared memory.*allowed: 49152"
    for arch in ("sm_75", "sm_90"):
        with pytest.raises(PlanError, match=message):
            source_of(cuda_plan(FEW_LANES["fp16"], builtin.rowwise_adagrad(), arch, block=512))
    with pytest.raises(PlanError, match=message):
        EmbeddingCollection(
            FEW_LANES["fp16"],
            backend="simt",
            optimizer=optim.RowwiseAdagrad(lr=0.1),
            backward_params=CudaBackwardParams(block=512),
        )
    sequences = tuple(FeatureSpec(f"f{i}", "t", "none", weighted=True) for i in range(2100))
    many = CollectionSpec((TableSpec("t", 1000, 8),), sequences, name="many_rows")
    for op, rule in (("backward", builtin.sgd()), ("reduce", None), ("weight_gradient", None)):
        with pytest.raises(PlanError, match="50400 for 2100 'none' features"):
            source_of(cuda_plan(many, rule, "sm_90", op))


def check_compiles(plan: Plan) -> bool:
    """Compiles a plan unless it is refused; the shared memory that was counted is what the machine code has."""
    try:
        check_plan(plan)
    except PlanError:
        return False
    taken = max(kernel["shared_bytes"] for kernel in build(plan, resources=True).resources)
    assert taken <= shared_bytes(plan) <= taken + SCALARS + 8, plan.uri
    return True


@pytest.mark.parametrize(
    ("rule", "arch", "op", "output"),
    [
        (builtin.rowwise_adagrad(), "sm_75", "backward", "fp32"),
        (builtin.rowwise_adagrad(), "sm_90", "backward", "fp32"),
        (None, "sm_90", "reduce", "fp16"),
    ],
)
def test_the_largest_blocks_of_short_rows_compile(rule: Rule | None, arch: str, op: str, output: str) -> None:
    assert check_compiles(cuda_plan(FEW_LANES[output], rule, arch, op, block=512))


COVERED = covering(
    {
        "op": ["weight_gradient", "reduce", *RULES],
        "dim": [1, 2, 4, 8, 16, 33, 1000],
        "dtype": list(TABLE_DTYPES),
        "output": list(OUTPUT_DTYPES),
        "pooling": ["sum", "mean", "none"],
        "arch": ["sm_75", "sm_90"],
        **{item.name: item.metadata["choices"] for item in fields(CudaBackwardParams)},
    }
)
"""Plans of one table in which any two choices meet."""


@pytest.mark.soak
@pytest.mark.parametrize("chosen", COVERED, ids=lambda chosen: "-".join(str(v)[:16] for v in chosen.values()))
def test_every_allowed_plan_compiles_or_is_refused(chosen: dict[str, Any]) -> None:
    chosen = dict(chosen)
    op, dim, dtype, output, pooling, arch = (
        chosen.pop(name) for name in ("op", "dim", "dtype", "output", "pooling", "arch")
    )
    feature = FeatureSpec("f", "t", pooling, weighted=True)
    spec = CollectionSpec((TableSpec("t", 1000, dim, dtype),), (feature,), output, name="covered")
    rule, op = (op, "backward") if isinstance(op, Rule) else (None, op)
    check_compiles(cuda_plan(spec, rule, arch, op, **chosen))
