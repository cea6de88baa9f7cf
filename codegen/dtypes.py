"""Every fact about a number format, in one place: all targets read this table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

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
    aliases: tuple[str, ...] = ()
    """Other names that specs may use beside torch's."""

    @property
    def spellings(self) -> tuple[str, ...]:
        """All names that a spec may use, ours first."""
        return self.name, self.torch_name, f"torch.{self.torch_name}", *self.aliases


DTYPES: dict[str, Dtype] = {
    d.name: d
    for d in (
        Dtype("fp32", 4, "float32", "float", ("float", "torch.float", "f32")),
        Dtype("fp16", 2, "float16", "fp16_t", ("half", "torch.half", "f16")),
        Dtype("bf16", 2, "bfloat16", "bf16_t"),
        Dtype("fp8_e4m3", 1, "float8_e4m3fn", "fp8_t", ("fp8_e4m3fn", "float8_e4m3")),
        Dtype("int32", 4, "int32", "int32_t"),
        Dtype("int64", 8, "int64", "int64_t"),
    )
}

TABLE_DTYPES: tuple[str, ...] = get_args(TableDtype)
OUTPUT_DTYPES: tuple[str, ...] = get_args(OutputDtype)
ID_DTYPES: tuple[str, ...] = get_args(IdDtype)

_NAMES = {spelling: dtype.name for dtype in DTYPES.values() for spelling in dtype.spellings}


def dtype_named(value: Any) -> Any:
    """Our name of the format that a value spells, be it text in upper or lower case or a `torch.dtype`; anything else
    as it came."""
    text = str(value) if isinstance(value, str) or type(value).__module__ == "torch" else None
    return value if text is None else _NAMES.get(text.lower(), value)
