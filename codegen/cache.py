"""The cache of binaries, on disk, by content hash, shared by all processes of a user.

    <cache>/kernels/<uri>/<key>/kernel.cu  kernel.cubin  entry.json  [resources.json]

An entry is complete when it has an `entry.json`, which is written last and names the hashes of the other files. Files
that do not match are never loaded but built again. Modification times and search paths do not matter.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock, Timeout

from embforge.codegen.errors import CacheError
from embforge.codegen.reading.documents import read_file, read_json

CACHE_SCHEMA = "1"
"""The version of the format of an entry, raised whenever its files change their meaning."""

KEY_DIGITS = 12
MOST_BYTES = 2**30
"""The most bytes of a source or a binary: far more than any compiler has produced."""
LOCK_TIMEOUT = 300.0
"""Seconds to wait for another process that builds the same kernel: longer than any known compilation."""

DAMAGE = (OSError, ValueError, KeyError, TypeError)
"""The exceptions of reading a damaged file of the cache."""


@dataclass(frozen=True)
class Entry:
    """One kernel on disk: a source and a binary whose hashes have been checked."""

    directory: Path
    source: Path
    binary: Path
    sha256: str
    """The hash of the binary."""


@dataclass(frozen=True)
class Recipe:
    """What to look up or to build. The key is a hash of everything that determines the binary."""

    uri: str
    key: str
    source: str
    source_suffix: str
    binary_suffix: str
    compile: Callable[[Path], bytes]


def key_of(fields: Mapping[str, str]) -> str:
    """SHA-256 over labelled, length-prefixed fields in label order, so that different fields have different texts."""
    digest = hashlib.sha256()
    for label in sorted(fields):
        for part in (label.encode(), fields[label].encode()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def cache_dir() -> Path:
    """`EMBFORGE_CACHE_DIR`, or the platform's cache directory, or a private one if that cannot be written.

    `CacheError` if the private directory belongs to someone else or is open to others.
    """
    if chosen := os.environ.get("EMBFORGE_CACHE_DIR"):
        return Path(chosen).expanduser().absolute()
    usual = Path(platformdirs.user_cache_dir("embforge", appauthor=False))
    return usual if _writable(usual) else _private_dir()


def entry_dir(recipe: Recipe, root: Path | None = None) -> Path:
    """The directory in which the recipe's entry is or would be."""
    return (root or cache_dir()) / "kernels" / recipe.uri / recipe.key[:KEY_DIGITS]


def load(directory: Path, key: str | None = None) -> Entry | None:
    """The entry in a directory, or None if it is missing, unfinished, damaged or has a different key."""
    try:
        record = read_json(directory / "entry.json")
        entry = Entry(directory, directory / record["source"], directory / record["binary"], record["binary_sha256"])
        if record["schema"] != CACHE_SCHEMA or key not in (None, record["key"]):
            return None
        if sha256_of(read_file(entry.source, MOST_BYTES)) != record["source_sha256"]:
            return None
        if sha256_of(read_file(entry.binary, MOST_BYTES)) != entry.sha256:
            return None
    except DAMAGE:  # missing, or not what `_make` wrote: build it again
        return None
    return entry


def fetch(recipe: Recipe, *, lock_timeout: float = LOCK_TIMEOUT) -> tuple[Entry, bool]:
    """The recipe's entry, and whether it existed already.

    If several processes need it at the same time, one builds: look up -> lock -> look up again -> build. If a process
    does not get the lock in time, or cannot write to the cache, it builds for itself and warns.
    """
    directory = entry_dir(recipe)
    if entry := load(directory, recipe.key):
        return entry, True
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(directory.with_suffix(".lock"), timeout=lock_timeout)
        lock.acquire()
    except Timeout:
        return _make_privately(recipe, f"another process has held its lock for {lock_timeout:g} s"), False
    except (OSError, NotImplementedError) as error:  # read-only cache, or a file system without locks
        return _make_privately(recipe, str(error)), False
    try:
        if entry := load(directory, recipe.key):
            return entry, True
        return _make(recipe, directory), False
    except OSError as error:  # e.g. a full disk
        return _make_privately(recipe, str(error)), False
    finally:
        lock.release()


def load_resources(entry: Entry, reader: str) -> list[dict[str, Any]] | None:
    """The resource figures stored with the entry's binary, or None if there are none of exactly this binary.

    `reader` is the version of the code that read them from the binary; a different version reads them again.
    """
    try:
        record = read_json(entry.directory / "resources.json")
        kernels: list[dict[str, Any]] = record["kernels"]
        return kernels if (record["binary_sha256"], record["reader"]) == (entry.sha256, reader) else None
    except DAMAGE:  # absent or damaged: the caller measures again
        return None


def store_resources(entry: Entry, reader: str, kernels: list[dict[str, Any]]) -> None:
    """Stores resource figures with the binary; does nothing but warn if the cache cannot be written."""
    record = {"binary_sha256": entry.sha256, "reader": reader, "kernels": kernels}
    try:
        write_atomically(entry.directory / "resources.json", _json(record))
    except OSError as error:
        warnings.warn(f"resource figures of {entry.binary} are not kept: {error}", stacklevel=2)


def entries(root: Path | None = None) -> Iterator[Entry]:
    """All complete entries of the cache, by URI."""
    for record in sorted(((root or cache_dir()) / "kernels").glob("*/*/entry.json")):
        if entry := load(record.parent):
            yield entry


def clear(root: Path | None = None) -> int:
    """Removes every kernel of the cache and returns the number of bytes freed."""
    kernels = (root or cache_dir()) / "kernels"
    freed = sum(path.stat().st_size for path in kernels.rglob("*") if path.is_file())
    if kernels.exists():
        shutil.rmtree(kernels)
    return freed


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file in one step: readers see the old content or the whole new one, never a part."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _make(recipe: Recipe, directory: Path) -> Entry:
    # The source is in its final place before the compiler runs, so that the path in a compile error stays valid.
    source = directory / f"kernel{recipe.source_suffix}"
    binary = directory / f"kernel{recipe.binary_suffix}"
    for path in (source, binary, directory / "entry.json"):
        if path.is_dir() and not path.is_symlink():  # a file cannot replace a directory
            shutil.rmtree(path)
    write_atomically(source, recipe.source.encode())
    data = recipe.compile(source)
    write_atomically(binary, data)
    record = {
        "schema": CACHE_SCHEMA,
        "uri": recipe.uri,
        "key": recipe.key,
        "source": source.name,
        "source_sha256": sha256_of(recipe.source.encode()),
        "binary": binary.name,
        "binary_sha256": sha256_of(data),
    }
    write_atomically(directory / "entry.json", _json(record))
    return Entry(directory, source, binary, record["binary_sha256"])


def _make_privately(recipe: Recipe, reason: str) -> Entry:
    warnings.warn(f"kernel {recipe.uri} is built for this process only: {reason}", stacklevel=3)
    try:
        directory = Path(tempfile.mkdtemp(prefix="embforge-build-"))
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        return _make(recipe, directory)
    except OSError as error:
        raise CacheError(
            f"kernel {recipe.uri} can be kept neither in the cache ({reason}) nor in a temporary directory ({error}); "
            "free some space, or set EMBFORGE_CACHE_DIR or TMPDIR to a directory that has some"
        ) from error


def _writable(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK | os.X_OK)


def _private_dir() -> Path:
    owner = os.getuid() if hasattr(os, "getuid") else None
    directory = Path(tempfile.gettempdir()) / f"embforge-{'user' if owner is None else owner}"
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise CacheError(f"{directory} is not a directory; set EMBFORGE_CACHE_DIR to a directory of your own")
    if owner is not None and (status.st_uid != owner or status.st_mode & 0o077):
        raise CacheError(
            f"{directory} belongs to user {status.st_uid} with permissions {stat.S_IMODE(status.st_mode):04o}: anyone "
            "who can write there could make this process run other code; set EMBFORGE_CACHE_DIR to a directory of your "
            "own"
        )
    return directory


def _json(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, indent=2) + "\n").encode()
