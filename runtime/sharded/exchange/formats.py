"""In which number formats vectors travel: chosen apart for results and for gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from embforge.codegen.dtypes import FP32, WIRE, WIRE_FORMATS, OutputDtype, WireFormat
from embforge.codegen.planner import traffic
from embforge.codegen.sharding.geometry import Local
from embforge.number_formats import torch_dtype

PACKED = tuple(name for name, dtype in WIRE.items() if dtype.is_packed)
"""A byte a number, and of every row of a feature an fp32 scale: its largest magnitude is the format's largest
number."""
DTYPES = {name: torch_dtype(dtype.name) for name, dtype in WIRE.items() if not dtype.is_packed}


@dataclass(frozen=True)
class Formats:
    """`forward`: partial pools and rows; None: the result's own format where every bag is pooled by one rank, and fp32
    where partial pools are still to be added. `backward`: their gradients; None: fp32."""

    forward: WireFormat | None = None
    backward: WireFormat | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            value = getattr(self, name)
            if value is not None and value not in WIRE_FORMATS:
                raise ValueError(f"formats: {name}={value!r} is not known; allowed: {', '.join(WIRE_FORMATS)}, or None")


def computed_in(wire: str) -> OutputDtype:
    """What kernels read and write of a format on the wire: packed bytes are fp32 before and after."""
    return cast(OutputDtype, FP32.name if wire in PACKED else wire)


def row_bytes(wire: str, widths: list[int]) -> int:
    """Of a row that holds runs of columns of these widths, each of one feature."""
    return sum(traffic.row_bytes(wire, width) for width in widths)


def direct_widths(local: Local | None) -> list[int]:
    """Of the pooled columns of a rank's own collection that take the direct way, by feature."""
    if local is None:
        return []
    return [f.width for f in local.layout.features if f.column is not None and f.column < local.direct_width]
