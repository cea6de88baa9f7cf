"""The number formats in which vectors are sent between ranks. They are chosen separately for results and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from embforge.codegen.dtypes import FP32, WIRE, WIRE_FORMATS, OutputDtype, WireFormat
from embforge.codegen.planner import traffic
from embforge.codegen.sharding.geometry import Local
from embforge.number_formats import torch_dtype

PACKED = tuple(name for name, dtype in WIRE.items() if dtype.is_packed)
"""Formats of one byte per number, with an fp32 scale for each row of a feature: the largest magnitude of the row
becomes the largest number of the format."""
DTYPES = {name: torch_dtype(dtype.name) for name, dtype in WIRE.items() if not dtype.is_packed}


@dataclass(frozen=True)
class Formats:
    """The number formats on the wire.

    `forward` is the format of partial pools and rows. None means the format of the results if every bag is pooled by
    one rank, and fp32 if partial pools of several ranks must be added. `backward` is the format of their gradients;
    None means fp32.
    """

    forward: WireFormat | None = None
    backward: WireFormat | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            value = getattr(self, name)
            if value is not None and value not in WIRE_FORMATS:
                raise ValueError(f"formats: {name}={value!r} is not known; allowed: {', '.join(WIRE_FORMATS)}, or None")


def computed_in(wire: str) -> OutputDtype:
    """The dtype that kernels read and write for a format on the wire: fp32 for packed formats."""
    return cast(OutputDtype, FP32.name if wire in PACKED else wire)


def row_bytes(wire: str, widths: list[int]) -> int:
    """The bytes of a row that holds columns of several features, of these widths."""
    return sum(traffic.row_bytes(wire, width) for width in widths)


def direct_widths(local: Local | None) -> list[int]:
    """The widths of the pooled features of a rank's own collection whose results are sent directly."""
    if local is None:
        return []
    return [f.width for f in local.layout.features if f.column is not None and f.column < local.direct_width]
