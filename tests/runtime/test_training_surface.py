"""Sharded and unsharded modules have the same methods for training, which are defined in one class."""

from __future__ import annotations

import inspect

import pytest

import embforge as ef
from embforge.training.surface import TrainingSurface

OWN = {"step", "drop_gradients"}
"""The methods that a class may define itself."""


@pytest.mark.parametrize("kind", [ef.EmbeddingCollection, ef.sharded.ShardedEmbeddingCollection])
def test_no_class_repeats_the_surface(kind: type[TrainingSurface]) -> None:
    surface = {name for name in vars(TrainingSurface) if not name.startswith("_")}
    assert {"optimizer", "seed", "freeze", "unfreeze", "requires_grad_", "use_grad_scaler"} <= surface
    repeated = {name for name in surface if inspect.getattr_static(kind, name) is not vars(TrainingSurface)[name]}
    assert repeated <= OWN
