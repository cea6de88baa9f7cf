"""Tensors that torch negates lazily (`Tensor.is_neg`): code that reads their memory by pointer reads other numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance.training import ONE, differing, draw, snapshot, trained
from torch import Tensor

from embforge import functional


def negated(tensor: Tensor) -> Tensor:
    """A tensor of the same numbers whose memory holds their negatives."""
    return torch._neg_view(-tensor.detach())


def imaginary(tensor: Tensor) -> Tensor:
    """A negated tensor as users get one: the imaginary part of a conjugate."""
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


@pytest.mark.parametrize("which", [0, 1, 2])
def test_negated_batches_are_read_right(which: int) -> None:
    module, twin = trained("cpu"), trained("cpu")
    batch = draw()
    odd = [negated(each) if place == which else each for place, each in enumerate(batch)]
    assert odd[which].is_neg()
    with torch.no_grad():
        assert torch.equal(module(*odd), module(*batch))
    assert torch.equal(twin(*odd), module(*batch))
    twin(*odd).sum().backward()
    module(*batch).sum().backward()
    assert differing(snapshot(module), snapshot(twin)) == []


@pytest.mark.parametrize("make", [negated, imaginary])
def test_negated_gradients_are_read_right(make: Any) -> None:
    module, twin = trained("cpu"), trained("cpu")
    values, offsets, weights = draw()
    given = make(weights).requires_grad_()
    plain = weights.clone().requires_grad_()
    assert given.is_neg()
    for each, factors in ((module, plain), (twin, given)):
        found = each(values, offsets, factors)
        gradient = torch.linspace(-1, 1, found.numel()).view(found.shape)
        found.backward(gradient if each is module else negated(gradient))
    assert plain.grad is not None and given.grad is not None
    assert torch.equal(plain.grad, given.grad) and differing(snapshot(module), snapshot(twin)) == []


def test_functions_read_negated_tensors_right() -> None:
    torch.manual_seed(0)
    weight, scale = torch.rand(9, 4), torch.rand(9)
    ids, borders, factors = torch.tensor([3, 8, 0]), torch.tensor([0, 2]), torch.rand(3)
    coded = torch.arange(36, dtype=torch.int8).view(9, 4)
    bags: Any = {"mode": "sum", "per_sample_weights": factors}
    expected = functional.embedding_bag(ids, weight, borders, **bags)
    for at, change in enumerate((ids, weight, borders, factors)):
        given = [negated(each) if place == at else each for place, each in enumerate((ids, weight, borders, factors))]
        assert given[at].is_neg() and given[at].shape == change.shape
        found = functional.embedding_bag(*given[:3], mode="sum", per_sample_weights=given[3])
        torch.testing.assert_close(found, expected)
    found = functional.embedding(ids, negated(weight))
    assert torch.equal(found, weight[ids]) and torch.equal(functional.embedding(negated(ids), weight), weight[ids])
    scaled = functional.embedding(ids, coded, per_token_scale=scale)
    assert torch.equal(functional.embedding(ids, coded, per_token_scale=negated(scale)), scaled)
    trained_weight = weight.clone().requires_grad_()
    functional.embedding_bag(ids, trained_weight, borders, **bags).backward(negated(expected))
    other = weight.clone().requires_grad_()
    functional.embedding_bag(ids, other, borders, **bags).backward(expected)
    assert trained_weight.grad is not None and other.grad is not None and torch.equal(trained_weight.grad, other.grad)


def test_a_table_that_is_negated_or_has_other_rows_is_refused() -> None:
    """If a table of other rows were allowed, ids would be checked against rows that do not exist."""
    module = trained("cpu", spec=ONE, optimizer=None)
    batch = torch.arange(9), torch.tensor([0, 4, 9])
    rows = module.weight("t")
    for wrong in (torch.rand(10, 5), torch.rand(8, 5), negated(torch.rand(9, 5))):
        padded = rows.detach().new_empty(len(wrong), rows.stride(0))[:, :5].copy_(wrong)
        stand_in = torch._neg_view(padded) if wrong.is_neg() else padded
        module.tables.t.weight = torch.nn.Parameter(stand_in)
        for call in (lambda: module(*batch), torch.no_grad()(lambda: module(*batch))):
            with pytest.raises(ValueError, match=r"table 't': .* its kernel needs torch.float32 \(9, 5\)"):
                call()
    module.tables.t.weight = torch.nn.Parameter(torch.empty_like(rows).copy_(rows))
    module(*batch).sum().backward()
