"""A module pickled whole by another version is refused when it is loaded, not in its first call."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import embforge as ef
from embforge import pickle_layout

SPEC = ef.CollectionSpec(
    [ef.TableSpec("t", 9, 4), ef.TableSpec("r", 9, 4, remap=12)], [ef.FeatureSpec("f", "t"), ef.FeatureSpec("g", "r")]
)
SENTENCE = r"pickled by another version of embforge.*save module.state_dict\(\)"
NAMES = {
    "EmbeddingCollection": (
        "_batch_size _bounds_check _cached_memory _exported _facade _fused _has_sequence _ready _requested_params "
        "_resolve backend chosen kernels layout programs spec trainer"
    ),
    "StaticTable": "_has_rule block initial layout section trainable",
    "Remap": "_known table",
    "Trainer": "accumulate groups numbers scaler waiting",
    "Numbers": "_names _seed _values counters hyper",
}
"""By class: the attributes that are pickled in layout 1, without those of nn.Module."""


def module(optimizer: Any = None) -> ef.EmbeddingCollection:
    return ef.EmbeddingCollection(SPEC, backend="reference", optimizer=optimizer, remap={"r": [0, 1, -1] * 4})


def pickled_parts(of: ef.EmbeddingCollection) -> Iterator[Any]:
    """The objects of a trained module that decide themselves what is pickled of them."""
    numbers = of.trainer.numbers
    yield from (part for part in (of, of.named_tables()["t"], numbers) if part is not None)


@pytest.mark.parametrize("optimizer", [None, ef.optim.Adam(lr=0.1)], ids=["parameters", "fused"])
@pytest.mark.parametrize("layout", [0, 2, None])
def test_a_pickle_of_another_layout_is_refused(optimizer: Any, layout: Any) -> None:
    made = module(optimizer)
    with mock.patch.object(pickle_layout, "LAYOUT", layout):
        text, stream = pickle.dumps(made), io.BytesIO()
        torch.save(made, stream)
    with pytest.raises(pickle.UnpicklingError, match=SENTENCE):
        pickle.loads(text)
    stream.seek(0)
    with pytest.raises(pickle.UnpicklingError, match=SENTENCE):
        torch.load(stream, weights_only=False)


def test_every_part_refuses_a_state_without_layout() -> None:
    """Pickles of earlier versions have no number. Unpickling sets the state of parts before that of the whole."""
    made = module(ef.optim.Adam(lr=0.1))
    for part in pickled_parts(made):
        state = part.__getstate__()
        twin = type(part).__new__(type(part))
        with pytest.raises(pickle.UnpicklingError, match=SENTENCE):
            twin.__setstate__({name: value for name, value in state.items() if name != "pickle_layout"})
        assert not vars(twin), "nothing is set"
    assert made.optimizer is not None
    optimizer = copy.copy(made.optimizer)
    with pytest.raises(pickle.UnpicklingError, match=SENTENCE):
        optimizer.__setstate__({"added": []})


def test_copies_and_pickles_of_this_layout_load() -> None:
    made = module(ef.optim.Adam(lr=0.1))
    values, offsets = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2, 3, 4])
    for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(twin(values, offsets), made(values, offsets))
        assert "pickle_layout" not in vars(twin), "it is a fact of the pickle"


def test_the_layout_counts_the_versions_of_pickled_names() -> None:
    """If this fails, add 1 to `pickle_layout.LAYOUT`, and record the names and the number here."""
    made = module(ef.optim.Adam(lr=0.1))
    table = made.named_tables()["r"]
    parts = [made, table, table.remap, made.trainer, made.trainer.numbers]
    common = {*vars(nn.Module()), "pickle_layout"}
    found = {}
    for part in parts:
        state = part.__getstate__() if hasattr(type(part), "__getstate__") else vars(part)  # type: ignore[union-attr]
        found[type(part).__name__] = " ".join(sorted(name for name in state if name not in common))
    assert (pickle_layout.LAYOUT, found) == (1, NAMES)
