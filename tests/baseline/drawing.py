"""Numbers and batches drawn from seeds, the same on every machine and with every version of torch and numpy.

They are made from the raw words of a PCG64 generator, whose stream numpy promises to keep, by exact steps alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import embforge as ef

SPECIAL = (0.0, -0.0, 1e-40, -1e-42, 3e38, 6e4, float("inf"), -float("inf"), float("nan"))
EDGES = (0, 1, 2, 63, 64, 65, 129)
"""Lengths of bags around the chunk of the canonical sum."""
LONG = 300
"""A bag that CUDA kernels may split over blocks."""


class Numbers:
    """A stream of numbers."""

    def __init__(self, seed: int) -> None:
        self._words = np.random.PCG64(seed)

    def whole(self, count: int, below: int) -> Tensor:
        """Whole numbers from 0 to one less than `below`."""
        words = self._words.random_raw(count) if count else np.zeros(0, np.uint64)
        return torch.from_numpy((words >> np.uint64(11)).astype(np.int64) % below)

    def real(self, *shape: int) -> Tensor:
        """float32 numbers from -2 to 2, of 24 bits each."""
        count = int(np.prod(shape))
        return ((self.whole(count, 1 << 24) - (1 << 23)).to(torch.float32) / (1 << 22)).reshape(shape)

    def special(self, *shape: int) -> Tensor:
        """The same with zeros of both signs, denormals, huge numbers, infinities and NaNs among them."""
        numbers = self.real(*shape)
        chosen = self.whole(numbers.numel(), 4 * len(SPECIAL)).reshape(shape)
        for place, number in enumerate(SPECIAL):
            numbers[chosen == place] = number
        return numbers


@dataclass(frozen=True)
class Batch:
    """What a module is called with."""

    values: Tensor
    offsets: Tensor
    weights: Tensor | None


@dataclass(frozen=True)
class Kind:
    """How a batch is drawn: a length for every sample, which features take one place apart; ids below a limit."""

    name: str
    lengths: Sequence[int]
    same_id: bool = False
    bad_ids: bool = False
    weighted: bool = True


KINDS = (
    Kind("usual", (3, 0, 1, 5, 2)),
    Kind("edges", EDGES),
    Kind("one id", (4, 70, 1), same_id=True),
    Kind("empty batch", ()),
    Kind("no ids", (0, 0, 0)),
    Kind("no weights", (2, 1, 3, 0), weighted=False),
    Kind("bad ids", (3, 2, 9, 1), bad_ids=True),
    Kind("long", (1, LONG, 0, 2)),
)


def entries_of(spec: ef.CollectionSpec, seed: int) -> dict[str, Tensor]:
    """The row of each id of every remapped table; some ids have none, and some share one."""
    numbers = Numbers(seed)
    tables = [table for table in spec.tables if not table.ids_are_rows]
    return {table.name: numbers.whole(table.num_ids, table.num_embeddings + 1) - 1 for table in tables}


def batch_of(spec: ef.CollectionSpec, kind: Kind, seed: int, dtype: torch.dtype = torch.int64) -> Batch:
    """A batch of this kind. Padding ids occur in it."""
    numbers = Numbers(seed)
    size, lengths, values = len(kind.lengths), [], []
    for place, feature in enumerate(spec.features):
        most = feature.hotness if feature.pooling == "concat" and feature.hotness else LONG
        of_feature = [min(most, kind.lengths[(sample + place) % size]) for sample in range(size)]
        known, count = spec.table(feature.table).num_ids, sum(of_feature)
        ids = numbers.whole(1, known).expand(count).clone() if kind.same_id else numbers.whole(count, known)
        if feature.padding_idx is not None:
            ids[numbers.whole(count, 8) == 0] = feature.padding_idx
        if kind.bad_ids:
            ids[numbers.whole(count, 5) == 0] = known + 7
            ids[numbers.whole(count, 7) == 0] = -1
        lengths += of_feature
        values.append(ids)
    joined = torch.cat(values)
    offsets = torch.nn.functional.pad(torch.tensor(lengths, dtype=torch.int64).cumsum(0), (1, 0))
    weights = numbers.real(joined.numel()) if kind.weighted else None
    return Batch(joined.to(dtype), offsets.to(dtype), weights)
