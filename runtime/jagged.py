"""Ids of many bags of different lengths as one value, with what the host already knows about their sizes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Jagged:
    """The input of a lookup: `values[N]`, and `offsets[F*B+1]` or `lengths[F*B]`, feature-major.

    `rows_per_feature` (ids a feature) lets the outputs of `none` features be sized without asking the device.
    A module checks the tensors when it is called; here only what can be said without their module.
    """

    values: Tensor
    offsets: Tensor | None = None
    lengths: Tensor | None = None
    weights: Tensor | None = None
    rows_per_feature: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if (self.offsets is None) == (self.lengths is None):
            given = "neither" if self.offsets is None else "both"
            raise ValueError(f"Jagged: offsets and lengths: {given} given; give exactly one of them")
        if self.rows_per_feature is not None:
            object.__setattr__(self, "rows_per_feature", tuple(map(int, self.rows_per_feature)))
