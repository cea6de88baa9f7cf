"""What training calls keep from call to call, and when they read it again."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import embforge as ef
from embforge.training import trainable_collection

SPEC = ef.CollectionSpec(
    (ef.TableSpec("a", 5, 4), ef.TableSpec("b", 6, 4)), (ef.FeatureSpec("x", "a"), ef.FeatureSpec("y", "b"))
)
VALUES, OFFSETS = torch.tensor([1, 2, 3, 4]), torch.arange(5)


def test_tables_are_looked_at_once_and_again_when_they_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def check(layout: object, tables: list[Tensor]) -> None:
        looks.append(len(tables))

    monkeypatch.setattr(trainable_collection, "check_tables", check)
    module = ef.EmbeddingCollection(SPEC, backend="reference", optimizer=ef.optim.SGD(lr=0.5))
    for _ in range(3):
        module(VALUES, OFFSETS).sum().backward()
    assert len(looks) == 1
    module.freeze("a")
    module(VALUES, OFFSETS).sum().backward()
    assert len(looks) == 2
    module.load_state_dict(module.state_dict(), assign=True)
    module(VALUES, OFFSETS).sum().backward()
    assert len(looks) == 3


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_replaced_parameters_are_read_and_trained(backend: Literal["reference", "cpu"]) -> None:
    module = ef.EmbeddingCollection(SPEC, backend=backend)
    module(VALUES, OFFSETS).sum().backward()
    rows = torch.arange(20, dtype=torch.float32).reshape(5, 4)
    module.tables.a.weight = nn.Parameter(rows)
    result = module(VALUES, OFFSETS)
    assert result[:, :4].equal(rows[1:3])
    result.sum().backward()
    assert module.weight("a").grad.to_dense().sum() == 8
    module.tables.a.weight.data = rows + 1
    assert module(VALUES, OFFSETS)[:, :4].equal(rows[1:3] + 1)
    module.tables.a.weight = nn.Parameter(torch.zeros(10, 8)[::2, ::2])
    with pytest.raises(ValueError, match=r"table .a.: .* copy into module\.weight"):
        module(VALUES, OFFSETS)


@pytest.mark.parametrize("optimizer", [ef.optim.SGD(lr=0.5), None])
def test_rows_that_move_after_the_first_call_are_read_where_they_are(optimizer: object) -> None:
    """Sharing memory with another process moves rows without making a new tensor."""
    module = ef.EmbeddingCollection(SPEC, backend="cpu", optimizer=optimizer)
    first = module(VALUES, OFFSETS).detach()
    old = module.weight("a").data_ptr()
    module.weight("a").share_memory_()
    module.weight("a").data.mul_(2)
    assert module.weight("a").data_ptr() != old
    second = module(VALUES, OFFSETS)
    assert second[:, :4].equal(2 * first[:, :4]) and second[:, 4:].equal(first[:, 4:])
    second.sum().backward()


def test_rows_that_move_before_a_later_backward_are_trained_where_they_are() -> None:
    """They are not where the previous backward of this module found them."""
    module, twin = (ef.EmbeddingCollection(SPEC, backend="cpu", optimizer=ef.optim.SGD(lr=0.5)) for _ in range(2))
    twin.load_state_dict(module.state_dict())
    for each in (module, twin):
        each(VALUES, OFFSETS).sum().backward()
    result = module(VALUES, OFFSETS)
    weight = module.weight("a")
    old = weight.data
    weight.data, before = old.clone(), old.clone()
    result.sum().backward()
    twin(VALUES, OFFSETS).sum().backward()
    assert torch.equal(weight, twin.weight("a")) and torch.equal(old, before)


def test_frozen_between_calls_and_between_forward_and_backward() -> None:
    module = ef.EmbeddingCollection(SPEC, backend="reference", optimizer=ef.optim.SGD(lr=0.5))
    module(VALUES, OFFSETS).sum().backward()
    module.freeze("a")
    before = {name: module.weight(name).clone() for name in ("a", "b")}
    module(VALUES, OFFSETS).sum().backward()
    assert module.weight("a").equal(before["a"]) and not module.weight("b").equal(before["b"])
    module.unfreeze()
    result = module(VALUES, OFFSETS)
    module.freeze("b")
    before = {name: module.weight(name).clone() for name in ("a", "b")}
    result.sum().backward()
    assert module.weight("b").equal(before["b"]) and not module.weight("a").equal(before["a"])
