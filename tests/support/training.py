"""Training steps for tests: a spec, a rule and a batch, run by a target and by the reference, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from embforge.codegen.params import CudaBackwardParams, ReferenceParams
from embforge.codegen.plan import Plan
from embforge.codegen.rules import builtin
from embforge.codegen.rules.rule import HYPER, Rule, Update
from embforge.codegen.spec import CollectionSpec
from embforge.inputs import Batch
from embforge.launch.gradients import Gradients
from embforge.launch.kernels import Program, kernel_of
from embforge.launch.metadata import update_metadata_of
from embforge.launch.reference.forward_train import lookup_train
from embforge.number_formats import torch_dtype
from embforge.operators.dense import dense_gradients
from embforge.storage.states import allocate_section, state_views
from embforge.verify.cases import draw_tables

NUMBERS = {"lr": 0.05, "grad_scale": 0.0, "eps": 1e-3, "momentum": 0.9, "beta1": 0.9, "beta2": 0.99}
"""The numbers that rules take, by name; all others are 0.01."""

RULES = (
    builtin.sgd(),
    builtin.rowwise_adagrad(),
    builtin.adam(),
    builtin.momentum(),
    builtin.nesterov(),
    builtin.adagrad(True),
    builtin.rowwise_adam(),
    builtin.rmsprop(),
    builtin.ftrl(),
    builtin.lamb(True),
    builtin.lars(True),
    builtin.with_options(builtin.adam(), decay="decoupled", clipped=True),
    builtin.with_options(builtin.sgd(), decay="l2"),
)
"""Every built-in rule, and rules with options."""


def plan_of(
    spec: CollectionSpec,
    rule: Rule | None,
    arch: str = "sm_90",
    id_dtype: str = "int64",
    op: str = "backward",
    rounding: Any = "stochastic",
    **params: Any,
) -> Plan:
    """A simt plan of a backward op."""
    update = None if rule is None else Update(rule, rounding)
    return Plan(op, "simt", arch, id_dtype, spec, CudaBackwardParams(**params), update)


def reference_of(plan: Plan) -> Plan:
    return replace(plan, target="reference", params=ReferenceParams())


def batch_of(
    bags: Sequence[Sequence[Sequence[int]]], dtype: torch.dtype, weighted: bool = True, seed: int = 0
) -> Batch:
    """A batch from each feature's bags of ids."""
    lengths = [len(bag) for feature in bags for bag in feature]
    values = torch.tensor([row for feature in bags for bag in feature for row in bag], dtype=dtype)
    offsets = torch.nn.functional.pad(torch.tensor(lengths, dtype=torch.int64).cumsum(0), (1, 0)).to(dtype)
    weights = torch.randn(values.numel(), generator=torch.Generator().manual_seed(0)) if weighted else None
    return Batch(values, offsets, weights, len(bags[0]), None)


@dataclass
class Module:
    """Tables, states and counters of a spec under a plan."""

    plan: Plan
    tables: list[Tensor]
    states: list[Tensor]
    hyper: Tensor
    counters: Tensor
    trainable: list[bool]

    def everything(self) -> list[Tensor]:
        """All that an update may change, as bytes."""
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
        rows = [t.contiguous().view(bits[t.element_size()]) for t in self.tables]
        views = [
            state.contiguous().view(torch.int32)
            for table_layout, table, section in zip(self.plan.layout.tables, self.tables, self.states, strict=True)
            for state in state_views(table_layout, table, section).values()
        ]
        return [*rows, *views, self.counters]


def module_of(plan: Plan, seed: int = 0, grad_scale: float = 0.0, frozen: Sequence[str] = ()) -> Module:
    """A module with drawn numbers. Equal seeds give equal numbers for every target."""
    device, generator = torch.device("cpu"), torch.Generator().manual_seed(seed)
    tables = list(draw_tables(plan.spec, seed))
    sections = [allocate_section(table_layout, device) for table_layout in plan.layout.tables]
    for table_layout, table, section in zip(plan.layout.tables, tables, sections, strict=True):
        for state in state_views(table_layout, table, section).values():
            state.copy_(torch.rand(state.shape, generator=generator))
    rule = plan.update.rule if plan.update else None
    names = (*HYPER, *(rule.hyper if rule else ()))
    numbers = [grad_scale if name == "grad_scale" else NUMBERS.get(name, 0.01) for name in names]
    trainable = [table.name not in frozen for table in plan.spec.tables]
    counters = torch.tensor([6, 0x1234_5678_9ABC])
    return Module(plan, tables, sections, torch.tensor(numbers, dtype=torch.float64), counters, trainable)


def gradients_of(module: Module, batch: Batch, seed: int = 0, bounds_check: str = "zero") -> Gradients:
    """Gradients of a batch's results, and what its forward kept."""
    spec = module.plan.spec
    pooled, sequence, divisors, winners = lookup_train(
        spec, batch.values, batch.offsets, batch.weights, module.tables, bounds_check=bounds_check
    )
    generator = torch.Generator().manual_seed(seed)
    dtype = torch_dtype(spec.output_dtype)

    def draw(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator).to(dtype)

    return Gradients(draw(pooled), None if sequence is None else draw(sequence), divisors, winners)


def metadata_of(module: Module, bounds_check: str) -> Any:
    return update_metadata_of(module.tables, module.states, module.trainable, bounds_check)


def step(module: Module, batch: Batch, gradients: Gradients, bounds_check: str = "error", **how: Any) -> Tensor:
    """One update."""
    kernel = kernel_of(Program(module.plan).text)
    metadata = metadata_of(module, bounds_check)
    verdict: Tensor = kernel(
        metadata, module.tables, module.states, batch, gradients, module.hyper, module.counters, bounds_check, **how
    )
    return verdict


def compare(plan: Plan, batch: Batch, *, bounds_check: str = "error", steps: int = 1, **how: Any) -> Module:
    """Asserts that the plan's updates leave the same bits as the reference's."""
    module, truth = module_of(plan, **how), module_of(reference_of(plan), **how)
    for number in range(steps):
        gradients = gradients_of(truth, batch, seed=number, bounds_check="error" if bounds_check == "error" else "zero")
        verdict = step(module, batch, gradients, bounds_check)
        assert torch.equal(verdict, step(truth, batch, gradients, bounds_check))
        for found, wanted in zip(module.everything(), truth.everything(), strict=True):
            assert torch.equal(found, wanted), (number, (found != wanted).nonzero()[:5], plan.uri)
    return module


def compare_reduce(plan: Plan, batch: Batch, *, bounds_check: str = "error", **how: Any) -> None:
    """Asserts that the plan's reduction of a batch is the reference's, bit for bit."""
    truth = module_of(reference_of(plan), **how)
    gradients = gradients_of(truth, batch)
    metadata = metadata_of(truth, bounds_check)
    found, wanted = (
        kernel_of(Program(p).text)(metadata, truth.tables, batch, gradients, bounds_check) for p in (plan, truth.plan)
    )
    for mine, true in zip(found, wanted, strict=True):
        assert torch.equal(mine[0], true[0])
        assert mine[1].shape == true[1].shape
        assert torch.equal(mine[1].view(torch.int32), true[1].view(torch.int32))
    compare_dense(plan, batch, gradients, wanted, truth.trainable, bounds_check)


def compare_dense(
    plan: Plan,
    batch: Batch,
    gradients: Gradients,
    reduced: Sequence[tuple[Tensor, Tensor]],
    trainable: Sequence[bool],
    bounds_check: str,
) -> None:
    """Asserts that the operator of dense gradients gives a reduction's gradients in its rows, and zeros in others."""
    dtypes = [torch_dtype(table.dtype) for table in plan.spec.tables]
    wanted = [trained and dtype.itemsize > 1 for trained, dtype in zip(trainable, dtypes, strict=True)]
    pooled = gradients.pooled
    kept = (pooled.new_empty(0, dtype=torch.float32), batch.values.new_empty(0))
    found = dense_gradients(
        pooled,
        pooled.new_empty(0) if gradients.sequence is None else gradients.sequence,
        *batch[:3],
        kept[0] if gradients.divisors is None else gradients.divisors,
        kept[1] if gradients.winners is None else gradients.winners,
        Program(plan).text,
        bounds_check,
        wanted,
    )
    truths = [(table, *sums) for table, sums, want in zip(plan.spec.tables, reduced, wanted, strict=True) if want]
    for mine, (table, rows, sums) in zip(found, truths, strict=True):
        true = torch.zeros(table.num_embeddings, table.embedding_dim, dtype=torch_dtype(table.dtype))
        true[rows] = sums.to(true.dtype)
        bits = torch.int32 if true.element_size() == 4 else torch.int16
        assert mine.is_contiguous() and torch.equal(mine.view(bits), true.view(bits))


def compare_weights(plan: Plan, batch: Batch, *, bounds_check: str = "error", **how: Any) -> None:
    """Asserts that the plan's gradient of weights is the reference's, bit for bit."""
    truth = module_of(reference_of(plan), **how)
    gradients = gradients_of(truth, batch)
    metadata = metadata_of(truth, bounds_check)
    found, wanted = (
        kernel_of(Program(p).text)(metadata, truth.tables, batch, gradients, bounds_check) for p in (plan, truth.plan)
    )
    assert found.shape == wanted.shape
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32)), (found != wanted).nonzero()[:5]
