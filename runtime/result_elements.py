"""Names the feature, sample and column that an element of a result belongs to, for messages."""

from __future__ import annotations

import torch
from torch import Tensor

from embforge.codegen.layout import CollectionLayout


def pooled_location(layout: CollectionLayout, element: int) -> str:
    """The feature, sample and column of an element of the flat pooled output."""
    sample, column = divmod(element, layout.output_width)
    feature = next(f for f in layout.features if f.column is not None and column < f.column + f.width)
    return f"feature {feature.feature.name!r}, sample {sample}, column {column - (feature.column or 0)}"


def divisor_location(layout: CollectionLayout, element: int) -> str:
    """The feature and sample of an element of the flat divisors."""
    sample, column = divmod(element, layout.divisor_width)
    index = next(index for index, first in layout.divisor_column.items() if first == column)
    return f"feature {layout.features[index].feature.name!r}, sample {sample}"


def winner_location(layout: CollectionLayout, element: int) -> str:
    """The feature, sample and column of an element of the flat winners."""
    sample, column = divmod(element, layout.winner_width)
    index, first = next(item for item in reversed(layout.winner_column.items()) if item[1] <= column)
    return f"feature {layout.features[index].feature.name!r}, sample {sample}, column {column - first}"


def sequence_location(layout: CollectionLayout, offsets: Tensor, batch: int, element: int) -> str:
    """The feature, sample, position in the bag, and column of an element of the flat sequence output."""
    for feature in layout.sequence_features:
        borders = offsets[feature.index * batch : (feature.index + 1) * batch + 1]
        elements = int(borders[-1] - borders[0]) * feature.dim
        if element < elements:
            row, column = divmod(element, feature.dim)
            at = torch.tensor([row], dtype=borders.dtype, device=borders.device) + borders[0]
            sample = int(torch.searchsorted(borders, at, right=True)) - 1
            position = row - int(borders[sample] - borders[0])
            return f"feature {feature.feature.name!r}, sample {sample}, position {position}, column {column}"
        element -= elements
    return f"element {element} after the last row of the sequence output"
