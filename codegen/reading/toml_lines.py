"""In which line of a TOML text a value stands: what Python's parser does not tell.

The text must be one that the parser accepts; then a few tokens are all that tells where a statement ends.
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
"""A table of an array: the array's name and its place in it, from 0 on."""


def lines_of(text: str) -> dict[tuple[Entry | None, str | None], int]:
    """From an entry (None: the top of the document) and a key of it to the line, counted from 1.

    The key None is the entry itself: its `[[header]]`, or its brace in `name = [{...}, {...}]`.
    """
    found: dict[tuple[Entry | None, str | None], int] = {}
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
                found[entry, None] = begin_line
                found.setdefault((None, name), begin_line)
            elif key := _KEY.match(statement):
                found[entry, _bare(key[1])] = begin_line
                found |= {((_bare(key[1]), place), None): brace for place, brace in enumerate(braces)}
            begin, begin_line, braces = token.end(), line + 1, []
        line += word.count("\n")
    return found


def _bare(key: str) -> str:
    return key.strip("\"'")
