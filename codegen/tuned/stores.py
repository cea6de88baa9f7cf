"""Where tuned results lie and how they are read.

    project   embforge-tuned/ beside the spec's TOML file, else in the current directory
    user      EMBFORGE_TUNED_DIR, else the platform's data directory of this user
    shipped   in the package, read only (or EMBFORGE_SHIPPED_DIR; an empty directory: nothing)

One file a meaning, named by it. What cannot be read is a `Problem`, never an exception: a bad file costs its own
result and nothing else.
"""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import platformdirs

from embforge.codegen.errors import TunedError
from embforge.codegen.tuned.document import OPS, TARGETS, read_records
from embforge.codegen.tuned.record import Record
from embforge.codegen.tuned.shape import DIGEST_DIGITS, file_name

StoreName = Literal["project", "user", "shipped"]
STORES: tuple[StoreName, ...] = ("project", "user", "shipped")
"""In the order in which they are asked."""
PROJECT_FOLDER = "embforge-tuned"
NAME = re.compile(rf"({'|'.join(OPS)})-({'|'.join(TARGETS)})-[0-9a-f]{{{DIGEST_DIGITS}}}\.json")


@dataclass(frozen=True)
class Stored:
    """A result, and where it was found."""

    record: Record
    path: Path
    store: StoreName


@dataclass(frozen=True)
class Problem:
    """A file or directory that is skipped."""

    path: Path
    what: str
    """What is wrong and what to do."""

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


def project_dir(origin: Path | None = None) -> Path:
    """`embforge-tuned/` beside the spec's file, or in the current directory for a spec that has none."""
    return (_current() if origin is None else origin.parent) / PROJECT_FOLDER


def user_dir() -> Path:
    """`EMBFORGE_TUNED_DIR`, else the platform's data directory."""
    chosen = os.environ.get("EMBFORGE_TUNED_DIR")
    if chosen:
        return _current() / os.path.expanduser(chosen)
    return Path(platformdirs.user_data_dir("embforge", appauthor=False)) / "tuned"


def shipped_dir() -> Path | None:
    """`EMBFORGE_SHIPPED_DIR`, else what the package came with; None if it has no files of its own."""
    chosen = os.environ.get("EMBFORGE_SHIPPED_DIR")
    return Path(chosen) if chosen else _packaged()


@cache
def _packaged() -> Path | None:
    """Found without importing the tuner."""
    found = find_spec("embforge.tuner")
    places = found.submodule_search_locations if found else None
    return Path(places[0]) / "shipped" if places else None


def store_dirs(origin: Path | None = None) -> dict[StoreName, Path]:
    """All stores there are, in the order in which they are asked."""
    found: dict[StoreName, Path] = {"project": project_dir(origin), "user": user_dir()}
    shipped = shipped_dir()
    return found if shipped is None else {**found, "shipped": shipped}


def read_stores(
    op: str | None = None, target: str | None = None, origin: Path | None = None
) -> tuple[list[Stored], list[Problem]]:
    """All results of an op and a target (None: of any), and what had to be skipped.

    Only files whose names fit are opened, each once a process unless it changes.
    """
    found: list[Stored] = []
    problems: list[Problem] = []
    for name, directory in store_dirs(origin).items():
        records, skipped = read_store(name, directory, op, target)
        found += records
        problems += skipped
    return found, problems


def read_store(
    store: StoreName, directory: Path, op: str | None = None, target: str | None = None
) -> tuple[list[Stored], list[Problem]]:
    """The same of one store. A directory that does not exist is an empty store."""
    found: list[Stored] = []
    problems: list[Problem] = []
    try:
        with os.scandir(directory) as entries:
            names = sorted(entry.name for entry in entries if entry.name.endswith(".json") and entry.name[0] != ".")
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [Problem(directory, f"cannot be read ({error.strerror}); make it a directory that you may read")]
    for name in names:
        path, fits = directory / name, NAME.fullmatch(name)
        if fits is None:
            if op is None and target is None:  # a runtime that wants one op has no business with it
                problems.append(Problem(path, "not the name of a tuned result; `embforge tuned import` gives it one"))
            continue
        if op in (None, fits[1]) and target in (None, fits[2]):
            read = read_file(path)
            if isinstance(read, Problem):
                problems.append(read)
            else:
                found.append(Stored(read, path, store))
    return found, problems


def read_file(path: Path) -> Record | Problem:
    """The one record of a store's file, or what is wrong with it."""
    try:
        status = path.stat()
    except OSError as error:
        return Problem(path, f"cannot be read ({error.strerror}); remove it")
    return _read(path, status.st_mtime_ns, status.st_size, status.st_ino)


def warn_once(problem: Problem) -> None:
    """Tells about a skipped file, once a process, whatever the warning filters."""
    if _is_new(problem):
        warnings.warn(f"tuned results: skipped {problem}", RuntimeWarning, stacklevel=2)


@lru_cache(maxsize=4096)
def _read(path: Path, modified: int, size: int, inode: int) -> Record | Problem:
    """Cached by all that says whether a file is still the same."""
    try:
        records = read_records(path)
    except FileNotFoundError:
        return Problem(path, "was removed while it was being read")
    except TunedError as error:
        return Problem(path, str(error))
    if len(records) != 1:
        return Problem(path, f"holds {len(records)} results, a store's file holds one; use `embforge tuned import`")
    (record,) = records
    wanted = file_name(record.key)
    if path.name != wanted:
        return Problem(path, f"its content belongs into {wanted}; use `embforge tuned import`, then remove it")
    return record


_told: set[Problem] = set()
"""Problems that this process has been told of."""


def _is_new(problem: Problem) -> bool:
    new = problem not in _told
    _told.add(problem)
    return new


def _current() -> Path:
    """The current directory; relative if it has been removed under us."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path()
