"""The stores of tuned results and how they are read.

    project   embforge-tuned/ next to the spec's TOML file, or for specs without a file in the current directory
    user      EMBFORGE_TUNED_DIR, or by default this user's data directory of the platform
    shipped   EMBFORGE_SHIPPED_DIR (an empty directory means none), or by default in the package; read only

Each file holds one result and is named after the digest of its key. A file that cannot be read becomes a `Problem`,
never an exception: it costs its own result and nothing else.
"""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import platformdirs

from embforge.codegen.errors import TunedError
from embforge.codegen.tuned.document import OPS, TARGETS, read_records
from embforge.codegen.tuned.record import Record
from embforge.codegen.tuned.shape import DIGEST_DIGITS, file_name

StoreName = Literal["project", "user", "shipped"]
STORES: tuple[StoreName, ...] = ("project", "user", "shipped")
"""The stores, in the order in which they are searched."""
PROJECT_FOLDER = "embforge-tuned"
NAME = re.compile(rf"({'|'.join(OPS)})-({'|'.join(TARGETS)})-[0-9a-f]{{{DIGEST_DIGITS}}}\.json")


@dataclass(frozen=True)
class Stored:
    """A result with the file and the store in which it was found."""

    record: Record
    path: Path
    store: StoreName


@dataclass(frozen=True)
class Problem:
    """A file or directory that is skipped, and the reason."""

    path: Path
    what: str
    """What is wrong and what to do."""

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


def project_dir(origin: Path | None = None) -> Path:
    """`embforge-tuned/` next to the spec's file, or in the current directory for a spec that has none."""
    return (_current() if origin is None else origin.parent) / PROJECT_FOLDER


def user_dir() -> Path:
    """`EMBFORGE_TUNED_DIR`, or by default the platform's data directory."""
    chosen = os.environ.get("EMBFORGE_TUNED_DIR")
    if chosen:
        return _current() / os.path.expanduser(chosen)
    return Path(platformdirs.user_data_dir("embforge", appauthor=False)) / "tuned"


def shipped_dir() -> Path | None:
    """`EMBFORGE_SHIPPED_DIR`, or by default the directory in the package; None if the package has none."""
    chosen = os.environ.get("EMBFORGE_SHIPPED_DIR")
    directory = Path(chosen) if chosen else Path(__file__).parent / "shipped"
    return directory if chosen or directory.is_dir() else None


def store_dirs(origin: Path | None = None) -> dict[StoreName, Path]:
    """The directories of all stores, in the order in which they are searched."""
    directories: dict[StoreName, Path] = {"project": project_dir(origin), "user": user_dir()}
    shipped = shipped_dir()
    return directories if shipped is None else {**directories, "shipped": shipped}


def read_stores(
    op: str | None = None, target: str | None = None, origin: Path | None = None
) -> tuple[list[Stored], list[Problem]]:
    """All results of an op and a target (None: of any) in all stores, and the files that had to be skipped.

    Only files with fitting names are opened, each once per process unless it changes.
    """
    results: list[Stored] = []
    problems: list[Problem] = []
    for name, directory in store_dirs(origin).items():
        stored, skipped = read_store(name, directory, op, target)
        results += stored
        problems += skipped
    return results, problems


def read_store(
    store: StoreName, directory: Path, op: str | None = None, target: str | None = None
) -> tuple[list[Stored], list[Problem]]:
    """The same for one store. A directory that does not exist is an empty store."""
    results: list[Stored] = []
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
            if op is None and target is None:  # a module that needs one op does not warn about other files
                problems.append(Problem(path, "not the name of a tuned result; `embforge tuned import` gives it one"))
            continue
        if op in (None, fits[1]) and target in (None, fits[2]):
            read = read_file(path)
            if isinstance(read, Problem):
                problems.append(read)
            else:
                results.append(Stored(read, path, store))
    return results, problems


def read_file(path: Path) -> Record | Problem:
    """The one record of a store's file, or what is wrong with it."""
    try:
        status = path.stat()
    except OSError as error:
        return Problem(path, f"cannot be read ({error.strerror}); remove it")
    return _read(path, status.st_mtime_ns, status.st_size, status.st_ino)


def warn_once(problem: Problem) -> None:
    """Warns about a skipped file, once per process, whatever the warning filters are."""
    if _is_new(problem):
        warnings.warn(f"tuned results: skipped {problem}", RuntimeWarning, stacklevel=2)


@lru_cache(maxsize=4096)
def _read(path: Path, modified: int, size: int, inode: int) -> Record | Problem:
    """Reads a file. The arguments are the key of the cache: they change when the file does."""
    try:
        records = read_records(path)
    except FileNotFoundError:
        return Problem(path, "was removed while it was being read")
    except TunedError as error:
        return Problem(path, str(error))
    if len(records) != 1:
        return Problem(path, f"holds {len(records)} results, but a store's file holds one; use `embforge tuned import`")
    (record,) = records
    right_name = file_name(record.key)
    if path.name != right_name:
        return Problem(path, f"its content belongs into {right_name}; use `embforge tuned import`, then remove it")
    return record


_warned: set[Problem] = set()
"""Problems about which this process has warned."""


def _is_new(problem: Problem) -> bool:
    new = problem not in _warned
    _warned.add(problem)
    return new


def _current() -> Path:
    """The current directory; a relative path if it has been removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path()
