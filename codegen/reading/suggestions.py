"""What a misspelt name probably was, for the errors that tell which names there are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

MOST_LISTED = 30


def did_you_mean(word: Any, names: Iterable[str], synonyms: Mapping[str, str] | None = None) -> str:
    """` (did you mean 'dtype'?)` for a word that is nearly one of the names, or a synonym of one; else nothing.

    Upper and lower case count as equal. `synonyms` maps words that other libraries use to our names.
    """
    if not isinstance(word, str):
        return ""
    known = {name.lower(): name for name in names}
    meant = known.get((synonyms or {}).get(word.lower(), ""))
    if meant is None:
        alike = [name for name in known if _digits(name) == _digits(word)]  # fp64 is no slip for fp16
        close = get_close_matches(word.lower(), alike, n=1, cutoff=0.7)
        meant = known[close[0]] if close else None
    return "" if meant is None else f" (did you mean {meant!r}?)"


def listed(names: Iterable[str]) -> str:
    """The names of an error's `allowed:`, the first of them if they are many."""
    all_names = list(names)
    more = len(all_names) - MOST_LISTED
    return ", ".join(all_names[:MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def _digits(word: str) -> str:
    return "".join(filter(str.isdigit, word))
