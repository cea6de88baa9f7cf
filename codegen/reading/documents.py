"""Files that were given to us, and may therefore hold anything: each is opened and parsed here, in one way.

What a reader returns is plain data that is safe to walk through and to print: of bounded size and depth, its text
Unicode. Anything else is one `DocumentError`, which says what is wrong and does not know the file: a loader catches it
and says which file, of what kind, and what to do.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from embforge.codegen.errors import EmbforgeError

MOST_BYTES = 2**26
"""The most bytes of a document: far more than we ever write, far less than what would hurt."""
MOST_DEPTH = 32
"""The most levels of nested objects. Ours have at most six; some Python functions fail from a few hundred on."""
MOST_SHOWN = 80
"""Characters of a value in a message."""


class DocumentError(EmbforgeError, ValueError):
    """What is wrong with a file's content, without the file's name."""

    def __init__(self, what: str, line: int | None = None) -> None:
        super().__init__(what)
        self.line = line
        """Where in the text, if that is known."""


def read_file(path: Path, most: int = MOST_BYTES) -> bytes:
    """All bytes of a regular file. `FileNotFoundError` if there is none, `DocumentError` for anything else.

    A pipe is not waited for, and a device is not read: both could keep us for ever.
    """
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise DocumentError("it is a pipe or a device, and not a regular file")
            data = file.read(most + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DocumentError(error.strerror or str(error)) from error
    except ValueError as error:  # a name that no file can have
        raise error if isinstance(error, DocumentError) else DocumentError(str(error)) from error
    if len(data) > most:
        raise DocumentError(f"it has more than {most:,} bytes")
    return data


def text_of(data: bytes) -> str:
    """UTF-8 text, whatever its line ends, with or without a byte order mark."""
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DocumentError(f"it is not UTF-8 text: byte 0x{data[error.start]:02x} in line {line}", line) from None


def parse_json(text: str | bytes) -> Any:
    """The data of a JSON text."""
    return _parsed(text_of(text) if isinstance(text, bytes) else text, json.loads, "JSON")


def parse_toml(text: str) -> dict[str, Any]:
    """The data of a TOML text."""
    found: dict[str, Any] = _parsed(text, tomllib.loads, "TOML")
    return found


def read_json(path: Path) -> Any:
    """The data of a JSON file."""
    return parse_json(read_file(path))


def read_toml(path: Path) -> dict[str, Any]:
    """The data of a TOML file."""
    return parse_toml(text_of(read_file(path)))


def shown(value: Any) -> str:
    """A value as a message shows it: in Python's form, however long it is or strange."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


def is_file_name(value: Any) -> bool:
    """Whether this is the name of a file in the document's own directory, and no way out of it."""
    return isinstance(value, str) and value not in ("", ".", "..") and not re.search(r"[/\\\0]", value)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _parsed(text: str, parse: Callable[[str], Any], language: str) -> Any:
    try:
        data = parse(text)
    except RecursionError:
        raise DocumentError(f"it is nested deeper than {MOST_DEPTH} levels") from None
    except (ValueError, OverflowError) as error:
        line, message = _line_of(error, text), str(error)
        place = "" if line is None or re.search(r"line \d", message) else f" in line {line}"
        raise DocumentError(f"it is not {language}: {message}{place}", line) from None
    _check(data)
    return data


def _line_of(error: Exception, text: str) -> int | None:
    """tomllib tells the line in its message only, and of a text that ends too early nothing."""
    if isinstance(error, json.JSONDecodeError):
        return error.lineno
    if found := re.search(r"at line (\d+)", str(error)):
        return int(found[1])
    return text.rstrip("\n").count("\n") + 1 if "end of document" in str(error) else None


def _check(data: Any) -> None:
    """Without recursion, which is what deep data would exhaust."""
    level = [data]
    for _ in range(MOST_DEPTH):
        deeper: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                deeper += value.keys()
                deeper += value.values()
            elif isinstance(value, list):
                deeper += value
            elif isinstance(value, str):
                _check_text(value)
        if not deeper:
            return
        level = deeper
    raise DocumentError(f"it is nested deeper than {MOST_DEPTH} levels")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a pair, as in "\ud800": nothing can print it
        raise DocumentError(f"it holds text that is no Unicode: {shown(text)}") from None
