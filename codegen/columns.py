"""Filters for templates that line up generated text in columns, as a person would."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"-?\d+")
_COMMENT = re.compile(r"(?<=\S)  // ")
_SEPARATOR = ", "


def aligned_comments(text: str) -> str:
    """The lines of a text, with the comments after code in one column."""
    lines = [_COMMENT.split(line, maxsplit=1) for line in text.splitlines()]
    width = max((len(code) for code, *comment in lines if comment), default=0)
    return "".join(f"{code:<{width}}  // {comment[0]}\n" if comment else f"{code}\n" for code, *comment in lines)


def aligned_rows(text: str) -> str:
    """The rows of an array of structures, `{1, a},  // comment`, with each field in a column of its own.

    The first line is a comment with the names of the fields, which become the heads of the columns. Numbers are aligned
    to the right, words to the left.
    """
    head, *rows = text.splitlines()
    indent = " " * (len(head) - len(head.lstrip()))
    parts = [_COMMENT.split(row.strip(), maxsplit=1) for row in rows]
    fields = [code.removeprefix("{").removesuffix("},").split(_SEPARATOR) for code, *_ in parts]
    # The marks that begin a comment are two characters wider
    # than a row's brace: the first name has that much less room.
    names, *cells = _in_columns([f"  {head.strip().removeprefix('// ')}".split(_SEPARATOR), *fields])
    lines = ["  // ".join([f"{indent}{{{row}}},", *comment]) for row, (_, *comment) in zip(cells, parts, strict=True)]
    return aligned_comments("\n".join([f"{indent}//{names[1:]}", *lines]))


def _in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    columns = []
    for number, (name, *cells) in enumerate(zip(*rows, strict=True), 1):
        width = max(map(len, (name, *cells)))
        is_last = number == len(rows[0])
        if all(map(_NUMBER.fullmatch, cells)):
            columns.append([cell.rjust(width) + "," * (not is_last) for cell in (name, *cells)])
        else:
            columns.append([cell if is_last else f"{cell},".ljust(width + 1) for cell in (name, *cells)])
    return [" ".join(row) for row in zip(*columns, strict=True)]
