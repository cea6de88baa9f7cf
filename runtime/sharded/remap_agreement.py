"""The check that all ranks turn ids into the same rows: every header carries a digest of each remap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from embforge.codegen.errors import RankError
from embforge.storage.remap import Remap, digests_of

_DIGITS = 15
"""The hexadecimal digits of a digest that fit into a word of a header, which is a signed int64."""


class _Known(NamedTuple):
    """A digest, and the tensor in the state whose digest it is."""

    entries: Tensor
    version: int
    word: int

    def holds_for(self, entries: Tensor) -> bool:
        return entries is self.entries and _version(entries) == self.version


@dataclass(frozen=True)
class RemapDigests:
    """Digests of a rank's remaps, one word per remapped table, in the order of the tables.

    Reading all entries in every call would take longer than the call, so a digest is computed again only after its
    entries were written or replaced.
    """

    remaps: Mapping[str, Remap]
    _known: dict[str, _Known] = field(default_factory=dict, compare=False, repr=False)

    def words(self) -> list[int]:
        """The digests of the entries as they are now."""
        return [self._word(name, remap) for name, remap in self.remaps.items()]

    def compare(self, words_of_ranks: NDArray[np.int64]) -> None:
        """Raises RankError if ranks differ in `[ranks, remapped tables]`, which every rank has alike."""
        differs = words_of_ranks != words_of_ranks[0]
        if not differs.any():
            return
        tables = [name for name, column in zip(self.remaps, differs.T, strict=True) if column.any()]
        ranks = differs.any(axis=1).nonzero()[0].tolist()
        raise RankError(
            f"remap: ranks differ: the entries of {_listed('table', [repr(name) for name in tables])} on "
            f"{_listed('rank', ranks)} are not those of rank 0, so equal ids would have different rows; no rank has "
            "looked anything up. Call set_remap(table, entries) with the same entries on every rank, or load a state "
            "dict that has them"
        )

    def _word(self, name: str, remap: Remap) -> int:
        known, entries = self._known.get(name), remap.entries
        if known is None or not known.holds_for(entries):
            version = _version(entries)
            known = _Known(entries, version, int(digests_of({name: remap})[name][:_DIGITS] or "0", 16))
            self._known[name] = known
        return known.word


def _version(entries: Tensor) -> int:
    """How often a tensor was written. Inference tensors do not count."""
    return 0 if entries.is_inference() else entries._version


def _listed(what: str, names: Sequence[object]) -> str:
    return f"{what}{'s' if len(names) > 1 else ''} {', '.join(map(str, names))}"
