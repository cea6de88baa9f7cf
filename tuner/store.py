"""Writes tuned results: into a store, out to one file for another machine, and from such a file into a store.

A reader finds each file complete at any moment, and nothing is written before all of it is known to be valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from embforge.codegen.cache import write_atomically
from embforge.codegen.errors import TunedError
from embforge.codegen.tuned.document import read_records, to_json
from embforge.codegen.tuned.record import Record
from embforge.codegen.tuned.shape import digest_of, file_name
from embforge.codegen.tuned.stores import Problem, Stored, project_dir, read_file, user_dir

Where = Literal["user", "project"] | Path
"""A store by its name, or any directory."""
SHORT = 8
"""Digits of a digest that are shown to people."""


@dataclass(frozen=True)
class Written:
    """A result that was stored, and the result or the unreadable file that it replaced."""

    record: Record
    path: Path
    replaced: Record | Problem | None


def save(record: Record, where: Where, *, origin: Path | None = None) -> Path:
    """Stores a result. It replaces one for the same key: the same op, shape, workload and hardware.

    `origin` is the spec's file, which determines the project. `TunedError` for a record that could not be read back;
    nothing is written then.
    """
    return _write([record], directory_of(where, origin))[0].path


def export(records: Iterable[Record], file: Path) -> int:
    """Writes records to one file and returns how many. If several have the same key, the first is written."""
    first: dict[str, Record] = {}
    for record in records:
        first.setdefault(file_name(record.key), record)
    text = to_json(first.values())
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text.encode())
    return len(first)


def import_(file: Path, where: Where, *, origin: Path | None = None) -> list[Written]:
    """Stores all results of an exported file, or of one file of another store, and returns what each replaced.

    `TunedError` naming the file if any of it is not valid; nothing is written then.
    """
    try:
        records = read_records(file)
    except TunedError as error:
        raise TunedError(f"{file}: {error}") from None
    names = [file_name(record.key) for record in records]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise TunedError(
                f"{file}: records {names.index(name)} and {index} are for the same key ({name}); remove one of them"
            )
    return _write(records, directory_of(where, origin))


def remove(stored: Stored) -> None:
    """Removes a result from its store. `TunedError` for one that came with the package."""
    if stored.store == "shipped":
        raise TunedError(
            f"{stored.path}: is shipped with the package and is not removed; `embforge tune` stores a result that is "
            "used instead"
        )
    stored.path.unlink(missing_ok=True)


def find(text: str, stored: Sequence[Stored]) -> Stored:
    """The result whose digest starts with `text`, from the first of `stored` that has it.

    `TunedError` if no digest or several digests start with it.
    """
    wanted = text.lower()
    matches = [result for result in stored if wanted and digest_of(result.record.key).startswith(wanted)]
    digests = sorted({digest_of(result.record.key) for result in matches})
    if len(digests) == 1:
        return matches[0]
    if digests:
        raise TunedError(
            f"{len(digests)} tuned results have ids that start with {text!r}: {', '.join(digests)}; give more digits"
        )
    known = ", ".join(sorted({digest_of(result.record.key)[:SHORT] for result in stored})) or "none"
    raise TunedError(f"no tuned result has the id {text!r}; known: {known}; see `embforge tuned ls`")


def directory_of(where: Where, origin: Path | None = None) -> Path:
    """The directory of a store to write to."""
    if isinstance(where, Path):
        return where
    return user_dir() if where == "user" else project_dir(origin)


def _write(records: Sequence[Record], directory: Path) -> list[Written]:
    texts = [to_json([record]) for record in records]  # checks all of them before the first is written
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for record, text in zip(records, texts, strict=True):
        path = directory / file_name(record.key)
        before = read_file(path) if path.exists() else None
        write_atomically(path, text.encode())
        written.append(Written(record, path, before))
    return written
