"""A random program of calls on two modules that must stay alike: the CPU's kernels and the plain reference.

Hypothesis picks the calls and their batches, and shrinks a program that fails to its shortest form. Every step compares
results, gradients, rows, states and counters bit for bit, whatever torch's default dtype is.
"""

from __future__ import annotations

import copy
import os
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conformance.training import WITH_ROWS, differing, snapshot
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.strategies import cases, seeds
from torch import Tensor

from embforge import optim
from embforge.collection import EmbeddingCollection
from embforge.verify.cases import Case, draw_batch

BACKENDS = ("reference", "cpu")
OPTIMIZERS = (optim.Adam(lr=0.1), optim.RowwiseAdagrad(lr=0.1, weight_decay=0.01), optim.SGD(lr=0.5))
DEFAULT_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
TABLES = tuple(table.name for table in WITH_ROWS.tables)
MINUTES = float(os.environ.get("EMBFORGE_FUZZ_MINUTES", "10"))
"""Seconds for which `make soak` looks for a program that fails."""


class Twins(RuleBasedStateMachine):
    """Two modules that start with equal state, and the calls that a program may make."""

    modules: list[EmbeddingCollection]

    @initialize(optimizer=st.sampled_from(OPTIMIZERS), accumulate=st.booleans(), dtype=st.sampled_from(DEFAULT_DTYPES))
    def make(self, optimizer: optim.Optimizer, accumulate: bool, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.accumulate = accumulate
        self.modules = []
        for backend in BACKENDS:
            torch.manual_seed(7)
            with default_dtype(dtype):
                module = EmbeddingCollection(WITH_ROWS, "cpu", backend, optimizer, accumulate=accumulate)  # type: ignore[arg-type]
            module.seed(5)
            self.modules.append(module)
        self.modules[1].load_state_dict(self.modules[0].state_dict())

    @rule(case=cases(4), seed=seeds)
    def train(self, case: Case, seed: int) -> None:
        self._alike(lambda module: _trained(module, case, seed))

    @rule(case=cases(4), seed=seeds, how=st.sampled_from(["grad", "inputs"]))
    def ask_for_other_gradients(self, case: Case, seed: int, how: str) -> None:
        before = snapshot(self.modules[1])
        self._alike(lambda module: _queried(module, case, seed, how))
        assert differing(before, snapshot(self.modules[1])) == []

    @rule(case=cases(4), seed=seeds, mode=st.sampled_from([torch.no_grad, torch.inference_mode]))
    def look(self, case: Case, seed: int, mode: Any) -> None:
        with mode():
            self._alike(lambda module: _results(module, _batch(case, seed)))

    @rule(case=cases(4), seed=seeds)
    def train_twice_by_one_graph(self, case: Case, seed: int) -> None:
        self._alike(lambda module: _trained(module, case, seed, passes=2))

    @precondition(lambda self: self.accumulate)
    @rule(norm=st.sampled_from([None, 1e-3, 1.0]))
    def step(self, norm: float | None) -> None:
        if norm is not None:
            norms = [module.clip_grad_norm_(norm) for module in self.modules]
            torch.testing.assert_close(*norms, rtol=1e-5, atol=0.0)
            for module in self.modules:  # the norms may differ in the last bit, and with them all that is clipped
                module.optimizer.zero_grad()
        for module in self.modules:
            module.step()

    @rule(table=st.sampled_from(TABLES), frozen=st.booleans())
    def freeze(self, table: str, frozen: bool) -> None:
        for module in self.modules:
            (module.freeze if frozen else module.unfreeze)(table)

    @rule(lr=st.sampled_from([0.0, 0.01, 1.0]))
    def change_the_rate(self, lr: float) -> None:
        for module in self.modules:
            module.optimizer.param_groups[0]["lr"] = lr

    @rule(assign=st.booleans())
    def save_and_load(self, assign: bool) -> None:
        for module in self.modules:
            module.load_state_dict(copy.deepcopy(module.state_dict()), assign=assign)

    @precondition(lambda self: not self.accumulate)  # copies do not carry what has accumulated
    @rule(how=st.sampled_from([copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]))
    def go_on_with_a_copy(self, how: Any) -> None:
        self.modules = [how(module) for module in self.modules]

    @rule(threads=st.sampled_from([1, 2]))
    def change_threads(self, threads: int) -> None:
        torch.set_num_threads(threads)

    @invariant()
    def twins_are_alike(self) -> None:
        if hasattr(self, "modules"):
            assert differing(*map(snapshot, self.modules)) == []

    def _alike(self, call: Any) -> None:
        """Runs a call on both modules: both give the same bits or raise the same error."""
        with default_dtype(self.dtype):
            one, other = (_outcome(call, module) for module in self.modules)
        assert type(one) is type(other), (one, other)
        if isinstance(one, Exception):
            assert str(one) == str(other)
            return
        assert differing(one, other) == []


def _outcome(call: Any, module: EmbeddingCollection) -> Any:
    try:
        return call(module)
    except (IndexError, ValueError, RuntimeError) as error:
        return error


def _batch(case: Case, seed: int) -> Any:
    return draw_batch(WITH_ROWS, case, seed)


def _results(module: EmbeddingCollection, batch: Any) -> dict[str, Tensor]:
    return module.forward_dict(*batch)


def _loss(results: dict[str, Tensor]) -> Tensor:
    """A different gradient for each column and row, the same for both modules."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in results.values():
        slope = torch.linspace(-1, 1, max(tensor.numel(), 1), dtype=torch.float64)[: tensor.numel()]
        total = total + (tensor.double() * slope.view(tensor.shape)).sum()
    return total


def _trained(module: EmbeddingCollection, case: Case, seed: int, passes: int = 1) -> dict[str, Tensor]:
    values, offsets, weights = _batch(case, seed)
    weights = None if weights is None else weights.requires_grad_()
    results = _results(module, (values, offsets, weights))
    loss = _loss(results)
    if not loss.requires_grad:
        return results
    for number in range(passes):
        loss.backward(retain_graph=number + 1 < passes)
        if module.weight("a").isnan().any():
            break
    if weights is not None and weights.grad is not None:
        results["gradient"] = weights.grad
    return {name: tensor.detach() for name, tensor in results.items()}


def _queried(module: EmbeddingCollection, case: Case, seed: int, how: str) -> dict[str, Tensor]:
    """The gradient of a parameter that the per-sample weights depend on, and of nothing else."""
    values, offsets, weights = _batch(case, seed)
    if weights is None:
        return _results(module, (values, offsets, None))
    scale = torch.ones((), dtype=torch.float32, requires_grad=True)
    loss = _loss(_results(module, (values, offsets, weights * scale)))
    if how == "grad":
        (found,) = torch.autograd.grad(loss, [scale])
    else:
        loss.backward(inputs=[scale])
        assert scale.grad is not None
        found = scale.grad
    return {"gradient": found}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Another default dtype within the block."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


@pytest.fixture(autouse=True)
def _usual_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def _settings(examples: int, *, anew: bool) -> settings:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(
        max_examples=examples, stateful_step_count=12, derandomize=not anew, deadline=None, suppress_health_check=checks
    )


def test_a_short_program_keeps_twins_alike() -> None:
    run_state_machine_as_test(Twins, settings=_settings(8, anew=False))  # type: ignore[no-untyped-call]


@pytest.mark.soak
def test_programs_keep_twins_alike() -> None:
    end = time.monotonic() + MINUTES * 60
    while time.monotonic() < end:
        run_state_machine_as_test(Twins, settings=_settings(50, anew=True))  # type: ignore[no-untyped-call]
