"""The list of banned words, the files that must not have them, and the sentences that do."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from words.prose import SUFFIXES, Prose, prose_of

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("banned.toml")
START = r"(?:\A|(?<=[.!?:]))\s*"
END_OF_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z`…])")


class Pattern(NamedTuple):
    match: re.Pattern[str]
    unless: tuple[re.Pattern[str], ...]
    """Turns of phrase in which the word is right."""
    instead: str
    why: str
    example: str
    """A sentence that the pattern finds."""


class WordList(NamedTuple):
    clean: tuple[str, ...]
    """Files and folders that have been rewritten, from the root of the repository."""
    patterns: tuple[Pattern, ...]


class Finding(NamedTuple):
    file: Path
    line: int
    sentence: str
    words: str
    pattern: Pattern


def read_list(path: Path = LIST) -> WordList:
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    patterns = [
        Pattern(
            _compiled(entry["match"]),
            tuple(map(_compiled, entry.get("unless", ()))),
            entry["instead"],
            entry["why"],
            entry["example"],
        )
        for entry in data["pattern"]
    ]
    return WordList(tuple(data["clean"]), tuple(patterns))


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace("START ", START).replace(" ", r"\s+"))


def clean_files(words: WordList) -> list[Path]:
    """The files of the clean rooms. A room that does not exist is a mistake in the list."""
    found: dict[Path, None] = {}
    for room in words.clean:
        if not (ROOT / room).exists():
            raise FileNotFoundError(f"{LIST}: clean = [... {room!r} ...]: there is no such file or folder")
        found |= dict.fromkeys(files_in(ROOT / room))
    return list(found)


def files_in(path: Path) -> list[Path]:
    """A file, or all files with English in a folder; not fixtures, which hold what earlier versions wrote."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and "fixtures" not in file.parts)


def findings(file: Path, patterns: Sequence[Pattern]) -> Iterator[Finding]:
    """What is not plain English in a file, in the order of its lines."""
    for prose in prose_of(file):
        for pattern in patterns:
            right = [match.span() for exception in pattern.unless for match in exception.finditer(prose.text)]
            for match in pattern.match.finditer(prose.text):
                if not any(begin < match.end() and match.start() < end for begin, end in right):
                    position = match.end() - len(match[0].lstrip())
                    sentence = _sentence_at(prose, position)
                    yield Finding(file, prose.line_at(position), sentence, " ".join(match[0].split()), pattern)


def _sentence_at(prose: Prose, position: int) -> str:
    begin = max(
        (m.end() for m in END_OF_SENTENCE.finditer(prose.text, 0, position + 1) if m.end() <= position), default=0
    )
    end = END_OF_SENTENCE.search(prose.text, position)
    return " ".join(prose.text[begin : end.start() if end else None].split())
