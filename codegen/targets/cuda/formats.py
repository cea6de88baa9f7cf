"""The facts about number formats in CUDA sources: which formats
they use, and which of these an instruction converts."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from embforge.codegen.dtypes import FLOATS, Float, narrow_floats
from embforge.codegen.targets.cuda.arch import Arch


def format_facts(
    read: Collection[str],
    arch: Arch,
    *,
    alone: Collection[str] = (),
    written: Collection[str] = (),
    packed: Collection[str] = (),
) -> dict[str, Any]:
    """The facts about formats for the templates in `cuda/common/`.

    `read`: formats of vectors. `alone`: formats of numbers that are read one by one. `written`: formats of results.
    `packed`: formats of bytes on the wire, which are converted by arithmetic on any architecture.
    """
    paired = [form for form in narrow_floats(read) if _has_pairs(form, arch)]
    conversions = {rounding(name, arch) for name in written if FLOATS[name].is_narrow}
    if "fp16" in {*read, *alone} or paired:
        conversions.add("half_to_float")
    return {
        "table_dtypes": set(read),
        "formats": narrow_floats([*read, *alone, *written, *packed]),
        "paired": paired,
        "conversions": conversions,
    }


def rounding(name: str, arch: Arch) -> str:
    """The name of the function that rounds fp32 to a narrower format: one instruction, or arithmetic."""
    first = FLOATS[name].rounded_from
    return f"float_to_{name}" if first is not None and arch.number >= first else f"round_to_{name}"


def _has_pairs(form: Float, arch: Arch) -> bool:
    return form.paired_from is not None and arch.number >= form.paired_from
