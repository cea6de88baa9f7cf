"""A small set of combinations in which any two choices of any two fields meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

Pair = tuple[tuple[str, int], tuple[str, int]]


def covering(fields: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Combinations (a value a field) that cover all pairs of values. Greedy, and the same every time."""
    names = sorted(fields, key=lambda name: -len(fields[name]))  # the two widest alone decide how many there must be
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
        row = dict(next(iter(missing)))  # a pair that is still missing, then what brings the most others
        for name in names:
            if name not in row:
                gains = [_gain(row, name, i, names, missing) for i in range(len(fields[name]))]
                row[name] = gains.index(max(gains))
        for a, b in combinations(names, 2):
            missing.pop(((a, row[a]), (b, row[b])), None)
        rows.append({name: fields[name][row[name]] for name in names})
    return rows


def _gain(row: dict[str, int], name: str, index: int, names: list[str], missing: dict[Pair, None]) -> int:
    """Missing pairs that the row would cover if this field took this choice."""
    own = (name, index)
    pairs = ((own, (n, i)) if names.index(name) < names.index(n) else ((n, i), own) for n, i in row.items())
    return sum(pair in missing for pair in pairs)
