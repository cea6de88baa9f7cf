"""Synthetic data with the shape of Criteo's click logs: 13 numbers, 26 categories, a label that can be learned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

NUMBERS = 13
CATEGORIES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
"""How many different values the categorical columns of the Kaggle data set have."""
SKEW = 1.05
"""The k-th most frequent value of a column occurs in proportion to k^-SKEW."""
HELD_OUT = 1 << 40
"""Number of the first batch that is not for training."""


class Batch(NamedTuple):
    """A batch of samples: `numbers` [B, 13], `ids` [26, B], `labels` [B]."""

    numbers: Tensor
    ids: Tensor
    labels: Tensor

    def part(self, rank: int, ranks: int) -> Batch:
        """The samples of one of `ranks`, in order."""
        size = self.labels.numel() // ranks
        mine = slice(rank * size, (rank + 1) * size)
        return Batch(self.numbers[mine], self.ids[:, mine], self.labels[mine])

    def to(self, device: torch.device) -> Batch:
        return Batch(*(tensor.to(device) for tensor in self))


@dataclass(frozen=True, eq=False)
class CriteoLike:
    """Random batches by number: the same seed and number give the same batch on every rank.

    Labels are drawn from a hidden model: every number has a factor, every category an effect, and a few pairs of
    columns
    act together. Small columns and frequent values are learned first, as in real logs.
    """

    rows: tuple[int, ...]
    seed: int

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        object.__setattr__(self, "_factors", 0.25 * torch.randn(NUMBERS, generator=generator))
        object.__setattr__(self, "_effects", [0.3 * torch.randn(rows, generator=generator) for rows in self.rows])
        object.__setattr__(self, "_tastes", [torch.randn(rows, generator=generator) for rows in self.rows])
        # Frequent values are scattered over the table.
        object.__setattr__(self, "_places", [torch.randperm(rows, generator=generator) for rows in self.rows])

    @classmethod
    def capped(cls, most_rows: int, seed: int) -> CriteoLike:
        """Criteo's columns, none with more than `most_rows` values."""
        return cls(tuple(min(rows, most_rows) for rows in CATEGORIES), seed)

    def batch(self, number: int, size: int) -> Batch:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + number) % 2**63)
        numbers = torch.randn(size, NUMBERS, generator=generator).exp().log1p()  # counts, with the usual logarithm
        ids = torch.stack([self._drawn(column, size, generator) for column in range(len(self.rows))])
        clicked = torch.rand(size, generator=generator) < torch.sigmoid(self._logits(numbers, ids))
        return Batch(numbers, ids, clicked.float())

    def batches(self, first: int, last: int, size: int) -> Iterator[Batch]:
        for number in range(first, last):
            yield self.batch(number, size)

    def _drawn(self, column: int, size: int, generator: torch.Generator) -> Tensor:
        """Zipf by inversion of the continuous law."""
        rows, left = self.rows[column], 1 - SKEW
        uniform = torch.rand(size, generator=generator, dtype=torch.float64)
        ranks = (1 + uniform * ((rows + 1) ** left - 1)) ** (1 / left) - 1
        return self._places[column][ranks.long().clamp(0, rows - 1)]  # type: ignore[attr-defined,no-any-return]

    def _logits(self, numbers: Tensor, ids: Tensor) -> Tensor:
        found = (numbers - 0.8) @ self._factors - 1.0  # type: ignore[attr-defined]  # about a quarter clicks
        for column, effects in enumerate(self._effects):  # type: ignore[attr-defined]
            found = found + effects[ids[column]]
        tastes = [taste[ids[column]] for column, taste in enumerate(self._tastes)]  # type: ignore[attr-defined]
        for one, other in ((5, 13), (8, 16), (19, 21)):
            found = found + 0.4 * tastes[one] * tastes[other]
        return found
