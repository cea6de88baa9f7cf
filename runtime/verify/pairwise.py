"""Small sets of combinations in which any two choices of any two fields occur together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

Pair = tuple[tuple[str, int], tuple[str, int]]


def covering(fields: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Combinations, with one value per field, that cover all pairs of values. The result is always the same.

    The algorithm is greedy: it does not find the smallest set.
    """
    names = sorted(
        fields, key=lambda name: -len(fields[name])
    )  # the two fields with most values need most combinations
    if len(names) < 2:
        return [{name: value} for name in names for value in fields[name]]
    missing: dict[Pair, None] = {
        ((a, i), (b, j)): None
        for a, b in combinations(names, 2)
        for i in range(len(fields[a]))
        for j in range(len(fields[b]))
    }
    rows = []
    while missing:
        row = dict(next(iter(missing)))  # a missing pair, and then the choices that cover most other missing pairs
        for name in names:
            if name not in row:
                gains = [_gain(row, name, i, names, missing) for i in range(len(fields[name]))]
                row[name] = gains.index(max(gains))
        for a, b in combinations(names, 2):
            missing.pop(((a, row[a]), (b, row[b])), None)
        rows.append({name: fields[name][row[name]] for name in names})
    return rows


def _gain(row: dict[str, int], name: str, index: int, names: list[str], missing: dict[Pair, None]) -> int:
    """The number of missing pairs that the row would cover if this field had this choice."""
    own = (name, index)
    pairs = ((own, (n, i)) if names.index(name) < names.index(n) else ((n, i), own) for n, i in row.items())
    return sum(pair in missing for pair in pairs)
