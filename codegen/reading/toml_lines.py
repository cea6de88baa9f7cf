"""The lines of a TOML text in which its values are written, which Python's parser does not report.

The text must be one that the parser accepts; a few kinds of tokens then suffice to find where a statement ends.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}'  # strings of several lines, which may end with quotes of their own
    r"|'''.*?'{3,5}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|\#[^\n]*"
    r"|[\[\]{}\n]",
    re.DOTALL,
)
_HEADER = re.compile(r"\s*\[\[?\s*(.*?)\s*\]\]?")
_KEY = re.compile(r"\s*([^=]*?)\s*=")

Entry = tuple[str, int]
"""An element of an array of tables: the array's name and the element's index."""


def lines_of(text: str) -> dict[tuple[Entry | None, str | None], int]:
    """Line numbers, from 1, by entry (None: the top of the document) and key.

    The key None is the entry itself: its `[[header]]`, or its brace in `name = [{...}, {...}]`.
    """
    lines: dict[tuple[Entry | None, str | None], int] = {}
    counts: dict[str, int] = {}
    entry: Entry | None = None
    line, begin, begin_line, depth, braces = 1, 0, 1, 0, list[int]()
    for token in _TOKEN.finditer(text + "\n"):
        word = token[0]
        if word in "[{":
            if word == "{" and depth == 1:
                braces.append(line)
            depth += 1
        elif word in "]}":
            depth -= 1
        elif word == "\n" and depth == 0:
            statement = text[begin : token.start()]
            if header := _HEADER.match(statement):
                name = _bare(header[1])
                entry = (name, counts.get(name, 0))
                counts[name] = entry[1] + 1
                lines[entry, None] = begin_line
                lines.setdefault((None, name), begin_line)
            elif key := _KEY.match(statement):
                lines[entry, _bare(key[1])] = begin_line
                lines |= {((_bare(key[1]), index), None): brace for index, brace in enumerate(braces)}
            begin, begin_line, braces = token.end(), line + 1, []
        line += word.count("\n")
    return lines


def _bare(key: str) -> str:
    return key.strip("\"'")
