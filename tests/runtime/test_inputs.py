"""Every form of input that a call takes, and every mistake, whose error names the argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.inputs import Batch, normalise, raise_bad_input
from embforge.jagged import Jagged

CPU = torch.device("cpu")
META = torch.device("meta")
SPEC = CollectionSpec(
    [TableSpec("small", 10, 4), TableSpec("large", 1000, 4)],
    [FeatureSpec("a", "small"), FeatureSpec("b", "large", "concat", hotness=2)],
)
VALUES = torch.tensor([1, 2, 3, 400, 500])
LENGTHS = torch.tensor([1, 2, 0, 2])
OFFSETS = torch.tensor([0, 1, 3, 3, 5])
WEIGHTS = torch.arange(5.0)
WEIGHTED = Jagged(VALUES, OFFSETS, weights=WEIGHTS)


def same(batch: Batch, values: Tensor = VALUES, offsets: Tensor = OFFSETS, weights: Tensor | None = None) -> bool:
    assert batch.values.is_contiguous() and batch.offsets.is_contiguous()
    assert batch.values.dtype == batch.offsets.dtype
    assert batch.batch == (offsets.numel() - 1) // 2
    assert (batch.weights is None) == (weights is None)
    if weights is not None and batch.weights is not None:
        assert batch.weights.is_contiguous() and torch.equal(batch.weights, weights)
    return torch.equal(batch.values.long(), values) and torch.equal(batch.offsets.long(), offsets)


class Keyed:
    """The methods of TorchRec's KeyedJaggedTensor that are used."""

    def __init__(self, keys: list[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> None:
        self._all = keys, values, lengths, weights

    def keys(self) -> list[str]:
        return self._all[0]

    def values(self) -> Tensor:
        return self._all[1]

    def lengths(self) -> Tensor:
        return self._all[2]

    def offsets(self) -> Tensor:
        return torch.nn.functional.pad(self._all[2].cumsum(0), (1, 0))

    def weights_or_none(self) -> Tensor | None:
        return self._all[3]


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("values", [VALUES, VALUES.int(), VALUES.repeat_interleave(2)[::2]])
@pytest.mark.parametrize("offsets", [OFFSETS, OFFSETS.int(), OFFSETS.repeat_interleave(2)[::2]])
def test_ids_and_offsets_may_have_either_int_dtype(values: Tensor, offsets: Tensor, weights: Tensor | None) -> None:
    batch = normalise(SPEC, CPU, values, offsets, weights)
    assert same(batch, weights=weights)
    assert batch.values.dtype == values.dtype


def test_tensors_that_fit_are_not_copied() -> None:
    batch = normalise(SPEC, CPU, VALUES, OFFSETS, WEIGHTS)
    assert batch.values is VALUES and batch.offsets is OFFSETS and batch.weights is WEIGHTS


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_become_offsets(dtype: torch.dtype) -> None:
    assert same(normalise(SPEC, CPU, VALUES, lengths=LENGTHS.to(dtype)))
    assert same(normalise(SPEC, CPU, VALUES.int(), lengths=LENGTHS.to(dtype), weights=WEIGHTS), weights=WEIGHTS)


def test_strided_weights_become_contiguous() -> None:
    assert same(normalise(SPEC, CPU, VALUES, OFFSETS, WEIGHTS.repeat_interleave(2)[::2]), weights=WEIGHTS)


def test_empty_batches_are_allowed() -> None:
    none = torch.empty(0, dtype=torch.int64)
    assert normalise(SPEC, CPU, none, torch.zeros(1, dtype=torch.int64)).batch == 0
    assert normalise(SPEC, CPU, none, lengths=none).batch == 0
    assert normalise(SPEC, CPU, none, lengths=torch.zeros(6, dtype=torch.int64)).batch == 3


def test_an_offset_past_int32_stays_wrong_with_int32_ids() -> None:
    offsets = OFFSETS.clone()
    offsets[-1] += 2**32
    batch = normalise(SPEC, CPU, VALUES.int(), offsets)
    with pytest.raises(ValueError, match="offsets end at"):
        raise_bad_input(SPEC, *batch[:4], "error")


def test_a_jagged_is_a_batch() -> None:
    assert same(normalise(SPEC, CPU, Jagged(VALUES, OFFSETS)))
    assert same(normalise(SPEC, CPU, Jagged(VALUES, lengths=LENGTHS, weights=WEIGHTS)), weights=WEIGHTS)
    assert same(normalise(SPEC, CPU, Jagged(VALUES, OFFSETS), weights=WEIGHTS), weights=WEIGHTS)
    assert normalise(SPEC, CPU, Jagged(VALUES, OFFSETS, rows_per_feature=(3, 2))).rows_per_feature == (3, 2)


@pytest.mark.parametrize("rows", [(3,), (2, 2), (2, 3), (6, -1)])
def test_jagged_sizes_that_do_not_fit_are_refused(rows: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"rows_per_feature|a Jagged of 1 features"):
        normalise(SPEC, CPU, Jagged(VALUES, OFFSETS, rows_per_feature=rows))


def test_a_nested_jagged_tensor_is_a_batch() -> None:
    nested = torch.nested.nested_tensor_from_jagged(VALUES, OFFSETS)
    assert same(normalise(SPEC, CPU, nested))
    weights = torch.nested.nested_tensor_from_jagged(WEIGHTS, OFFSETS)
    assert same(normalise(SPEC, CPU, nested, weights=weights), weights=WEIGHTS)
    assert same(normalise(SPEC, CPU, nested, weights=WEIGHTS), weights=WEIGHTS)


def test_a_nested_jagged_tensor_may_have_gaps() -> None:
    padded = torch.tensor([[1, 9, 9], [2, 3, 9], [9, 9, 9], [400, 500, 9]])
    nested = torch.nested.narrow(padded, 1, torch.zeros(4, dtype=torch.int64), LENGTHS, layout=torch.jagged)
    assert same(normalise(SPEC, CPU, nested))


def test_a_nested_tensor_of_the_old_layout_is_refused() -> None:
    nested = torch.nested.nested_tensor([torch.tensor([1]), torch.tensor([2, 3])])
    with pytest.raises(TypeError, match=r"values.*torch\.jagged"):
        normalise(SPEC, CPU, nested)


def test_a_keyed_jagged_tensor_is_a_batch() -> None:
    assert same(normalise(SPEC, CPU, Keyed(["a", "b"], VALUES, LENGTHS)))
    assert same(normalise(SPEC, CPU, Keyed(["a", "b"], VALUES, LENGTHS.int(), WEIGHTS)), weights=WEIGHTS)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_keyed_jagged_tensor_is_put_into_feature_order(weights: Tensor | None) -> None:
    """Keys are b, spare, a: first b's ids, then one spare id per sample, then a's ids."""
    values = torch.cat([VALUES[3:], torch.tensor([77, 78]), VALUES[:3]])
    lengths = torch.tensor([0, 2, 1, 1, 1, 2])
    moved = None if weights is None else torch.cat([weights[3:], torch.zeros(2), weights[:3]])
    batch = normalise(SPEC, CPU, Keyed(["b", "spare", "a"], values, lengths, moved))
    assert same(batch, weights=weights)
    assert batch.rows_per_feature == (3, 2)


@pytest.mark.parametrize(
    ("keyed", "message"),
    [
        (Keyed(["a", "c"], VALUES, LENGTHS), "no key for feature 'b'.*a, c"),
        (Keyed(["b", "a"], VALUES[:4], LENGTHS), "values has 4 ids.*5"),
        (Keyed(["a", "b"], VALUES, LENGTHS[:3]), "lengths.*2 keys"),
    ],
)
def test_bad_keyed_jagged_tensors_are_refused(keyed: Keyed, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        normalise(SPEC, CPU, keyed)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, r"values: dtype torch\.float32.*torch\.int32, torch\.int64", dict(values=VALUES.float())),
        (TypeError, r"values: dtype torch\.uint8", dict(values=VALUES.byte())),
        (TypeError, r"values: got list", dict(values=[1, 2])),
        (ValueError, r"values: no key for feature 'b'; its keys: a", dict(values={"a": VALUES}, offsets=None)),
        (TypeError, r"offsets: dtype torch\.float32", dict(offsets=OFFSETS.float())),
        (TypeError, r"offsets: got list", dict(offsets=[0, 1, 2])),
        (TypeError, r"lengths: dtype torch\.bool", dict(offsets=None, lengths=LENGTHS.bool())),
        (TypeError, r"weights: dtype torch\.float64.*torch\.float32", dict(weights=WEIGHTS.double())),
        (TypeError, r"weights: dtype torch\.float16", dict(weights=WEIGHTS.half())),
        (TypeError, r"weights: got int", dict(weights=3)),
        (ValueError, r"values: shape \(1, 5\).*1-D", dict(values=VALUES[None])),
        (ValueError, r"offsets: shape \(5, 1\).*1-D", dict(offsets=OFFSETS[:, None])),
        (ValueError, r"weights: shape \(5, 1\).*1-D", dict(weights=WEIGHTS[:, None])),
        (ValueError, r"weights: 4 numbers for 5 ids", dict(weights=WEIGHTS[:4])),
        (ValueError, r"weights: 6 numbers for 5 ids", dict(weights=torch.ones(6))),
        (ValueError, r"offsets: length 4 .*2 features.*2 \* batch \+ 1", dict(offsets=OFFSETS[:4])),
        (ValueError, r"offsets: length 0 .*2 features", dict(offsets=OFFSETS[:0])),
        (ValueError, r"lengths: length 3 .*2 features.*2 \* batch", dict(offsets=None, lengths=LENGTHS[:3])),
        (ValueError, r"offsets, lengths: neither", dict(offsets=None)),
        (ValueError, r"offsets, lengths: both", dict(lengths=LENGTHS)),
        (ValueError, r"values: is on meta.*cpu", dict(values=VALUES.to(META))),
        (ValueError, r"offsets: is on meta.*cpu", dict(offsets=OFFSETS.to(META))),
        (ValueError, r"weights: is on meta.*cpu", dict(weights=WEIGHTS.to(META))),
        (ValueError, r"lengths: is on meta.*cpu", dict(offsets=None, lengths=LENGTHS.to(META))),
        (ValueError, r"offsets: passed together with a Jagged", dict(values=Jagged(VALUES, OFFSETS))),
        (
            ValueError,
            r"lengths: passed together with a Jagged",
            dict(values=Jagged(VALUES, OFFSETS), offsets=None, lengths=LENGTHS),
        ),
        (
            ValueError,
            r"weights: passed together with a Jagged",
            dict(values=Jagged(VALUES, OFFSETS, weights=WEIGHTS), offsets=None, weights=WEIGHTS),
        ),
        (
            ValueError,
            r"weights: passed together with a Keyed",
            dict(values=Keyed(["a", "b"], VALUES, LENGTHS), offsets=None, weights=WEIGHTS),
        ),
    ],
)
def test_wrong_batches_are_refused(error: type[Exception], message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        normalise(SPEC, CPU, **dict(values=VALUES, offsets=OFFSETS) | arguments)


def test_one_feature_refuses_empty_offsets() -> None:
    spec = CollectionSpec([TableSpec("t", 10, 4)], [FeatureSpec("a", "t")])
    with pytest.raises(ValueError, match="offsets: length 0"):
        normalise(spec, CPU, VALUES, OFFSETS[:0])


def test_tables_on_another_device_are_refused() -> None:
    with pytest.raises(ValueError, match="values: is on cpu, the tables are on meta"):
        normalise(SPEC, META, VALUES, OFFSETS)
    assert normalise(SPEC, META, VALUES.to(META), OFFSETS.to(META), WEIGHTS.to(META)).batch == 2
    assert normalise(SPEC, torch.device("cpu", 0), VALUES, OFFSETS).batch == 2


def bad(values: list[int], offsets: list[int], bounds_check: str = "error", weights: Tensor | None = None) -> None:
    raise_bad_input(SPEC, torch.tensor(values), torch.tensor(offsets), weights, (len(offsets) - 1) // 2, bounds_check)


def test_good_input_passes() -> None:
    bad(VALUES.tolist(), OFFSETS.tolist(), weights=WEIGHTS)
    bad([], [0])
    bad([], [0, 0, 0])


@pytest.mark.parametrize("bounds_check", ["error", "zero", "unchecked"])
@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 1, 3, 3, 5], r"offsets\[0\] is 1.*start at 0"),
        ([-1, 1, 3, 3, 5], r"offsets\[0\] is -1.*start at 0"),
        ([0, 3, 1, 3, 5], r"offsets\[1\] is 3 and offsets\[2\] is 1"),
        ([0, 1, 3, 6, 5], r"offsets\[3\] is 6 and offsets\[4\] is 5"),
        ([0, 1, 3, 3, 6], r"values has 5 ids, offsets end at 6"),
        ([0, 1, 3, 3, 4], r"values has 5 ids, offsets end at 4"),
        ([0, 1, 3], None),
        ([0, 1, 3, 3], r"offsets: length 4 .*2 features"),
        ([0, 1, 1, 1, 5], r"feature 'b': the bag of sample 1 has 4 ids.*hotness=2"),
        ([0, 1, 1, 4, 5], r"feature 'b': the bag of sample 0 has 3 ids.*hotness=2"),
    ],
)
def test_bad_offsets_are_named(offsets: list[int], message: str | None, bounds_check: str) -> None:
    values = [1, 2, 3, 4, 99_999]  # the bad id must not be what is reported
    if message is None:
        values, message = values[:2], "values has 2 ids, offsets end at 3"
    with pytest.raises(ValueError, match=message):
        bad(values, offsets, bounds_check)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([10, 2, 3, 400, 500], r"feature 'a': id 10 of sample 0, position 0.*table 'small'.*0 to 9 \(10 rows\)"),
        ([1, 2, -1, 400, 500], r"feature 'a': id -1 of sample 1, position 1"),
        ([1, 2, 3, 400, 1000], r"feature 'b': id 1000 of sample 1, position 1.*table 'large'.*1000 rows"),
        ([1, 2, -(2**62), -1, 1000], r"feature 'a': id -4611686018427387904 of sample 1, position 1"),
    ],
)
def test_bad_ids_are_named(values: list[int], message: str) -> None:
    with pytest.raises(IndexError, match=message):
        bad(values, OFFSETS.tolist())
    bad(values, OFFSETS.tolist(), "zero")
    bad(values, OFFSETS.tolist(), "unchecked")


def test_weights_of_the_wrong_size_are_refused() -> None:
    with pytest.raises(ValueError, match="weights: 3 numbers for 5 ids"):
        bad(VALUES.tolist(), OFFSETS.tolist(), weights=torch.ones(3))
