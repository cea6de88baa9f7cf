"""The same training run on every backend ends in the same bits, on one thread and on two."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations, cycle, product
from typing import Any

import pytest
import torch
from backends import available

import embforge as ef
from embforge.codegen.dtypes import TABLE_DTYPES
from embforge.codegen.params import CudaParams
from embforge.codegen.plans import training_plans
from embforge.codegen.poolings import POOLINGS
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.verify.training_run import CASES, TrainingResult, bits_of, training_run

STEPS, FEW_STEPS = 50, 12
AT_LENGTH = ("momentum", "rowwise_adam")
"""Rules whose runs are long in every test run, on few features; those of all rules only in the soak."""
WHOLE = ("sgd", "rowwise_adagrad", "adam")
"""Rules that train every kind of feature; the others do so only in the soak.

How a gradient is found and what a rule makes of it are separate templates, so each needs its own covering set: every
kind of feature under some rules, and every rule on every table format. Kernels of many buckets take long to compile.
"""
ON_SIMT = (*WHOLE, "ftrl", "lamb", "custom")
"""Rules that the emulated GPU runs, too; the others do so only in the soak. A rule is one text for C++ and CUDA, and
these have between them all that is in the others."""
KINDS = [(name, weighted) for name, kind in POOLINGS.items() for weighted in (False, kind.weightable)]
OUTPUTS = ("fp32", "bf16", "fp16")

OPTIMIZERS: dict[str, Any] = {
    "sgd": ef.optim.SGD(lr=0.1, weight_decay=0.01),
    "momentum": ef.optim.Momentum(lr=0.1),
    "nesterov": ef.optim.Nesterov(lr=0.1, weight_decay=0.1, decoupled=True),
    "adagrad": ef.optim.Adagrad(lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1),
    "rowwise_adagrad": ef.optim.RowwiseAdagrad(lr=0.1),
    "adam": ef.optim.Adam(lr=0.02),
    "rowwise_adam": ef.optim.RowwiseAdam(lr=0.02, rounding="nearest"),
    "rmsprop": ef.optim.RMSProp(lr=0.02, max_row_norm=0.5),
    "ftrl": ef.optim.Ftrl(lr=0.1),
    "lamb": ef.optim.LAMB(lr=0.02, weight_decay=0.01),
    "lars": ef.optim.LARS(lr=0.1),
    "custom": ef.optim.custom(
        "signum", state={"m": "element", "n": "row"}, rule="n += mean(g * g)\nm = beta * m + (1 - beta) * g\n"
        "w -= lr * sign(m) * min(1, sqrt(n))", hyper={"beta": 0.9}
    )(lr=0.01),
}  # fmt: skip

SHAPES = cycle(((40, 15), (3, 8), (60, 33), (25, 20)))
TABLES = [
    TableSpec(f"t{i}", rows, dim, dtype)  # type: ignore[arg-type]
    for i, (dtype, (rows, dim)) in enumerate(zip(TABLE_DTYPES, SHAPES, strict=False))
]
"""One table of every format."""


def spec_of(turn: int) -> CollectionSpec:
    """All kinds of features over tables of all dtypes, several per table. Every turn combines them differently."""
    features = []
    for number, (pooling, weighted) in enumerate(KINDS):
        table = TABLES[(number // 2 + number % 2 * len(OUTPUTS) + turn) % len(TABLES)]
        hotness = 129 if pooling == "concat" else None
        padding = 1 if number % 3 == turn else None
        features.append(FeatureSpec(f"f{number}", table.name, pooling, weighted, hotness, padding))  # type: ignore[arg-type]
    return CollectionSpec(TABLES, features, OUTPUTS[turn], f"turn{turn}")  # type: ignore[arg-type]


TURNS = {name: turn % len(OUTPUTS) for turn, name in enumerate(OPTIMIZERS)}


SMALL = CollectionSpec(
    TABLES,
    [FeatureSpec(f"f{i}", table.name, weighted=i == 0) for i, table in enumerate(TABLES)],
    name="small",
)
"""One table of every format, each with one feature."""
INT64_CASES = tuple(replace(case, id_dtype="int64") for case in CASES)


def cells(whole: Iterable[str]) -> Iterable[tuple[str, str, bool, str]]:
    """The combinations of rule, pooling, weighted and dtype in all runs, if rules in `whole` train all features."""
    for rule, turn in TURNS.items():
        spec = spec_of(turn) if rule in whole else SMALL
        for feature in spec.features:
            yield rule, feature.pooling, feature.weighted, spec.table(feature.table).dtype


@pytest.mark.parametrize("whole", [WHOLE, OPTIMIZERS], ids=["usual", "soak"])
def test_runs_cover_all_pairs(whole: Any) -> None:
    axes: list[Any] = [tuple(OPTIMIZERS), POOLINGS, (False, True), TABLE_DTYPES]
    unweighted = {(name, True) for name, kind in POOLINGS.items() if not kind.weightable}
    found = list(cells(whole))
    for first, second in combinations(range(len(axes)), 2):
        if whole is WHOLE and first == 0 and second < 3:  # rules meet formats; features meet each other
            continue
        met = {(cell[first], cell[second]) for cell in found}
        missing = set(product(axes[first], axes[second])) - met - unweighted
        assert not missing, f"axes {first} and {second}: {sorted(missing)}"


def words_of(rule: str) -> set[Any]:
    """Functions and operators of a rule, and the kinds of states that it has."""
    found: set[Any] = {tuple(state.extent for state in OPTIMIZERS[rule].update.rule.states)}
    for node in ast.walk(ast.parse("\n".join(OPTIMIZERS[rule].update.rule.lines))):
        if isinstance(node, ast.Call):
            found.add(ast.unparse(node.func))
        elif isinstance(node, ast.operator | ast.cmpop | ast.unaryop):
            found.add(type(node))
    return found


def test_rules_on_simt_have_all_that_rules_have() -> None:
    found, wanted = (set().union(*map(words_of, rules)) for rules in (ON_SIMT, OPTIMIZERS))
    assert wanted - found == {("element",)}  # a part of two such states


def run(rule: str, steps: int, backend: str, *, small: bool = False, threads: int = 1) -> TrainingResult:
    """The type of ids varies in runs of one of the whole rules, and in the long runs of the soak.

    The emulated GPU then has the same ids as int64: `test_simt_backward.py` runs its kernels for int32.
    """
    at_length = steps == STEPS and not small
    both_types = at_length or (rule == "rowwise_adagrad" and backend != "simt")
    spec = SMALL if small else spec_of(TURNS[rule])
    drawn = CASES if both_types else INT64_CASES
    return training_run(spec, OPTIMIZERS[rule], backend, steps=steps, threads=threads, cases=drawn)


def assert_same_bits(got: TrainingResult, want: TrainingResult) -> None:
    for have, wanted in ((got.state, want.state), (got.gradients, want.gradients)):
        assert have.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(bits_of(have[name]), bits_of(tensor)), name


def test_bits_tell_zeros_of_different_sign_but_not_nans() -> None:
    """It is not defined which bit pattern a NaN has."""
    for dtype, nans in ((torch.int32, (0x7FC00000, 0x7F800001, -1)), (torch.int16, (0x7FC0, 0x7F81, -1))):
        floats = torch.float32 if dtype == torch.int32 else torch.bfloat16
        first, *others = (bits_of(torch.tensor([bits, 1], dtype=dtype).view(floats)) for bits in nans)
        assert all(torch.equal(first, other) for other in others)
    assert not torch.equal(bits_of(torch.tensor([0.0])), bits_of(torch.tensor([-0.0])))
    assert not torch.equal(bits_of(torch.tensor([torch.nan])), bits_of(torch.tensor([1.0])))
    nan, one = (torch.tensor([bits], dtype=torch.uint8).view(torch.float8_e4m3fn) for bits in (0xFF, 0x7E))
    assert torch.equal(bits_of(nan), bits_of(torch.tensor([torch.nan]).to(nan.dtype)))
    assert not torch.equal(bits_of(nan), bits_of(one))


def test_weights_of_features_without_any_have_zero_gradients() -> None:
    """No kernel is generated or looked up for that."""
    spec = CollectionSpec([TableSpec("t", 4, 2)], [FeatureSpec("f", "t")])
    assert "weight_gradient" not in training_plans(spec, "cuda", "sm_90", "int64", CudaParams())
    module = ef.EmbeddingCollection(spec, backend="reference", optimizer=ef.optim.SGD(0.1))
    weights = torch.ones(3, requires_grad=True)
    module(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 3]), weights).sum().backward()
    assert weights.grad is not None and weights.grad.tolist() == [0.0, 0.0, 0.0]


RUNS = [
    *(pytest.param(rule, FEW_STEPS, rule not in WHOLE, id=rule) for rule in OPTIMIZERS),
    *(pytest.param(rule, STEPS, True, id=f"{rule}-long") for rule in AT_LENGTH),
    *(pytest.param(rule, STEPS, False, marks=pytest.mark.soak, id=f"{rule}-soak") for rule in OPTIMIZERS),
]


@pytest.mark.parametrize(("rule", "steps", "small"), RUNS)
def test_steps_have_the_same_bits(rule: str, steps: int, small: bool) -> None:
    want = run(rule, steps, "reference", small=small)
    changed = [
        name for name, tensor in want.state.items() if name.endswith("weight") and tensor.float().isfinite().all()
    ]
    assert len(changed) == len(TABLES), "a run that diverges shows nothing"
    backends = [name for name in available()[1:] if name != "simt" or rule in ON_SIMT or not small]
    for backend in backends:
        for threads in (1, 2) if backend == "cpu" else (1,):
            assert_same_bits(run(rule, steps, backend, small=small, threads=threads), want)
