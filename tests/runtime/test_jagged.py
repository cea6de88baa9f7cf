"""How a Jagged is made, moved, cut and joined, and what it refuses."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

import embforge as ef
from embforge.jagged import Jagged

VALUES = torch.tensor([1, 2, 3])
OFFSETS = torch.tensor([0, 1, 3])
LENGTHS = torch.tensor([1, 2])
SAMPLES = [[[1, 2], [4]], [[], [5, 6]], [[3], [7]]]
WEIGHTS = [[[10 * i for i in bag] for bag in sample] for sample in SAMPLES]
PADDED = torch.tensor([[[1, 2], [4, 0]], [[0, 0], [5, 6]], [[3, 0], [7, 0]]])


def batch() -> Jagged:
    return Jagged.from_lists(SAMPLES, WEIGHTS)


def samples_of(jagged: Jagged) -> list[list[list[int]]]:
    """The lists that `from_lists` would make it from. Asserts that weights belong to their ids."""
    features = jagged.num_features
    assert features is not None
    if jagged.weights is not None:
        assert torch.equal(jagged.weights, 10.0 * jagged.values)
    lengths = jagged.offsets.diff() if jagged.lengths is None else jagged.lengths
    bags = [bag.tolist() for bag in jagged.values.split(lengths.reshape(-1).tolist())]
    size = len(bags) // features
    return [[bags[f * size + b] for f in range(features)] for b in range(size)]


def test_a_jagged_needs_either_offsets_or_lengths() -> None:
    with pytest.raises(ValueError, match="neither was passed"):
        Jagged(VALUES)
    with pytest.raises(ValueError, match="both were passed"):
        Jagged(VALUES, OFFSETS, LENGTHS)


def test_a_jagged_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Jagged(VALUES, OFFSETS).values = OFFSETS  # type: ignore[misc]


def test_sizes_become_a_tuple_of_ints() -> None:
    assert Jagged(VALUES, lengths=LENGTHS, rows_per_feature=LENGTHS.tolist()).rows_per_feature == (1, 2)


@pytest.mark.parametrize(
    "made",
    [
        lambda: batch(),
        lambda: Jagged.from_lists(
            [[torch.tensor(bag) if b else np.array(bag, dtype=int) for b, bag in enumerate(s)] for s in SAMPLES],
            WEIGHTS,
        ),
        lambda: Jagged.from_padded(PADDED, padding=0, weights=10.0 * PADDED),
        lambda: Jagged.from_padded(PADDED, torch.tensor([[2, 0, 1], [1, 2, 1]]), 10.0 * PADDED),
        lambda: Jagged.from_padded(PADDED.numpy(), np.array([[2, 0, 1], [1, 2, 1]]), np.float32(10) * PADDED.numpy()),
        lambda: Jagged.from_dict({"b": [[4], [5, 6], [7]], "x": 0, "a": [[1, 2], [], 3]}, ["a", "b"]),
    ],
)
def test_a_jagged_is_made_from_lists_padded_ids_and_dicts(made: Any) -> None:
    jagged = made()
    assert samples_of(jagged) == SAMPLES and jagged.num_features == 2 and len(jagged) == 3
    assert jagged.rows_per_feature in (None, (3, 4))


def test_dense_ids_become_bags_of_a_jagged() -> None:
    assert samples_of(Jagged.from_padded(PADDED)) == PADDED.tolist()
    assert samples_of(Jagged.from_padded(PADDED[:, :, 0])) == PADDED[:, :, :1].tolist()
    for empty in (
        Jagged.from_padded(PADDED[:0], padding=0),
        Jagged.from_lists([], num_features=2),
        batch()[:0],
        Jagged.from_padded(PADDED[:, :, :0], padding=0)[3:],
    ):
        assert len(empty) == 0 and empty.num_features == 2 and empty.values.numel() == 0


@pytest.mark.parametrize(
    ("error", "message", "make"),
    [
        (ValueError, r"sample 1 has 1 entries for 2 .*samples\[b\]\[f\]", lambda: Jagged.from_lists([[1, 2], [3]])),
        (ValueError, "num_features=", lambda: Jagged.from_lists([])),
        (TypeError, "sample 0, feature 1: got 1.5", lambda: Jagged.from_lists([[1, 1.5]])),
        (ValueError, r"weights\[b\]\[f\]", lambda: Jagged.from_lists([[1, [2, 3]]], [[1.0, [2.0]]])),
        (ValueError, r"\[batch, features, ids\] or \[batch, features\]", lambda: Jagged.from_padded(VALUES)),
        (ValueError, "both were passed", lambda: Jagged.from_padded(PADDED, LENGTHS, padding=0)),
        (ValueError, r"lengths.*\[features, batch\] = \[2, B\]", lambda: Jagged.from_padded(PADDED, torch.ones(3, 2))),
        (ValueError, "from 3 to 3.*allowed: 0 to 2", lambda: Jagged.from_padded(PADDED, torch.full((2, 3), 3))),
        (ValueError, "no key for feature 'b'", lambda: Jagged.from_dict({"a": VALUES}, ["a", "b"])),
        (ValueError, "2 bags do not fit 3 features", lambda: Jagged(VALUES, OFFSETS, num_features=3)),
        (ValueError, "features says 3, lengths says 1", lambda: Jagged(VALUES, lengths=LENGTHS[None], num_features=3)),
        (ValueError, "pass num_features=", lambda: Jagged(VALUES, OFFSETS)[0]),
        (IndexError, "sample 3 does not exist; allowed: -3 to 2", lambda: batch()[3]),
        (ValueError, "step -1 is not allowed", lambda: batch()[::-1]),
        (TypeError, "index 'a'", lambda: batch()["a"]),
        (ValueError, "2, 1 features", lambda: Jagged.concatenate([batch(), Jagged(VALUES, OFFSETS, num_features=1)])),
        (ValueError, "no batch", lambda: Jagged.concatenate([])),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(error: type[Exception], message: str, make: Any) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("by", ["lengths", "offsets"])
@pytest.mark.parametrize(
    "chosen", [slice(1, 3), slice(None), slice(0, 3, 2), slice(-1, None), slice(2, 1), slice(0, 99)]
)
def test_slices_have_their_samples(chosen: slice, by: str) -> None:
    whole = batch()
    if by == "offsets":
        assert whole.lengths is not None
        borders = torch.tensor([0, *whole.lengths.reshape(-1).cumsum(0).tolist()], dtype=torch.int32)
        whole = Jagged(whole.values, borders, weights=whole.weights, num_features=2)
    assert samples_of(whole[chosen]) == SAMPLES[chosen]


def test_one_index_is_one_sample() -> None:
    whole = batch()
    assert [samples_of(sample) for sample in whole] == [[sample] for sample in SAMPLES]
    assert samples_of(whole[-1]) == SAMPLES[-1:] and whole[-1].rows_per_feature == (1, 1)


def test_batches_are_joined() -> None:
    whole = batch()
    joined = Jagged.concatenate([whole[:1], whole[1:1], whole[1:]])
    assert samples_of(joined) == SAMPLES and joined.rows_per_feature == (3, 4)
    some = Jagged.concatenate([dataclasses.replace(whole[:1], weights=None), whole[1:]])
    assert some.weights is not None and some.weights.tolist() == [1, 1, 30, 1, 50, 60, 70]


def test_a_jagged_goes_through_a_data_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, labels = batch(), torch.arange(3)
    loader = DataLoader([(whole[i], labels[i]) for i in range(3)], batch_size=2, collate_fn=ef.collate)
    found = [(samples_of(ids), label.tolist()) for ids, label in loader]
    assert found == [(SAMPLES[:2], [0, 1]), (SAMPLES[2:], [2])]
    assert samples_of(pickle.loads(pickle.dumps(whole))) == SAMPLES
    pinned: list[Tensor] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor.clone())
    moved = pin_memory({"ids": whole})["ids"]  # type: ignore[no-untyped-call]
    assert moved is not whole and samples_of(moved) == SAMPLES and len(pinned) == 3
    assert not moved.is_pinned()


def test_lists_of_ids_stay_one_list_per_sample() -> None:
    bags = [{"x": [1, 2], "y": [3]}, {"x": [], "y": [4]}]
    assert ef.collate(bags) == {"x": [[1, 2], []], "y": [[3], [4]]}
    first, second = ef.collate([[torch.tensor(1), torch.tensor(2)], [torch.tensor(3), torch.tensor(4)]])
    assert first.tolist() == [1, 3] and second.tolist() == [2, 4]  # as torch joins other lists


def test_a_jagged_moves_to_a_device_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    plain = Tensor.to
    monkeypatch.setattr(Tensor, "to", lambda tensor, *a, **k: asked.append((a, k)) or plain(tensor, *a, **k))
    on_meta = batch().to("meta", non_blocking=True)
    assert asked == [(("meta",), {"non_blocking": True})] * 3
    tensors = (on_meta.values, on_meta.lengths, on_meta.weights)
    assert all(tensor is not None and tensor.is_meta for tensor in tensors)
    assert (on_meta.rows_per_feature, on_meta.num_features) == ((3, 4), 2)


def test_a_module_takes_it_and_no_other_number_of_features() -> None:
    features = [ef.FeatureSpec("a", "t"), ef.FeatureSpec("b", "t", "none")]
    module = ef.EmbeddingCollection(ef.CollectionSpec([ef.TableSpec("t", 9, 4)], features), backend="reference")
    whole = batch()
    for sample in range(3):
        one, all_of_it = module.forward_dict(whole[sample]), module.forward_dict(whole)
        assert torch.equal(one["a"], all_of_it["a"][sample : sample + 1])
    with pytest.raises(ValueError, match="a Jagged of 3 features for the 2 features of the spec"):
        module.forward_dict(Jagged(VALUES, torch.tensor([0, 1, 2, 3, 3, 3, 3]), num_features=3))
