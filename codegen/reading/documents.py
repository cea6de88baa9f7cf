"""Readers of JSON and TOML files that come from outside and may therefore hold anything.

A reader returns plain data that is safe to walk through and to print: its size and depth are bounded, and its text is
Unicode. For anything else it raises a `DocumentError`, which says what is wrong but does not know the file's purpose:
a loader catches it and adds which file it is, of what kind, and what to do.
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
"""The most bytes of a document: far more than embforge ever writes, far fewer than would exhaust memory."""
MOST_DEPTH = 32
"""The most levels of nested objects. Documents of embforge have at most six; some Python functions fail from a few
hundred on."""
MOST_SHOWN = 80
"""The most characters of a value in a message."""


class DocumentError(EmbforgeError, ValueError):
    """What is wrong with a file's content, without the file's name."""

    def __init__(self, what: str, line: int | None = None) -> None:
        super().__init__(what)
        self.line = line
        """The line of the text where it is wrong, if that is known."""


def read_file(path: Path, most: int = MOST_BYTES) -> bytes:
    """All bytes of a regular file. `FileNotFoundError` if there is none, `DocumentError` for anything else.

    It does not wait for a pipe and does not read a device, because neither may ever end.
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
    data: dict[str, Any] = _parsed(text, tomllib.loads, "TOML")
    return data


def read_json(path: Path) -> Any:
    """The data of a JSON file."""
    return parse_json(read_file(path))


def read_toml(path: Path) -> dict[str, Any]:
    """The data of a TOML file."""
    return parse_toml(text_of(read_file(path)))


def shown(value: Any) -> str:
    """A value as messages show it: Python's `repr`, cut if it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


def is_file_name(value: Any) -> bool:
    """Whether a value is the plain name of a file in the document's own directory, not a path that leads elsewhere."""
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
        raise DocumentError(f"it is not {language}: {_cut(message)}{place}", line) from None
    _check(data)
    return data


def _cut(message: str) -> str:
    """A parser's message, cut in its middle if it is long: it may quote a key of any length; its end has the place."""
    return message if len(message) <= 3 * MOST_SHOWN else f"{message[:MOST_SHOWN]} ... {message[-MOST_SHOWN:]}"


def _line_of(error: Exception, text: str) -> int | None:
    """The line of a parser's error. tomllib has it in the message only, and not for a text that ends too early."""
    if isinstance(error, json.JSONDecodeError):
        return error.lineno
    if match := re.search(r"at line (\d+)", str(error)):
        return int(match[1])
    return text.rstrip("\n").count("\n") + 1 if "end of document" in str(error) else None


def _check(data: Any) -> None:
    """Checks depth and texts, level by level: recursion would fail on deep data."""
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
    except UnicodeEncodeError:  # half of a surrogate pair, such as "\ud800", which cannot be printed
        raise DocumentError(f"it holds text that is not Unicode: {shown(text)}") from None
