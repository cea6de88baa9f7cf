"""Durations as people write them: `90s`, `3m`, `1h30m`."""

from __future__ import annotations

import re
from typing import Any

import click

SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0}
FORM = "allowed: numbers followed by h, m or s, largest unit first, e.g. 90s, 3m or 1h30m"


class Duration(click.ParamType[float]):
    """A command line option that takes a duration: a number of seconds above zero."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return seconds_of(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def seconds_of(text: str) -> float:
    """The seconds that a text like `1h30m` means; `ValueError` says what is wrong with it and what is allowed."""
    number = r"(\d+(?:\.\d+)?)"
    match = re.fullmatch(rf"(?:{number}h)?(?:{number}m)?(?:{number}s)?", text.strip().lower())
    if match is None or not any(match.groups()):
        missing = re.fullmatch(number, text.strip())
        hint = f"; did you mean {text.strip()}s or {text.strip()}m?" if missing else ""
        raise ValueError(f"{text!r} is not a duration{hint}; {FORM}")
    seconds = sum(float(part) * unit for part, unit in zip(match.groups(default="0"), SECONDS.values(), strict=True))
    if seconds <= 0:
        raise ValueError(f"{text!r} is not above zero; {FORM}")
    return seconds


def show_duration(seconds: float) -> str:
    """A duration in a form that `seconds_of` reads, in whole seconds: `3m05s`, `45s`, `1h02m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s" if whole % 60 else f"{whole // 60}m"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m" if whole % 3600 >= 60 else f"{whole // 3600}h"
