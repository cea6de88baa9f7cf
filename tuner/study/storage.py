"""Storages of studies, by URL: a SQLite file by default, any database that SQLAlchemy supports, or a journal.

studies.sqlite3, sqlite:////tmp/studies.sqlite3        a file, for one machine
postgresql+psycopg://user:password@host/database       for several machines
journal:///shared/studies.log                          a log file, also where a network's file locks do not work
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from filelock import FileLock
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, get_storage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from sqlalchemy import URL, event, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError, StatementError

from embforge.codegen.errors import EmbforgeError
from embforge.codegen.tuned.stores import user_dir

DEFAULT_FILE = "studies.sqlite3"
BUSY_SECONDS = 60.0
"""Seconds for which a process waits for another one's write to SQLite."""
OPEN_ATTEMPTS = 5
"""How often to try: two processes that create the tables of an empty database at the same time may fail once."""
TAIL_BYTES = 65536
"""Bytes that are read at a time to find the end of a journal's last whole line."""

DRIVERS = {
    "psycopg": "psycopg[binary]",
    "psycopg2": "psycopg2-binary",
    "pymysql": "pymysql",
    "MySQLdb": "mysqlclient",
}
"""What to install if a module is missing."""
FORMS = "a SQLite file, sqlite:///FILE, postgresql+psycopg://USER:PASSWORD@HOST/NAME, journal:///FILE"


class StorageError(EmbforgeError, RuntimeError):
    """A study storage cannot be used. The message has the URL (without its password), the reason and the remedy."""


def default_url() -> str:
    """`EMBFORGE_STUDIES` (a file or a URL), or by default a SQLite file in the user's store of tuned results."""
    return os.environ.get("EMBFORGE_STUDIES") or str(user_dir() / DEFAULT_FILE)


def open_storage(url: str | None = None) -> BaseStorage:
    """The storage of a URL or a SQLite file's path (None: `default_url()`). `StorageError` if it cannot be used."""
    quiet_optuna()
    text = url or default_url()
    what = f"study storage {masked(text)}"
    scheme, separator, rest = text.partition("://")
    with storage_errors(what):
        try:
            if scheme == "journal" and separator:
                return _journal_file(Path(rest).expanduser().absolute())
            parsed = make_url(text) if separator else URL.create("sqlite", database=text)
            if "@" in (parsed.host or ""):  # everything before it is a part of the password
                raise StorageError(f"{what}: two @ before the host; write an @ of the password as %40")
            on_disk = parsed.get_backend_name() == "sqlite" and parsed.database not in (None, "", ":memory:")
            return _sqlite(parsed) if on_disk else get_storage(_database(parsed))
        except ImportError as error:
            missing = _missing_module(error)
            remedy = f"pip install '{DRIVERS.get(missing, missing)}'" if missing else "install what it misses"
            raise StorageError(f"{what}: no driver for {scheme} ({missing or _reason(error)}); {remedy}") from error
        except (ArgumentError, ValueError) as error:
            raise StorageError(f"{what}: not a URL of a storage; allowed: {FORMS}") from error
        except StorageError:
            raise
        except (OSError, RuntimeError) as error:
            raise _unusable(what, error) from error


@contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Turns exceptions of a storage that cannot be reached or written into a `StorageError` about `what`."""
    try:
        yield
    except (StorageInternalError, SQLAlchemyError) as error:
        raise _unusable(what, error) from error


def quiet_optuna() -> None:
    """Optuna reports every trial, and so does the tuner."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def masked(text: str) -> str:
    """The text without passwords of URLs. It hides too much rather than too little."""
    text = re.sub(r"(://[^:/@]*):.*@", r"\1:***@", text)
    return re.sub(r"((?:password|passwd|pwd)=)[^&\s]*", r"\1***", text, flags=re.IGNORECASE)


def _unusable(what: str, error: BaseException) -> StorageError:
    return StorageError(
        f"{what}: cannot be used: {_reason(error)}; check that it exists and can be written, "
        "or name another by --storage or EMBFORGE_STUDIES"
    )


def _reason(error: BaseException) -> str:
    """The first line of the original error, which Optuna wraps into a sentence about something else."""
    cause = error.__cause__ if isinstance(error, StorageInternalError | ImportError) else None
    lines = str(cause or error).strip().splitlines()
    return masked(lines[0]) if lines else type(error).__name__


def _sqlite(url: URL) -> BaseStorage:
    path = Path(url.database or "").expanduser().absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(path.name + ".lock"), timeout=BUSY_SECONDS):  # one process makes the tables
        storage = _database(url.set(database=str(path)), connect_args={"timeout": BUSY_SECONDS})
        event.listen(storage.engine, "connect", _on_connect)
        event.listen(storage.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
        storage.scoped_session.remove()
        storage.engine.dispose()  # connections made so far are not as we want them
        with storage.engine.begin() as connection:  # a file that cannot be written is found out now
            connection.exec_driver_sql("UPDATE alembic_version SET version_num = version_num")
    return get_storage(storage)


def _on_connect(connection: Any, _record: Any) -> None:
    # Python's own transactions begin at the first write: what was read before may be old by then, and two processes
    # would both take the same waiting trial. `BEGIN IMMEDIATE` makes read-then-write one step.
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")  # with WAL no kill loses a commit; only a power cut may


def _journal_file(path: Path) -> BaseStorage:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return JournalStorage(JournalFileBackend(str(path), _MendingLock(str(path))))
    except (ValueError, LookupError, TypeError, AssertionError) as error:  # whatever its lines make of Optuna
        raise StorageError(f"study storage {path}: not a journal of studies; name another file") from error


class _MendingLock(JournalFileSymlinkLock):
    """Removes a last line without an end, which a killed process left: the next line would spoil the journal."""

    def acquire(self) -> bool:
        super().acquire()
        try:
            _drop_torn_line(Path(self._lock_target_file))
        except BaseException:
            self.release()
            raise
        return True


def _drop_torn_line(path: Path) -> None:
    with path.open("rb+") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - TAIL_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)


def _database(url: URL, **engine: Any) -> RDBStorage:
    options = {"pool_pre_ping": True, **engine}  # a server may have gone away during a long measurement
    text = url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")  # Optuna formats it
    for attempt in range(OPEN_ATTEMPTS):
        try:
            return RDBStorage(text, engine_kwargs=options)
        except StatementError as error:
            if error.statement is None or attempt == OPEN_ATTEMPTS - 1:  # without one there was no connection
                raise
            time.sleep(random.uniform(0.1, 0.4))
    raise AssertionError("not reached")


def _missing_module(error: BaseException | None) -> str:
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            return error.name
        error = error.__cause__ or error.__context__
    return ""
