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
"""The folders of each area. A bug is in the first area that has its file."""


class Bug(NamedTuple):
    """A text in a file of the repository, the text that replaces it, and the tests that then fail."""

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
    """The bugs in bugs.toml."""
    return [Bug(**entry) for entry in tomllib.loads(LIST.read_text(encoding="utf-8"))["bug"]]
