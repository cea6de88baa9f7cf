"""The default dtype and the default device belong to the user: results do not depend on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from backends import available
from conformance.test_bits import WIDE, check
from conformance.test_training_bits import OPTIMIZERS, TURNS, assert_same_bits, spec_of
from conformance.training import ONE, draw, snapshot, trained
from torch import Tensor

import embforge as ef
from embforge.verify.cases import Case
from embforge.verify.training_run import training_run

STEPS = 10
"""The cases of training; each test runs every case once."""


@contextmanager
def default(name: str) -> Iterator[None]:
    """torch's default dtype, or with "meta" its default device, in the block."""
    if name == "meta":
        with torch.device("meta"):
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


defaults = pytest.mark.parametrize("name", ["bfloat16", "float64", "meta"])


@defaults
@pytest.mark.parametrize("backend", available())
def test_lookups_do_not_depend_on_defaults(backend: str, name: str) -> None:
    with default(name):
        check(WIDE, backend, Case(40, "edges", bad_ids=True, weights="special"), 11, special=True)


@defaults
@pytest.mark.parametrize(("rule", "more"), [("adam", {}), ("adam", {"accumulate": True}), (None, {})])
def test_training_does_not_depend_on_defaults(rule: str | None, more: dict[str, Any], name: str) -> None:
    """Also gradients of per-sample weights, whose buffer once was as wide as the default dtype."""
    spec, optimizer = spec_of(TURNS[rule or "adam"]), OPTIMIZERS[rule] if rule else None
    want = training_run(spec, optimizer, "reference", steps=STEPS, **more)
    for backend in ("reference", "cpu"):
        with default(name):
            assert_same_bits(training_run(spec, optimizer, backend, steps=STEPS, **more), want)


def _clipped_step() -> dict[str, Tensor]:
    module = trained("reference", accumulate=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    module.use_grad_scaler(scaler)
    for seed in range(2):
        scaler.scale(module(*draw(seed=seed)).sum()).backward()
    norm = module.clip_grad_norm_(0.5)
    assert module.optimizer is not None
    scaler.step(module.optimizer)
    assert module.clip_grad_norm_(0.5).dtype == norm.dtype == torch.float32
    return {**snapshot(module), "norm": norm}


@defaults
def test_accumulated_gradients_under_a_scaler_do_not_depend_on_defaults(name: str) -> None:
    want = _clipped_step()
    with default(name):
        got = _clipped_step()
    assert all(torch.equal(got[key], want[key]) for key in want)


def _bags() -> list[Tensor]:
    weight = torch.arange(24, dtype=torch.float32, device="cpu").view(6, 4).requires_grad_()
    factors = torch.full((5,), 0.5, dtype=torch.float32, device="cpu").requires_grad_()
    ids = torch.tensor([0, 5, 2, 2, 1], dtype=torch.int64, device="cpu")
    borders = torch.tensor([0, 3], dtype=torch.int64, device="cpu")
    found = ef.functional.embedding_bag(ids, weight, borders, mode="sum", per_sample_weights=factors)
    found.backward(torch.ones_like(found))
    assert weight.grad is not None and factors.grad is not None
    padded = ef.functional.embedding_bag(ids.view(1, 5), weight.detach())
    return [found.detach(), weight.grad, factors.grad, padded, ef.functional.embedding(ids, weight.detach())]


@defaults
def test_functions_do_not_depend_on_defaults(name: str) -> None:
    want = _bags()
    with default(name):
        got = _bags()
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@defaults
@pytest.mark.parametrize("more", [{}, {"optimizer": ef.optim.Adam(1e-3)}], ids=["sparse", "fused"])
def test_a_module_made_under_defaults_is_the_same(more: dict[str, Any], name: str) -> None:
    with default(name):
        module = ef.EmbeddingCollection(ONE, device="cpu", backend="reference", **more)
    assert module.weight("t").dtype == torch.float32 and module.weight("t").device.type == "cpu"
    assert module.table_memory().states[0].dtype == torch.float32
