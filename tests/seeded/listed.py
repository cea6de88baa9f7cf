"""The checked-in list of seeded bugs."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("bugs.toml")
AREAS = {
    "sharding": ("runtime/sharded/", "codegen/sharding/", "codegen/planner/"),
    "launchers": ("runtime/launch/",),
    "kernels": ("templates/", "codegen/"),
    "runtime": ("runtime/",),
}
"""By the first of these folders that a bug's file is in."""


class Bug(NamedTuple):
    """Text in a file of the repository, what to put in its place, and which tests fail then."""

    name: str
    file: str
    old: str
    new: str
    caught_by: str
    """Node ids of pytest, separated by spaces."""

    @property
    def area(self) -> str:
        return next(area for area, folders in AREAS.items() if self.file.startswith(folders))


def read_bugs() -> list[Bug]:
    """Those of bugs.toml."""
    return [Bug(**entry) for entry in tomllib.loads(LIST.read_text(encoding="utf-8"))["bug"]]
