"""A module that trains on an emulated device: from torch's own autograd to the driver, to the bits of the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import embforge as ef
from embforge import id_resolution, lookups
from embforge.verify.cases import Case, draw_batch
from emulated_driver import control
from emulated_driver.trained import SPEC

OPTIMIZER = ef.optim.RowwiseAdam(lr=0.1)


def trained(device: str, optimizer: Any = OPTIMIZER) -> ef.EmbeddingCollection:
    """A module with the same numbers on any device. On the CPU the reference trains it."""
    torch.manual_seed(3)
    made = ef.EmbeddingCollection(SPEC, "cpu", "reference", optimizer=optimizer)
    if device == "cpu":
        return made
    there = ef.EmbeddingCollection(SPEC, device, optimizer=optimizer)
    there.load_state_dict(made.state_dict())
    return there


def train(module: ef.EmbeddingCollection, seed: int) -> list[Tensor]:
    """One step on a batch; its results, and the gradient of its weights."""
    values, offsets, weights = draw_batch(SPEC, Case(6), seed, module.device)
    assert weights is not None
    weights.requires_grad_()
    results = list(module.forward_dict(values, offsets, weights).values())
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(result.shape, generator=generator).to(module.device) for result in results]
    torch.autograd.backward(results, gradients)
    assert weights.grad is not None
    return [x.detach().cpu() for x in (*results, weights.grad)]


def host_state(module: ef.EmbeddingCollection) -> dict[str, Any]:
    return {name: tensor.cpu() for name, tensor in module.state_dict().items()}


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        assert torch.equal(found[name], want), name


@pytest.fixture(params=["plain", "operator"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How a call is made: as in plain eager code, or through the operator, as if a part of torch must see it."""
    if request.param == "operator":
        for module in (lookups, id_resolution):
            monkeypatch.setattr(module, "must_dispatch", lambda values: True)


@pytest.mark.usefixtures("way")
def test_a_backward_pass_trains_the_rows() -> None:
    there, here = trained("cuda"), trained("cpu")
    for seed in range(3):
        for got, want in zip(train(there, seed), train(here, seed), strict=True):
            assert torch.equal(got, want)
    found = host_state(there)
    assert int(found["optim.step"]) == 3
    assert_equal(found, host_state(here))
    there.check()


@pytest.mark.usefixtures("way")
def test_two_calls_in_one_graph_are_two_updates() -> None:
    modules = trained("cuda"), trained("cpu")
    for module in modules:
        given = [draw_batch(SPEC, Case(4), seed, module.device) for seed in (0, 1)]
        one, other = [module.forward_dict(*each) for each in given]
        loss = (one["sum"] * other["sum"]).sum() + one["rows"].sum() + other["rows"].square().sum()
        loss.backward()
    there, here = map(host_state, modules)
    assert int(there["optim.step"]) == 2
    assert_equal(there, here)


def test_a_bad_id_is_raised_by_check_of_the_module() -> None:
    there = trained("cuda")
    train(there, 0)
    before = host_state(there)
    values, offsets, weights = draw_batch(SPEC, Case(6, "one"), 0, there.device)
    values[8] = 99
    out = there.forward_dict(values, offsets, weights)["sum"]
    out.backward(out.detach())
    with pytest.raises(IndexError, match="feature 'mean': id 99 of sample 2"):
        there.check()
    with pytest.raises(IndexError, match="feature 'mean': id 99"):
        there.check()  # the kernels of the backward have found it, too
    there.check()
    assert_equal(host_state(there), before)


@pytest.mark.usefixtures("way")
def test_an_update_by_two_rules_is_whole_or_none() -> None:
    """Also an update that raises the error of an earlier batch, and its repetition."""
    rules = {"b": OPTIMIZER, "a": ef.optim.SGD(lr=0.3)}
    there, here = trained("cuda", rules), trained("cpu", rules)
    for module in (there, here):
        train(module, 0)
    before = host_state(there)
    assert_equal(before, host_state(here))
    values, offsets, weights = draw_batch(SPEC, Case(6, "one"), 0, there.device)
    out = there.forward_dict(values, offsets, weights)["sum"]
    values.data[8] = 99
    out.backward(out.detach())
    control.finish()
    assert_equal(host_state(there), before)
    with pytest.raises(IndexError, match="feature 'mean': id 99 of sample 2"):
        train(there, 1)
    assert_equal(host_state(there), before)
    for module in (there, here):
        train(module, 1)
    there.check()
    assert_equal(host_state(there), host_state(here))
