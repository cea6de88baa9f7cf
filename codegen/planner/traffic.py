"""Bytes that ranks send to each other: the formulas of docs/planning.md, into which `cost.py` puts expected ids.

With counted ids they are exact: tests/support/sharded/exact_traffic.py puts those in.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

from embforge.codegen.dtypes import WIRE, WIRE_FORMATS, WireFormat
from embforge.codegen.errors import PlanError
from embforge.codegen.rules.language import program_of
from embforge.codegen.rules.rule import Update

Duplicates = Literal["merge", "keep"]
Pools = Literal["all", "different"]
HEADER_WORDS = 8
SCALE_BYTES = 4
"""The size of the fp32 number that packed numbers are multiplied by."""


@dataclass(frozen=True)
class Wire:
    """The form in which ranks send ids, vectors and gradients."""

    forward: WireFormat = "fp32"
    """The number format of vectors. Hierarchical ones are always fp32 inside a node."""
    gradients: WireFormat = "fp32"
    duplicates: Duplicates = "keep"
    """For features whose rows travel one by one: with `merge`, a rank gets each row that it needs once."""
    weight_gradients: bool = False
    """Whether per-sample weights need gradients."""
    pools: Pools = "all"
    """For pooled features: with `different`, empty pools are not sent and equal ones once, if that saves enough."""

    def __post_init__(self) -> None:
        known = {"forward": WIRE_FORMATS, "gradients": WIRE_FORMATS}
        for name, allowed in (known | {"duplicates": get_args(Duplicates), "pools": get_args(Pools)}).items():
            if getattr(self, name) not in allowed:
                raise PlanError(f"wire: {name}={getattr(self, name)!r} is not known; allowed: {', '.join(allowed)}")


def row_bytes(format: str, width: int) -> int:
    """Bytes of a local feature's numbers for one sample or id. Packed formats begin with a scale and end at a word."""
    dtype = WIRE[format]
    return SCALE_BYTES + -(-width // 4) * 4 if dtype.is_packed else dtype.bytes * width


def header_bytes(streams: Any, remapped: int) -> Any:
    """Bytes of the header from one rank to another that receives `streams` streams, with `remapped` remapped tables."""
    return 8 * (HEADER_WORDS + remapped + streams)


def id_bytes(ids: Any, samples: Any, pooled: Any, weighted: Any, wide: Any, asked: Any = 0) -> Any:
    """Bytes of ids, lengths of bags (for `pooled` streams), weights (for `weighted` ids) and requested pools."""
    width = 4 + 4 * wide
    return _up(width * ids + 4 * samples * pooled + 4 * (weighted + asked), width)


def worth_requesting(asked: Any, samples: Any, columns: Any) -> Any:
    """Whether a rank requests pools one by one instead of getting `columns` numbers for each sample: it does if that
    saves a quarter of them. `asked` counts the numbers of the requested pools, and one more for each request."""
    return 4 * asked <= 3 * samples * columns


def vector_bytes(per_sample: Any, samples: Any, sequence: Any) -> Any:
    """Bytes of vectors or their gradients: `per_sample` bytes of pooled columns, and `sequence` bytes of rows that
    travel one by one."""
    return per_sample * samples + sequence


def replica_bytes(rows: int, dim: int) -> int:
    """Bytes that a replicated table adds to the all-reduce: its gradient, and one number per row that says whether the
    row has one."""
    return 4 * rows * (dim + 1)


@lru_cache(maxsize=256)
def reductions_of(update: Update | None) -> int:
    """How many numbers per row a rule computes from whole rows."""
    return 0 if update is None else len(program_of(update.rule).reductions)


def _up(count: Any, unit: Any) -> Any:
    """`count` rounded up to a multiple of `unit`."""
    return -(-count // unit) * unit
