"""Turns rows of numbers into the bytes that are sent, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from embforge.codegen.stages import PACKINGS, PART_WORDS, StagePlan
from embforge.launch.stages import stages_of
from embforge.sharded.exchange.formats import DTYPES, PACKED, computed_in, row_bytes


@dataclass(frozen=True)
class Wire:
    """A number format on the wire: encodes rows of numbers as bytes, and decodes them."""

    format: str
    plan: StagePlan
    kernels: str | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of numbers before they are encoded and after they are decoded."""
        return DTYPES[computed_in(self.format)]

    def encode(self, numbers: Tensor, widths: Sequence[int]) -> Tensor:
        """Encodes `[rows, sum(widths)]` numbers of any float dtype as flat bytes."""
        if self.format not in PACKED:
            return numbers.to(self.dtype).contiguous().view(-1).view(torch.uint8)
        rows, size = numbers.shape[0], row_bytes(self.format, list(widths))
        packed = numbers.new_empty(rows * size, dtype=torch.uint8)
        self._run("pack", self._parts(widths, numbers.device), numbers.float().contiguous(), packed, rows, widths)
        return packed

    def decode(self, packed: Tensor, rows: int, widths: Sequence[int]) -> Tensor:
        """Decodes flat bytes to `[rows, sum(widths)]` numbers of `dtype`. Returns a view if the bytes are numbers of
        that dtype already."""
        if self.format not in PACKED:
            return packed.view(self.dtype).view(rows, sum(widths))
        numbers = packed.new_empty((rows, sum(widths)), dtype=torch.float32)
        self._run("unpack", self._parts(widths, packed.device), numbers, packed, rows, widths)
        return numbers

    def _run(
        self, stage: str, parts: Tensor, numbers: Tensor, packed: Tensor, rows: int, widths: Sequence[int]
    ) -> None:
        stages_of(self.plan, self.kernels).run(
            stage,
            parts=parts,
            numbers=numbers,
            bytes=packed,
            num_parts=len(widths),
            rows=rows,
            width=sum(widths),
            row_bytes=row_bytes(self.format, list(widths)),
            packing=PACKINGS[self.format],
        )

    def _parts(self, widths: Sequence[int], device: torch.device) -> Tensor:
        assert PART_WORDS == ("column", "width", "byte")
        columns = np.cumsum(widths) - widths
        sizes = np.array([row_bytes(self.format, [width]) for width in widths])
        parts = np.stack([columns, np.array(widths), np.cumsum(sizes) - sizes], axis=1).astype(np.int64)
        return torch.from_numpy(parts).to(device)
