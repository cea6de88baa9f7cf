"""Suggestions for misspelt names in error messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

MOST_LISTED = 30
SHORTEST_BEGINNING = 3
"""A word of at least this many letters may be the beginning of a name."""


def did_you_mean(word: Any, names: Iterable[str], synonyms: Mapping[str, str] | None = None) -> str:
    """` (did you mean 'dtype'?)` for a word that is similar to a name, begins exactly one name, or is a synonym of one.

    Otherwise an empty text. Upper and lower case are the same. `synonyms` maps words of other libraries to our names.
    """
    if not isinstance(word, str):
        return ""
    known = {name.lower(): name for name in names}
    meant = known.get((synonyms or {}).get(word.lower(), ""))
    if meant is None:
        alike = [name for name in known if _digits(name) == _digits(word)]  # fp64 is not a typing error for fp16
        close = get_close_matches(word.lower(), alike, n=1, cutoff=0.7)
        begun = [name for name in known if name.startswith(word.lower())] if len(word) >= SHORTEST_BEGINNING else []
        meant = known[close[0]] if close else known[begun[0]] if len(begun) == 1 else None
    return "" if meant is None else f" (did you mean {meant!r}?)"


def listed(names: Iterable[str]) -> str:
    """The names that follow `allowed:` in an error; only the first ones if there are many."""
    all_names = list(names)
    more = len(all_names) - MOST_LISTED
    return ", ".join(all_names[:MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def _digits(word: str) -> str:
    return "".join(filter(str.isdigit, word))
