"""Every form of ids that is not flat: each means the batch that its flat spelling means."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import embforge as ef
from embforge.inputs import normalise

CPU = torch.device("cpu")
SPEC = ef.CollectionSpec(
    [ef.TableSpec("t", 10, 4)], [ef.FeatureSpec("a", "t", padding_idx=0), ef.FeatureSpec("b", "t", "mean")]
)
A, B = [[1, 2], [], [3]], [[4], [5, 6], [7]]
VALUES, LENGTHS = torch.tensor([1, 2, 3, 4, 5, 6, 7]), torch.tensor([[2, 0, 1], [1, 2, 1]])
PADDED = torch.tensor([[[1, 2], [4, 9]], [[9, 9], [5, 6]], [[3, 9], [7, 9]]])
ONE = torch.tensor([[1, 4], [2, 5], [3, 6]])


def values_lengths(bags: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([i for bag in bags for i in bag]), torch.tensor([len(bag) for bag in bags])


def jagged(bags: list[list[int]]) -> ef.Jagged:
    values, lengths = values_lengths(bags)
    return ef.Jagged(values, lengths=lengths)


@pytest.mark.parametrize(
    "given",
    [
        dict(values=VALUES, lengths=LENGTHS),
        dict(values=PADDED, lengths=LENGTHS),
        dict(values={"b": B, "a": A, "label": None}),
        dict(values={"a": values_lengths(A), "b": values_lengths(B)}),
        dict(
            values={"a": jagged(A), "b": {"values": torch.tensor([4, 5, 6, 7]), "offsets": torch.tensor([0, 1, 3, 4])}}
        ),
        dict(values={"a": (PADDED[:, 0], LENGTHS[0]), "b": (PADDED[:, 1], LENGTHS[1])}),
        dict(values={"a": A, "b": torch.nested.nested_tensor([torch.tensor(bag) for bag in B], layout=torch.jagged)}),
    ],
)
def test_bags_of_many_lengths(given: dict[str, Any]) -> None:
    batch = normalise(SPEC, CPU, **given)
    assert batch.values.tolist() == VALUES.tolist()
    assert batch.offsets.tolist() == [0, 2, 2, 3, 4, 6, 7] and batch.batch == 3


@pytest.mark.parametrize(
    "values", [ONE, ONE[:, :, None], {"a": ONE[:, 0], "b": ONE[:, 1]}, {"a": [1, 2, 3], "b": ONE[:, 1:]}]
)
def test_one_id_per_feature(values: Any) -> None:
    batch = normalise(SPEC, CPU, values)
    assert batch.values.tolist() == [1, 2, 3, 4, 5, 6] and batch.offsets.tolist() == [*range(7)]
    assert batch.rows_per_feature == (3, 3)


def test_padding_ids_are_left_out_of_pools() -> None:
    module = ef.EmbeddingCollection(SPEC, backend="reference")
    padded = torch.tensor([[[1, 0], [4, 5]], [[0, 0], [6, 6]]])
    flat = module(torch.tensor([1, 4, 5, 6, 6]), lengths=torch.tensor([[1, 0], [2, 2]]))
    assert torch.equal(module(padded), flat)


def test_weights_follow_their_ids() -> None:
    batch = normalise(SPEC, CPU, ONE, weights=ONE.float())
    assert batch.weights is not None and torch.equal(batch.weights, batch.values.float())
    batch = normalise(SPEC, CPU, PADDED, lengths=LENGTHS, weights=PADDED.float())
    assert batch.weights is not None and torch.equal(batch.weights, batch.values.float())
    weighted = {"values": VALUES[:3], "lengths": LENGTHS[0], "weights": torch.full((3,), 2.0)}
    batch = normalise(SPEC, CPU, {"a": weighted, "b": B})
    assert batch.weights is not None and batch.weights.tolist() == [2, 2, 2, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("message", "given"),
    [
        (
            r"lengths: shape \(3, 2\).*\[features, batch\] = \[2, B\].*lengths\.t\(\)",
            dict(values=VALUES, lengths=LENGTHS.t()),
        ),
        (r"values: shape \(2, 3\).*\[batch, features\] = \[B, 2\]", dict(values=ONE.t())),
        (r"lengths: do not fit values of shape \(3, 2, 2\).*\[2, 3\]", dict(values=PADDED, lengths=LENGTHS[:, :2])),
        (r"weights: shape \(2, 3\) is not that of values", dict(values=ONE, weights=ONE.t().float())),
        (r"'a' has 3, 'b' has 2", dict(values={"a": A, "b": B[:2]})),
        (r"feature 'a': values has 7 ids, lengths cover 3", dict(values={"a": (VALUES, LENGTHS[0]), "b": B})),
        (r"feature 'a': shape \(3, 2, 2\)", dict(values={"a": PADDED, "b": B})),
        (r"feature 'a': got the keys values", dict(values={"a": {"values": VALUES}, "b": B})),
        (r"feature 'a': lengths of 2 for values \(3, 2\)", dict(values={"a": (PADDED[:, 0], LENGTHS[0, :2]), "b": B})),
    ],
)
def test_mistakes(message: str, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        normalise(SPEC, CPU, **given)


def test_a_length_past_the_padded_bag_is_refused() -> None:
    module = ef.EmbeddingCollection(SPEC, backend="reference")
    with pytest.raises(ValueError, match="values has 7 ids, offsets end at 8"):
        module(PADDED, lengths=LENGTHS + torch.tensor([[1, 0, 0], [0, 0, 0]]))


def test_padded_ids_compile_without_a_break() -> None:
    module = ef.EmbeddingCollection(SPEC, backend="reference").requires_grad_(False)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(PADDED), module(PADDED)) and torch.equal(compiled(ONE), module(ONE))
