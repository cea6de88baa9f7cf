"""Forms of ids that are not flat: each means the same batch as the flat form."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import embforge as ef
from embforge.inputs import normalise

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
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
        dict(values=VALUES.numpy(), lengths=LENGTHS.numpy()),
        dict(values=PADDED.numpy(), lengths=LENGTHS),
        dict(values={"a": (VALUES[:3].numpy(), LENGTHS[0].numpy()), "b": [torch.tensor(bag) for bag in B]}),
        dict(values={"a": {"values": A}, "b": ef.Jagged.from_dict({"b": B})}),
        dict(values=ef.Jagged.from_dict({"a": A, "b": B})),
        dict(values={"a": A, "b": torch.nested.nested_tensor([torch.tensor(bag) for bag in B], layout=torch.jagged)}),
    ],
)
def test_bags_of_any_length_mean_the_same_in_every_form(given: dict[str, Any]) -> None:
    batch = normalise(SPEC, CPU, **given)
    assert batch.values.tolist() == VALUES.tolist()
    assert batch.offsets.tolist() == [0, 2, 2, 3, 4, 6, 7] and batch.batch == 3


@pytest.mark.parametrize(
    "values", [ONE, ONE[:, :, None], {"a": ONE[:, 0], "b": ONE[:, 1]}, {"a": [1, 2, 3], "b": ONE[:, 1:]}]
)
def test_one_id_per_feature_needs_no_bags(values: Any) -> None:
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
    each = {"a": [[1, 2], [], [3]], "b": torch.tensor([4.0, 5, 6, 7])}
    batch = normalise(SPEC, CPU, {"a": A, "b": jagged(B)}, weights=each)
    assert batch.weights is not None and torch.equal(batch.weights, batch.values.float())
    batch = normalise(SPEC, CPU, {"a": ONE[:, :1], "b": {"values": ONE[:, 1], "weights": ONE[:, 1].float()}})
    assert batch.weights is not None and batch.weights.tolist() == [1, 1, 1, 4, 5, 6]
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
        (
            r"feature 'a': got the keys values, lengths, offsets.*at most one of lengths and offsets",
            dict(values={"a": {"values": VALUES[:3], "lengths": LENGTHS[0], "offsets": LENGTHS[0]}, "b": B}),
        ),
        (r"'a' has 7, 'b' has 3", dict(values={"a": {"values": VALUES}, "b": B})),
        (r"a tuple of 3; allowed: \(values, lengths\)", dict(values={"a": (VALUES, LENGTHS[0], None), "b": B})),
        (
            r"feature 'a': weights of shape \(2,\) for ids of shape \(3,\)",  # not one of the next feature's
            dict(values={"a": A, "b": B}, weights={"a": torch.ones(2), "b": torch.ones(5)}),
        ),
        (
            r"feature 'a': weights of shape \(2, 3\) for ids of shape \(3, 2\)",
            dict(values={"a": PADDED[:, 0], "b": B}, weights={"a": torch.ones(2, 3)}),
        ),
        (r"weights: 'c' is no feature; allowed: a, b", dict(values={"a": A, "b": B}, weights={"c": torch.ones(3)})),
        (r"weights: passed together with a dict; pass a mapping", dict(values={"a": A, "b": B}, weights=torch.ones(7))),
        (r"'a' is on cpu, 'b' is on meta", dict(values={"a": ONE[:, 0], "b": ONE[:, 1].to("meta")})),
        (r"feature 'a': a Jagged of 2 features", dict(values={"a": ef.Jagged.from_padded(ONE), "b": B})),
        (r"lengths: from -1 to 2.*allowed: 0 to 2", dict(values=PADDED, lengths=LENGTHS - torch.tensor([0, 1, 0]))),
        (r"feature 'a': lengths of 2 for values \(3, 2\)", dict(values={"a": (PADDED[:, 0], LENGTHS[0, :2]), "b": B})),
    ],
)
def test_wrong_forms_are_refused(message: str, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        normalise(SPEC, CPU, **given)


def test_a_length_past_the_padded_bag_is_refused() -> None:
    module = ef.EmbeddingCollection(SPEC, backend="reference")
    with pytest.raises(ValueError, match="lengths: from 0 to 3, for values with 2 ids per bag; allowed: 0 to 2"):
        module(PADDED, lengths=LENGTHS + torch.tensor([[1, 0, 0], [0, 0, 0]]))


@pytest.mark.parametrize("error", [ValueError, TypeError])
def test_values_that_are_no_batch_are_refused(error: type[Exception]) -> None:
    if error is TypeError:
        for given in ([[1, 4]], "ids"):
            with pytest.raises(TypeError, match="allowed: a tensor or numpy array of ids, a mapping of feature to ids"):
                normalise(SPEC, CPU, given)
        with pytest.raises(TypeError, match=r"feature 'a', sample 0: got \[1\.5\]; allowed: a list of whole numbers"):
            normalise(SPEC, CPU, {"a": [[1.5], [], []], "b": B})
        return
    with pytest.raises(ValueError, match="lengths: passed together with a dict, which has its own"):
        normalise(SPEC, CPU, {"a": A, "b": B}, lengths=LENGTHS)


def test_an_array_that_is_read_only_is_copied(recwarn: pytest.WarningsRecorder) -> None:
    ids = ONE.numpy().copy()
    ids.flags.writeable = False
    assert normalise(SPEC, CPU, ids).values.tolist() == [1, 2, 3, 4, 5, 6] and not recwarn.list


def test_padded_ids_compile_without_a_break() -> None:
    module = ef.EmbeddingCollection(SPEC, backend="reference").requires_grad_(False)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(PADDED), module(PADDED)) and torch.equal(compiled(ONE), module(ONE))
    both = {"a": PADDED[:, 0], "b": ONE[:, 1]}
    assert torch.equal(compiled(both), module(both))
    batch = ef.Jagged.from_padded(PADDED, padding=9)
    assert torch.equal(compiled(batch), module(batch))


def test_a_sharded_module_takes_the_same_forms() -> None:
    plan = ef.sharded.ShardPlan.row_wise(SPEC)
    module = ef.sharded.ShardedEmbeddingCollection(SPEC, plan, optimizer=ef.optim.SGD(lr=0.1), backend="reference")
    with torch.no_grad():
        wanted = module(VALUES, lengths=LENGTHS)
        for given in ({"a": A, "b": B}, ef.Jagged.from_dict({"a": A, "b": B}), ef.Jagged.from_padded(PADDED, LENGTHS)):
            assert torch.equal(module(given), wanted)
        assert torch.equal(module(PADDED, lengths=LENGTHS), wanted)


def test_the_code_of_the_page_runs() -> None:
    """All blocks of docs/inputs.md run as one program, whose lines compare the results that they show."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/inputs.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) > 3
    exec("\n".join(blocks), {})
