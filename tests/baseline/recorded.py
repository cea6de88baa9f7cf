"""The checked-in digests: read, written, and compared with what a case comes to now."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baseline.digests import Digests

FILE = Path(__file__).with_name("digests.json")
SHOWN = 8
"""How many differences a message lists."""


@dataclass(frozen=True)
class Recorded:
    """The contents of the file."""

    compilers: dict[str, str]
    """By target: the compiler of its recorded machine code."""
    code: dict[str, Digests]
    results: dict[str, Digests]

    def to_json(self) -> str:
        data = {"compilers": self.compilers, "machine code": self.code, "results": self.results}
        return json.dumps(data, indent=1, sort_keys=True) + "\n"


def read_recorded(path: Path = FILE) -> Recorded:
    """The digests of the commit that wrote them."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return Recorded(data["compilers"], data["machine code"], data["results"])


def differences(recorded: Digests, found: Digests) -> list[str]:
    """A line for each digest that is not as recorded."""
    lines = []
    for name in sorted(recorded.keys() | found.keys()):
        before, now = recorded.get(name, "not recorded"), found.get(name, "missing")
        if before != now:
            lines.append(f"{name}: recorded {before}, now {now}")
    return lines


def message(case: str, lines: list[str]) -> str:
    """The differences of one case as a message."""
    more = [f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "\n  ".join([f"{case}: not as in {FILE.name}", *lines[:SHOWN], *more])
