"""Every fact about a number format, in one place: all targets read this table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

TableDtype = Literal["fp32", "fp16", "bf16", "fp8_e4m3"]
OutputDtype = Literal["fp32", "fp16", "bf16"]
IdDtype = Literal["int32", "int64"]


@dataclass(frozen=True)
class Dtype:
    """One number format: its size and its name in each language we emit or call."""

    name: str
    bytes: int
    torch_name: str
    c_type: str
    """The type that a pointer to such numbers has in generated C++ and CUDA."""


DTYPES: dict[str, Dtype] = {
    d.name: d
    for d in (
        Dtype("fp32", 4, "float32", "float"),
        Dtype("fp16", 2, "float16", "fp16_t"),
        Dtype("bf16", 2, "bfloat16", "bf16_t"),
        Dtype("fp8_e4m3", 1, "float8_e4m3fn", "fp8_t"),
        Dtype("int32", 4, "int32", "int32_t"),
        Dtype("int64", 8, "int64", "int64_t"),
    )
}

TABLE_DTYPES: tuple[str, ...] = get_args(TableDtype)
OUTPUT_DTYPES: tuple[str, ...] = get_args(OutputDtype)
ID_DTYPES: tuple[str, ...] = get_args(IdDtype)
