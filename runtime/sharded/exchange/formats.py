"""In which number formats vectors travel: chosen apart for results and for gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch

from embforge.codegen.dtypes import OutputDtype
from embforge.codegen.sharding.geometry import Local

Format = Literal["fp32", "fp16", "bf16", "fp8", "int8"]
FORMATS: tuple[str, ...] = get_args(Format)
PACKED = ("fp8", "int8")
"""A byte a number, and of every row of a feature an fp32 scale: its largest magnitude is the format's largest
number."""
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SCALE_BYTES = 4


@dataclass(frozen=True)
class Formats:
    """`forward`: partial pools and rows; None: the result's own format where every bag is pooled by one rank, and fp32
    where partial pools are still to be added. `backward`: their gradients; None: fp32."""

    forward: Format | None = None
    backward: Format | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            value = getattr(self, name)
            if value is not None and value not in FORMATS:
                raise ValueError(f"formats: {name}={value!r} is not known; allowed: {', '.join(FORMATS)}, or None")


def computed_in(wire: str) -> OutputDtype:
    """What kernels read and write of a format on the wire: packed bytes are fp32 before and after."""
    return "fp32" if wire in PACKED else cast(OutputDtype, wire)


def packed_bytes(width: int) -> int:
    """Of `width` numbers with their scale."""
    return SCALE_BYTES + -(-width // 4) * 4


def row_bytes(wire: str, widths: list[int]) -> int:
    """Of a row that holds runs of columns of these widths, each of one feature."""
    if wire in PACKED:
        return sum(map(packed_bytes, widths))
    return sum(widths) * DTYPES[wire].itemsize


def direct_widths(local: Local | None) -> list[int]:
    """Of the pooled columns of a rank's own collection that take the direct way, by feature."""
    if local is None:
        return []
    return [f.width for f in local.layout.features if f.column is not None and f.column < local.direct_width]
