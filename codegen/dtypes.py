"""All facts about number formats, in one table that all targets read.

A format that tables may have is an entry of `DTYPES` and a member of `TableDtype`. How its numbers are decoded and
rounded, in C++, in CUDA and in the reference, follows from the facts of its entry.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

TableDtype = Literal["fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2"]
OutputDtype = Literal["fp32", "fp16", "bf16"]
IdDtype = Literal["int32", "int64"]
WireFormat = Literal["fp32", "fp16", "bf16", "fp8", "int8"]
"""The formats in which vectors travel between ranks, as named by `Dtype.wire`."""


@dataclass(frozen=True)
class Dtype:
    """One number format: its size, and its name in each language that is generated or called."""

    name: str
    bits: int
    torch_name: str
    c_type: str
    """The type that a pointer to such numbers has in generated C++ and CUDA."""
    aliases: tuple[str, ...] = ()
    """Other names that specs may use, in addition to torch's."""
    slips: tuple[str, ...] = ()
    """Words that are not names of the format, but for which an error suggests it."""
    wire: str = ""
    """Its name as a format in which vectors travel between ranks; empty if they cannot."""
    torch_computes: bool = True
    """Whether torch can draw, index and differentiate such numbers. It can only convert and copy the others."""

    @property
    def bytes(self) -> int:
        return self.bits // 8

    @property
    def spellings(self) -> tuple[str, ...]:
        """All names that a spec may use, ours first."""
        return self.name, self.torch_name, f"torch.{self.torch_name}", *self.aliases

    @property
    def is_float(self) -> bool:
        return isinstance(self, Float)

    @property
    def is_packed(self) -> bool:
        """Whether vectors on the wire begin with a scale, because the format alone has too small a range."""
        return self.bits == 8

    @property
    def largest(self) -> float:
        """The largest number of the format."""
        return float(2 ** (self.bits - 1) - 1)


@dataclass(frozen=True, kw_only=True)
class Float(Dtype):
    """A floating-point format: a sign, an exponent, a fraction. Codes are given without the sign."""

    exponent_bits: int
    mantissa_bits: int
    infinity: int | None
    """The code of infinity. None: the format has no infinity, and results that would be infinite become the largest
    number."""
    nan: int
    """The code of results that are not a number."""
    ptx: str
    """Its name in PTX instructions."""
    paired_from: int | None = None
    """The first architecture, such as 89, with an instruction that makes two of these numbers two of fp16."""
    rounded_from: int | None = None
    """The first architecture with an instruction that rounds fp32 to this format."""

    @property
    def bias(self) -> int:
        """The difference between the stored exponent and the number's."""
        return (1 << self.exponent_bits - 1) - 1

    @property
    def dropped(self) -> int:
        """How many bits shorter its fraction is than that of fp32."""
        return FP32.mantissa_bits - self.mantissa_bits

    @property
    def rebias(self) -> int:
        """The difference between the stored exponents of the same number in fp32 and in this format."""
        return FP32.bias - self.bias

    @property
    def is_narrow(self) -> bool:
        """Whether fp32 numbers must be rounded when they are stored in it."""
        return self.bits < FP32.bits

    @property
    def largest_code(self) -> int:
        """The code of the largest finite number."""
        return (self.nan if self.infinity is None else self.infinity) - 1

    @property
    def overflow(self) -> int:
        """The code to which infinity is converted. Finite numbers that are too large become the largest finite one."""
        return self.largest_code if self.infinity is None else self.infinity

    @property
    def largest(self) -> float:
        fraction = self.largest_code & (1 << self.mantissa_bits) - 1
        exponent = (self.largest_code >> self.mantissa_bits) - self.bias
        return (1 + fraction / (1 << self.mantissa_bits)) * 2.0**exponent

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def smallest(self) -> float:
        """The smallest number above zero; subnormal numbers are multiples of it."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    @property
    def resolution(self) -> float:
        """The distance from 1 to the next number."""
        return 2.0**-self.mantissa_bits

    @property
    def least_bound(self) -> float:
        """The least bound of the range from which starting rows are drawn. Formats of 8 bits have few numbers near
        zero, so rows from a smaller range would be almost all zeros."""
        return self.smallest_normal if self.bits <= 8 else 0.0


FP32 = Float(
    "fp32", 32, "float32", "float", ("float", "torch.float", "f32"), wire="fp32",
    exponent_bits=8, mantissa_bits=23, infinity=0x7F800000, nan=0x7FC00000, ptx="f32",
)  # fmt: skip
"""The format in which everything is computed."""

DTYPES: dict[str, Dtype] = {
    d.name: d
    for d in (
        FP32,
        Float(
            "fp16", 16, "float16", "fp16_t", ("half", "torch.half", "f16"), wire="fp16",
            exponent_bits=5, mantissa_bits=10, infinity=0x7C00, nan=0x7E00, ptx="f16", rounded_from=0,
        ),
        Float(
            "bf16", 16, "bfloat16", "bf16_t", wire="bf16",
            exponent_bits=8, mantissa_bits=7, infinity=0x7F80, nan=0x7FC0, ptx="bf16", rounded_from=80,
        ),
        Dtype("int8", 8, "int8", "int8_t", wire="int8"),
        Float(
            "fp8_e4m3", 8, "float8_e4m3fn", "fp8_e4m3_t", ("fp8_e4m3fn", "float8_e4m3"), ("fp8", "float8"),
            wire="fp8", torch_computes=False,
            exponent_bits=4, mantissa_bits=3, infinity=None, nan=0x7F, ptx="e4m3", paired_from=89,
        ),
        Float(
            "fp8_e5m2", 8, "float8_e5m2", "fp8_e5m2_t", torch_computes=False,
            exponent_bits=5, mantissa_bits=2, infinity=0x7C, nan=0x7F, ptx="e5m2", paired_from=89,
        ),
        Dtype("int32", 32, "int32", "int32_t"),
        Dtype("int64", 64, "int64", "int64_t"),
    )
}  # fmt: skip
FLOATS: dict[str, Float] = {name: d for name, d in DTYPES.items() if isinstance(d, Float)}
WIRE: dict[str, Dtype] = {d.wire: d for d in DTYPES.values() if d.wire}
"""The formats by the names of `WireFormat`. The order of packed ones is their number in arguments of kernels, so new
ones must be appended."""

TABLE_DTYPES: tuple[str, ...] = get_args(TableDtype)
OUTPUT_DTYPES: tuple[str, ...] = get_args(OutputDtype)
ID_DTYPES: tuple[str, ...] = get_args(IdDtype)
WIRE_FORMATS: tuple[str, ...] = get_args(WireFormat)
DTYPE_SLIPS: dict[str, str] = {slip: d.name for d in DTYPES.values() for slip in d.slips}

_NAMES = {spelling: dtype.name for dtype in DTYPES.values() for spelling in dtype.spellings}


def dtype_named(value: Any) -> Any:
    """Our name of the format that a value means: a text in upper or lower case, or a `torch.dtype`. Other values are
    returned unchanged."""
    text = str(value) if isinstance(value, str) or type(value).__module__ == "torch" else None
    return value if text is None else _NAMES.get(text.lower(), value)


def narrow_floats(names: Iterable[str]) -> list[Float]:
    """The different formats among these that are narrower than fp32, in the table's order."""
    wanted = set(names)
    return [form for form in FLOATS.values() if form.name in wanted and form.is_narrow]
