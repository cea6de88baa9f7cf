"""How one table may be spread over ranks, and the plan that says it of every table of a collection."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from embforge.codegen.reading.documents import shown
from embforge.codegen.errors import PlanError
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.reading.suggestions import did_you_mean

if TYPE_CHECKING:
    from embforge.codegen.planner.topology import Topology

By = Literal["modulo", "block"]
BYS: tuple[str, ...] = get_args(By)
"""Which row goes to which shard of n: `row % n`, or consecutive blocks of ceil(rows / n)."""


@dataclass(frozen=True)
class DataParallel:
    """A replica on every rank; gradients are summed by one all-reduce for all such tables."""

    name: ClassVar[str] = "data_parallel"


@dataclass(frozen=True)
class TableWise:
    """The whole table on one rank. None: where the least work is."""

    name: ClassVar[str] = "table_wise"
    rank: int | None = None


@dataclass(frozen=True)
class RowWise:
    """Rows over ranks. `ranks`: those that hold some, in the order of the shards; None: all."""

    name: ClassVar[str] = "row_wise"
    by: By = "modulo"
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ColumnWise:
    """Columns over ranks. `pieces`: how many pieces; None: one a rank, of four columns at least where there are so
    many.
    `ranks`: who holds them; None: spread so that all ranks hold about as many columns."""

    name: ClassVar[str] = "column_wise"
    pieces: int | None = None
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Grid:
    """Columns in pieces, the rows of each piece over a part of the ranks. None: a piece a node; two on a single
    node."""

    name: ClassVar[str] = "grid"
    pieces: int | None = None
    by: By = "modulo"


@dataclass(frozen=True)
class Hierarchical:
    """Rows over all ranks; partial pools are added up inside a node before they go to other nodes, each by the link of
    its own local rank."""

    name: ClassVar[str] = "hierarchical"
    by: By = "modulo"


Kind = DataParallel | TableWise | RowWise | ColumnWise | Grid | Hierarchical
KINDS: dict[str, type[Kind]] = {kind.name: kind for kind in get_args(Kind)}


def kind_of(table: str, given: Any) -> Kind:
    """The kind that a plan names for a table: an object of a kind, or the name of one."""
    if isinstance(given, str) and given in KINDS:
        return KINDS[given]()
    if not isinstance(given, get_args(Kind)):
        hint = did_you_mean(given, KINDS)
        raise PlanError(
            f"shard plan: table {table!r}: kind {given!r} is not known{hint}; allowed: {', '.join(KINDS)}, or an "
            f"object of {', '.join(kind.__name__ for kind in KINDS.values())}"
        )
    _check_numbers(table, given)
    kind: Kind = given
    return kind


@dataclass(frozen=True, init=False)
class ShardPlan:
    """A kind for every table: `ShardPlan({"users": "row_wise", "countries": DataParallel()})`.

    It knows no number of ranks; `place` puts it on some.
    """

    kinds: tuple[tuple[str, Kind], ...]
    explanation: str = ""
    """Why, where `auto` made it. No part of the plan's hash."""

    def __init__(self, kinds: Mapping[str, Any], explanation: str = "") -> None:
        if not isinstance(kinds, Mapping):
            raise PlanError(
                f"shard plan: got {type(kinds).__name__}; allowed: a mapping from tables to kinds, or one of "
                "ShardPlan.data_parallel, table_wise, row_wise, column_wise, grid, hierarchical, auto"
            )
        pairs = tuple((table, kind_of(table, kind)) for table, kind in kinds.items())
        object.__setattr__(self, "kinds", pairs)
        object.__setattr__(self, "explanation", explanation)

    @classmethod
    def data_parallel(cls, spec: CollectionSpec) -> ShardPlan:
        """A replica of every table on every rank."""
        return cls._all(spec, DataParallel())

    @classmethod
    def table_wise(cls, spec: CollectionSpec) -> ShardPlan:
        """Whole tables, spread over the ranks."""
        return cls._all(spec, TableWise())

    @classmethod
    def row_wise(cls, spec: CollectionSpec, by: By = "modulo") -> ShardPlan:
        """The rows of every table over all ranks."""
        return cls._all(spec, RowWise(by))

    @classmethod
    def column_wise(cls, spec: CollectionSpec, pieces: int | None = None) -> ShardPlan:
        """The columns of every table over the ranks."""
        return cls._all(spec, ColumnWise(pieces))

    @classmethod
    def grid(cls, spec: CollectionSpec, pieces: int | None = None, by: By = "modulo") -> ShardPlan:
        """Columns of every table in pieces, rows of each piece over a part of the ranks."""
        return cls._all(spec, Grid(pieces, by))

    @classmethod
    def hierarchical(cls, spec: CollectionSpec, by: By = "modulo") -> ShardPlan:
        """The rows of every table over all ranks, partial pools added up inside nodes first."""
        return cls._all(spec, Hierarchical(by))

    @classmethod
    def auto(cls, spec: CollectionSpec, topology: Topology, **options: Any) -> ShardPlan:
        """The plan that the cost model expects to be fastest among those that fit; see `sharding/auto.py`."""
        from embforge.codegen.planner.search import auto_plan

        return auto_plan(spec, topology, **options)

    @classmethod
    def _all(cls, spec: CollectionSpec, kind: Kind) -> ShardPlan:
        return cls({table.name: kind for table in spec.tables})

    def kind(self, table: str) -> Kind:
        """What the plan says of a table."""
        for name, kind in self.kinds:
            if name == table:
                return kind
        raise PlanError(f"shard plan: no kind for table {table!r}; it names {', '.join(n for n, _ in self.kinds)}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, by table."""
        return {name: {"kind": kind.name, **asdict(kind)} for name, kind in self.kinds}

    @classmethod
    def from_dict(cls, data: Mapping[str, Mapping[str, Any]]) -> ShardPlan:
        """What `to_dict` gave."""
        if not isinstance(data, Mapping):
            raise PlanError(f"shard plan: got {shown(data)}; allowed: a mapping from tables to the data of their kinds")
        kinds: dict[str, Kind] = {}
        for table, entry in data.items():
            if not isinstance(entry, Mapping):
                raise PlanError(f"shard plan: table {table!r}: {shown(entry)} is not a kind's data")
            values = {key: tuple(v) if isinstance(v, list) else v for key, v in entry.items() if key != "kind"}
            kind = KINDS.get(str(entry.get("kind")))
            if kind is None or not set(values) <= {field.name for field in dataclass_fields(kind)}:
                raise PlanError(f"shard plan: table {table!r}: {shown(dict(entry))} is not a kind's data")
            kinds[table] = kind(**values)  # type: ignore[arg-type]
        return cls(kinds)

    def digest(self) -> str:
        """Equal for equal plans: what ranks compare before they begin."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]


def _check_numbers(table: str, kind: Kind) -> None:
    where = f"shard plan: table {table!r}: {kind.name}"
    by, pieces, ranks = (getattr(kind, name, None) for name in ("by", "pieces", "ranks"))
    if by is not None and by not in BYS:
        raise PlanError(f"{where}: by={shown(by)} is not known; allowed: {', '.join(BYS)}")
    if pieces is not None and (type(pieces) is not int or pieces < 1):
        raise PlanError(f"{where}: pieces={shown(pieces)} is not allowed; a whole number, 1 at least")
    if ranks is not None and not _are_ranks(ranks):
        raise PlanError(f"{where}: ranks={shown(ranks)} is not allowed; different ranks, one at least")


def _are_ranks(value: Any) -> bool:
    if not isinstance(value, Sequence) or not all(type(rank) is int and rank >= 0 for rank in value):
        return False
    return 0 < len(value) == len(set(value))
