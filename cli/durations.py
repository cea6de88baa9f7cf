"""Durations as people write them: `90s`, `3m`, `1h30m`."""

from __future__ import annotations

import re
from typing import Any

import click

SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0}
FORM = "allowed: a number with h, m or s behind it, largest first, e.g. 90s, 3m or 1h30m"


class Duration(click.ParamType[float]):
    """A command line option's seconds, above zero."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return seconds_of(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def seconds_of(text: str) -> float:
    """The seconds of a text; `ValueError` says what is wrong with it and what is allowed."""
    number = r"(\d+(?:\.\d+)?)"
    found = re.fullmatch(rf"(?:{number}h)?(?:{number}m)?(?:{number}s)?", text.strip().lower())
    if found is None or not any(found.groups()):
        missing = re.fullmatch(number, text.strip())
        hint = f"; did you mean {text.strip()}s or {text.strip()}m?" if missing else ""
        raise ValueError(f"{text!r} is not a duration{hint}; {FORM}")
    seconds = sum(float(part) * unit for part, unit in zip(found.groups(default="0"), SECONDS.values(), strict=True))
    if seconds <= 0:
        raise ValueError(f"{text!r} is no time at all; {FORM}")
    return seconds


def show_duration(seconds: float) -> str:
    """`3m05s`, `45s`, `1h02m`: as `seconds_of` reads it, without what is below a second."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s" if whole % 60 else f"{whole // 60}m"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m" if whole % 3600 >= 60 else f"{whole // 3600}h"
