"""The same training run on every backend ends in the same bits, on one thread and on two."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
import torch
from backends import available

import embforge as ef
from embforge.codegen.params import CudaParams
from embforge.codegen.spec import POOLINGS, CollectionSpec, FeatureSpec, TableSpec
from embforge.codegen.plans import training_plans
from embforge.verify.training_run import Trained, bits_of, training_run

STEPS, FEW_STEPS = 50, 12
AT_LENGTH = ("rowwise_adagrad", "adam")
"""Rules whose runs are long in every test run; those of the others only in the soak."""
DTYPES = ("fp32", "fp16", "bf16", "fp8_e4m3")
KINDS = [(pooling, weighted) for pooling in POOLINGS for weighted in (False, pooling != "max")]
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


def spec_of(turn: int) -> CollectionSpec:
    """All kinds of features over tables of all dtypes, several to a table; every turn matches them otherwise."""
    tables = [
        TableSpec(f"t{i}", rows, dim, dtype)
        for i, (dtype, rows, dim) in enumerate(zip(DTYPES, (40, 3, 60, 25), (15, 8, 33, 20), strict=True))
    ]
    features = []
    for number, (pooling, weighted) in enumerate(KINDS):
        table = tables[(number + turn * (1 + number // 4)) % len(tables)]
        hotness = 129 if pooling == "concat" else None
        padding = 1 if number % 3 == turn else None
        features.append(FeatureSpec(f"f{number}", table.name, pooling, weighted, hotness, padding))  # type: ignore[arg-type]
    return CollectionSpec(tables, features, OUTPUTS[turn], f"turn{turn}")  # type: ignore[arg-type]


TURNS = {name: turn % len(OUTPUTS) for turn, name in enumerate(OPTIMIZERS)}


def cells() -> Iterable[tuple[str, str, bool, str]]:
    """Every rule x pooling x weighted x dtype that some run has."""
    for rule, turn in TURNS.items():
        spec = spec_of(turn)
        for feature in spec.features:
            yield rule, feature.pooling, feature.weighted, spec.table(feature.table).dtype


def test_runs_cover_all_pairs() -> None:
    axes: list[Any] = [tuple(OPTIMIZERS), POOLINGS, (False, True), DTYPES]
    found = list(cells())
    for first, second in combinations(range(len(axes)), 2):
        met = {(cell[first], cell[second]) for cell in found}
        missing = set(product(axes[first], axes[second])) - met - {("max", True)}
        assert not missing, f"axes {first} and {second}: {sorted(missing)}"


@cache
def reference_run(rule: str, steps: int) -> Trained:
    return training_run(spec_of(TURNS[rule]), OPTIMIZERS[rule], "reference", steps=steps)


def assert_same_bits(got: Trained, want: Trained) -> None:
    for have, wanted in ((got.state, want.state), (got.gradients, want.gradients)):
        assert have.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(bits_of(have[name]), bits_of(tensor)), name


def test_nan_is_nan_and_zero_has_a_sign() -> None:
    """Which of its bit patterns a NaN has is not defined."""
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
    """No kernel is generated, or looked for, to find that out."""
    spec = CollectionSpec([TableSpec("t", 4, 2)], [FeatureSpec("f", "t")])
    assert "weight_gradient" not in training_plans(spec, "cuda", "sm_90", "int64", CudaParams())
    module = ef.EmbeddingCollection(spec, backend="reference", optimizer=ef.optim.SGD(0.1))
    weights = torch.ones(3, requires_grad=True)
    module(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 3]), weights).sum().backward()
    assert weights.grad is not None and weights.grad.tolist() == [0.0, 0.0, 0.0]


RUNS = [
    *((rule, STEPS if rule in AT_LENGTH else FEW_STEPS) for rule in OPTIMIZERS),
    *(pytest.param(rule, STEPS, marks=pytest.mark.soak) for rule in OPTIMIZERS if rule not in AT_LENGTH),
]


@pytest.mark.parametrize(("rule", "steps"), RUNS)
def test_steps_have_the_same_bits(rule: str, steps: int) -> None:
    want = reference_run(rule, steps)
    changed = [
        name for name, tensor in want.state.items() if name.endswith("weight") and tensor.float().isfinite().all()
    ]
    assert len(changed) == len(DTYPES), "a run that diverges shows nothing"
    for backend in available()[1:]:
        for threads in (1, 2) if backend == "cpu" else (1,):
            got = training_run(spec_of(TURNS[rule]), OPTIMIZERS[rule], backend, steps=steps, threads=threads)
            assert_same_bits(got, want)
