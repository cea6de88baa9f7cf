"""Whole numbers as people write them in files: 1000000, 1_000_000, 1e6."""

from __future__ import annotations

import operator
import re
from decimal import Decimal
from typing import Any

WHOLE_NUMBER_TEXT = r"-?\d+(_\d+)*(\.\d+)?([eE]\+?\d{1,2})?"
"""A count as text. At most two digits of an exponent, so that no text becomes a number of a million digits."""
WHOLE_NUMBER_FORMS = "a whole number, as 1000000, 1_000_000 or 1e6"
EXACT = 2**53
"""Beyond it a float that is whole need not be the number that was written."""


def whole_number(value: Any) -> Any:
    """The int that a value spells: numpy's integers, whole floats, text; anything else as it came."""
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
