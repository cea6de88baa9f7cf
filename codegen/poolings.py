"""Every pooling, which combines the rows of a bag to its result, with the facts that the rest of the project needs.

No other file names single poolings: specs, layouts, templates, stages and references read the facts of a `Pooling`. To
add one, add an entry to `POOLINGS`, its name to `PoolingName`, and tests. If its rows combine in a new way, add a
`Combiner`, too. A new division of sums also needs a `Divisor` and code where results are divided; a new comparison (one
that `Combiner.order` does not have) needs a case in `is_kept` of templates/shared/selections.j2 and in `stays` of
runtime/launch/reference/forward.py, and another start of bags if no number always loses. CONTRIBUTING.md lists tests
and pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Literal

from embforge.codegen.errors import SpecError
from embforge.codegen.reading.suggestions import did_you_mean

PoolingName = Literal["sum", "mean", "sqrtn", "max", "min", "concat", "none"]
"""The keys of `POOLINGS`, for static checkers. A test compares the two."""

Kept = Literal["divisor", "winner"]
"""What a forward keeps for its backward: the number by which a bag's sum was divided, or for each column the position
of the id whose row was selected."""

Result = Literal["summed", "divided", "rooted", "selected", "concat", "sequence"]
RESULTS: tuple[Result, ...] = ("summed", "divided", "rooted", "selected", "concat", "sequence")
"""The cases that generated code distinguishes at run time, in the order of its `enum Pooling`."""

DIVIDE = 1
"""The action of stage kernels that add partial pools and divide; actions without a division belong to combiners."""


class Shape(Enum):
    """The shape of a feature's result."""

    POOLED = "pooled"
    """One row for each bag."""
    CONCAT = "concat"
    """One row for each bag, with a slot per id up to the feature's hotness: the bag's rows in order, then zeros."""
    SEQUENCE = "sequence"
    """One row for each id, in a result of its own."""


class Divisor(IntEnum):
    """The number by which a bag's sum is divided. Stage kernels get the member's value, or 0 for no division."""

    WEIGHTS = 1
    """The sum of the weights, or without weights the number of ids."""
    ROOT = 2
    """The square root of the sum of the squared weights, or without weights of the number of ids."""


@dataclass(frozen=True)
class Combiner:
    """The operation that makes one row of two, column by column."""

    name: str
    """Its name, which is also that of buckets of features with this inner loop in generated code."""
    identity: float
    """The number with which a bag begins. Selecting from it and any number gives that number, bit for bit."""
    action: int
    """The number by which stage kernels know this way of combining partial pools."""
    order: int = 0
    """0: rows are added. 1: the largest number of each column is selected; -1: the smallest. The first of equal numbers
    wins, and NaN stays. Selections are exact in any order, and know which id won."""

    def __post_init__(self) -> None:
        starts = {0: 0.0, 1: -math.inf, -1: math.inf}
        if starts.get(self.order) != self.identity:
            raise AssertionError(
                f"combiner {self.name!r}: order {self.order} and identity {self.identity}; allowed: order 0 from 0.0 "
                f"(added), 1 from -inf (largest), -1 from inf (smallest)"
            )

    @property
    def selects(self) -> bool:
        """Whether one row wins each column."""
        return self.order != 0

    @property
    def type_name(self) -> str:
        """The name of its struct in generated code."""
        return self.name.title()

    @property
    def comparison(self) -> str:
        """The operator of C++ that is true for a selected number and a later one if the selected one stays."""
        return {1: ">=", -1: "<="}[self.order]


SUM = Combiner("sum", 0.0, action=0)
MAX = Combiner("max", -math.inf, action=2, order=1)
MIN = Combiner("min", math.inf, action=3, order=-1)
COMBINERS = (SUM, MAX, MIN)

SELECTING = {combiner.action: combiner for combiner in COMBINERS if combiner.selects}
"""The combiners that select, by action."""


@dataclass(frozen=True)
class Pooling:
    """One way to make a bag's result from its rows."""

    name: PoolingName
    meaning: str
    """How a bag's rows are combined, as the description of the spec's field says it."""
    shape: Shape = Shape.POOLED
    combiner: Combiner | None = None
    """How rows are combined; None: they stay separate."""
    divisor: Divisor | None = None
    """The number by which a sum is divided; None: it is not."""
    synonyms: tuple[str, ...] = ()
    """Words that users may try instead of the name, for a hint in the error."""

    def __post_init__(self) -> None:
        if (self.combiner is not None) != self.pooled or (self.divisor is not None and not self.sums):
            raise AssertionError(f"pooling {self.name!r}: pooled rows have a combiner, and only sums are divided")

    @property
    def pooled(self) -> bool:
        """Whether a bag's rows are combined to one."""
        return self.shape is Shape.POOLED

    @property
    def selects(self) -> bool:
        """Whether one row wins each column."""
        return self.combiner is not None and self.combiner.selects

    @property
    def sums(self) -> bool:
        """Whether rows are added; then partial pools may also be added on their way between ranks."""
        return self.combiner is not None and not self.combiner.selects

    @property
    def divides(self) -> bool:
        """Whether sums are divided."""
        return self.divisor is not None

    @property
    def weightable(self) -> bool:
        """Whether ids may have weights."""
        return not self.selects

    @property
    def kept(self) -> Kept | None:
        """The facts that a forward keeps for its backward."""
        return "winner" if self.selects else "divisor" if self.divides else None

    @property
    def result(self) -> Result:
        """The case of `enum Pooling` in generated code."""
        if self.shape is Shape.CONCAT:
            return "concat"
        if self.shape is Shape.SEQUENCE:
            return "sequence"
        if self.selects:
            return "selected"
        if self.divisor is None:
            return "summed"
        return "rooted" if self.divisor is Divisor.ROOT else "divided"

    @property
    def undivided(self) -> Pooling:
        """The pooling with the same inner loop but no division; poolings with the same one share a bucket."""
        like = (p for p in POOLINGS.values() if (p.shape, p.combiner) == (self.shape, self.combiner))
        return next(p for p in like if not p.divides)

    @property
    def partial(self) -> Pooling:
        """The pooling of a rank that holds a part of a table's rows. The rank that has the sample divides, and puts
        rows in their places in a bag."""
        return self.undivided if self.pooled else POOLINGS[EACH_ROW]

    @property
    def action(self) -> int:
        """The number by which stage kernels know what to do with partial pools. Rows that stay separate have none."""
        if self.combiner is None:
            raise AssertionError(f"pooling {self.name!r}: there are no partial pools")
        return DIVIDE if self.divides else self.combiner.action


POOLINGS: dict[str, Pooling] = {
    pooling.name: pooling
    for pooling in (
        Pooling("sum", "their sum", combiner=SUM),
        Pooling(
            "mean",
            "their mean, weighted if ids have weights",
            combiner=SUM,
            divisor=Divisor.WEIGHTS,
            synonyms=("average", "avg"),
        ),
        Pooling(
            "sqrtn",
            "their sum divided by the square root of their number or, with weights, of the sum of squared weights "
            "(sqrtn)",
            combiner=SUM,
            divisor=Divisor.ROOT,
        ),
        Pooling("max", "the maximum of each column", combiner=MAX, synonyms=("maximum",)),
        Pooling("min", "the minimum of each column", combiner=MIN, synonyms=("minimum",)),
        Pooling("concat", "the rows side by side (concat)", Shape.CONCAT),
        Pooling("none", "each row by itself (none)", Shape.SEQUENCE, synonyms=("sequence",)),
    )
}


def selections_of(poolings: Iterable[Pooling]) -> tuple[Combiner, ...]:
    """The combiners of these poolings that select, in the order of `COMBINERS`. If there are none, the first one that
    selects, because code that decides at run time whether to select needs an order even then."""
    used = {pooling.combiner for pooling in poolings}
    selecting = tuple(combiner for combiner in SELECTING.values() if combiner in used)
    return selecting or tuple(SELECTING.values())[:1]


EACH_ROW: PoolingName = "none"
"""The pooling of a lookup that does not pool."""

SYNONYMS = {word: pooling.name for pooling in POOLINGS.values() for word in pooling.synonyms}
MEANINGS = f"How a bag's rows are combined: {'; '.join(pooling.meaning for pooling in POOLINGS.values())}."


def pooling_named(name: str) -> Pooling:
    """The pooling of that name; `SpecError` lists the names that exist."""
    pooling = POOLINGS.get(name)
    if pooling is None:
        hint = did_you_mean(name, list(POOLINGS), SYNONYMS)
        raise SpecError(f"pooling {name!r} is not known{hint}; allowed: {', '.join(POOLINGS)}", field="pooling")
    return pooling
