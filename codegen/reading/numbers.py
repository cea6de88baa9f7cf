"""Numbers as users write and read them: whole ones in files (1000000, 1_000_000, 1e6), sizes in bytes (25.6 MB)."""

from __future__ import annotations

import operator
import re
from decimal import Decimal
from typing import Any

WHOLE_NUMBER_TEXT = r"-?\d+(_\d+)*(\.\d+)?([eE]\+?\d{1,2})?"
"""A count as text. At most two digits of an exponent, so that no text becomes a number of a million digits."""
WHOLE_NUMBER_FORMS = "a whole number, such as 1000000, 1_000_000 or 1e6"
EXACT = 2**53
"""Above it, a whole float may not be the number that was written."""
BYTES = ("B", "kB", "MB", "GB", "TB")
"""Units in powers of 1000, for the sizes of tables, files and messages."""
BINARY_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
"""Units in powers of 1024, for hardware: caches and shared memory."""


def whole_number(value: Any) -> Any:
    """The int that a numpy integer, a whole float or a text means; any other value unchanged."""
    if isinstance(value, bool):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= EXACT else value
    if isinstance(value, str) and re.fullmatch(WHOLE_NUMBER_TEXT, value, re.ASCII):
        number = Decimal(value.replace("_", ""))
        return int(number) if number == number.to_integral_value() else value
    try:
        return operator.index(value)
    except TypeError:
        return value


def size(count: float, *, binary: bool = False) -> str:
    """A number of bytes as text, e.g. 25.6 MB, or with `binary` in powers of 1024, e.g. 48 KiB."""
    units, step = (BINARY_BYTES, 1024) if binary else (BYTES, 1000)
    for unit in units[:-1]:
        if abs(count) < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= step
    return f"{count:.3g} {units[-1]}"
