"""Jagged: what it refuses by itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from embforge.jagged import Jagged

VALUES = torch.tensor([1, 2, 3])
OFFSETS = torch.tensor([0, 1, 3])
LENGTHS = torch.tensor([1, 2])


def test_needs_exactly_one_kind_of_borders() -> None:
    with pytest.raises(ValueError, match="neither given"):
        Jagged(VALUES)
    with pytest.raises(ValueError, match="both given"):
        Jagged(VALUES, OFFSETS, LENGTHS)


def test_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Jagged(VALUES, OFFSETS).values = OFFSETS  # type: ignore[misc]


def test_sizes_become_a_tuple_of_ints() -> None:
    assert Jagged(VALUES, lengths=LENGTHS, rows_per_feature=LENGTHS.tolist()).rows_per_feature == (1, 2)
