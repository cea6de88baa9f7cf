"""Where a number of a result belongs: feature, sample and column, for messages."""

from __future__ import annotations

import torch
from torch import Tensor

from embforge.codegen.layout import CollectionLayout


def pooled_place(layout: CollectionLayout, element: int) -> str:
    """The place of an element of the flat pooled output."""
    sample, column = divmod(element, layout.output_width)
    owner = next(f for f in layout.features if f.column is not None and column < f.column + f.width)
    return f"feature {owner.feature.name!r}, sample {sample}, column {column - (owner.column or 0)}"


def divisor_place(layout: CollectionLayout, element: int) -> str:
    """The place of an element of the flat divisors."""
    sample, column = divmod(element, layout.divisor_width)
    index = next(index for index, owned in layout.divisor_column.items() if owned == column)
    return f"feature {layout.features[index].feature.name!r}, sample {sample}"


def winner_place(layout: CollectionLayout, element: int) -> str:
    """The place of an element of the flat winners."""
    sample, column = divmod(element, layout.winner_width)
    index, first = next(item for item in reversed(layout.winner_column.items()) if item[1] <= column)
    return f"feature {layout.features[index].feature.name!r}, sample {sample}, column {column - first}"


def sequence_place(layout: CollectionLayout, offsets: Tensor, batch: int, element: int) -> str:
    """The place of an element of the flat sequence output, which the offsets divide among features and samples."""
    for placed in layout.sequence_features:
        borders = offsets[placed.index * batch : (placed.index + 1) * batch + 1]
        elements = int(borders[-1] - borders[0]) * placed.dim
        if element < elements:
            row, column = divmod(element, placed.dim)
            at = torch.tensor([row], dtype=borders.dtype, device=borders.device) + borders[0]
            sample = int(torch.searchsorted(borders, at, right=True)) - 1
            position = row - int(borders[sample] - borders[0])
            return f"feature {placed.feature.name!r}, sample {sample}, position {position}, column {column}"
        element -= elements
    return f"element {element} behind the last row of the sequence output"
