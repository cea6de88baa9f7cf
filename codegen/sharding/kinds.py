"""The ways in which a table can be spread over ranks, and the shard plan, which names one for every table."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from embforge.codegen.errors import PlanError
from embforge.codegen.reading.documents import shown
from embforge.codegen.reading.suggestions import did_you_mean
from embforge.codegen.spec import CollectionSpec

if TYPE_CHECKING:
    from embforge.codegen.planner.topology import Topology

By = Literal["modulo", "block"]
BYS: tuple[str, ...] = get_args(By)
"""The shard of a row among n shards: `row % n`, or consecutive blocks of ceil(rows / n) rows."""


@dataclass(frozen=True)
class DataParallel:
    """A replica on every rank; gradients are summed by one all-reduce for all such tables."""

    name: ClassVar[str] = "data_parallel"


@dataclass(frozen=True)
class TableWise:
    """The whole table on one rank; None: on the rank with the least work."""

    name: ClassVar[str] = "table_wise"
    rank: int | None = None


@dataclass(frozen=True)
class RowWise:
    """Rows spread over ranks. `ranks` are those that hold a shard, in the order of the shards; None: all ranks."""

    name: ClassVar[str] = "row_wise"
    by: By = "modulo"
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ColumnWise:
    """Columns spread over ranks.

    `pieces` is the number of pieces; None: one per rank, of at least four columns unless the table has fewer. `ranks`
    are the holders of the pieces; None: chosen so that all ranks hold about as many columns.
    """

    name: ClassVar[str] = "column_wise"
    pieces: int | None = None
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Grid:
    """Columns split into pieces, and the rows of each piece spread over a part of the ranks.

    `pieces` is the number of pieces; None: one per node, or two on a single node.
    """

    name: ClassVar[str] = "grid"
    pieces: int | None = None
    by: By = "modulo"


@dataclass(frozen=True)
class Hierarchical:
    """Rows spread over all ranks. Partial pools are added up inside a node before they are sent to other nodes, each by
    the link of its own local rank."""

    name: ClassVar[str] = "hierarchical"
    by: By = "modulo"


Kind = DataParallel | TableWise | RowWise | ColumnWise | Grid | Hierarchical
KINDS: dict[str, type[Kind]] = {kind.name: kind for kind in get_args(Kind)}


def kind_of(table: str, value: Any) -> Kind:
    """The kind that a plan's value means for a table: the value may be an object of a kind, or the name of one."""
    if isinstance(value, str) and value in KINDS:
        return KINDS[value]()
    if not isinstance(value, get_args(Kind)):
        hint = did_you_mean(value, KINDS)
        raise PlanError(
            f"shard plan: table {table!r}: kind {value!r} is not known{hint}; allowed: {', '.join(KINDS)}, or an "
            f"object of {', '.join(kind.__name__ for kind in KINDS.values())}"
        )
    _check_numbers(table, value)
    kind: Kind = value
    return kind


@dataclass(frozen=True, init=False)
class ShardPlan:
    """A kind of sharding for every table: `ShardPlan({"users": "row_wise", "countries": DataParallel()})`.

    It does not depend on the number of ranks; `place` applies it to one.
    """

    kinds: tuple[tuple[str, Kind], ...]
    explanation: str = ""
    """Why each table has its kind, if `auto` made the plan. It is not part of the plan's hash."""

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
        """Every table whole on one rank, tables spread over the ranks."""
        return cls._all(spec, TableWise())

    @classmethod
    def row_wise(cls, spec: CollectionSpec, by: By = "modulo") -> ShardPlan:
        """The rows of every table spread over all ranks."""
        return cls._all(spec, RowWise(by))

    @classmethod
    def column_wise(cls, spec: CollectionSpec, pieces: int | None = None) -> ShardPlan:
        """The columns of every table spread over the ranks."""
        return cls._all(spec, ColumnWise(pieces))

    @classmethod
    def grid(cls, spec: CollectionSpec, pieces: int | None = None, by: By = "modulo") -> ShardPlan:
        """Columns of every table split into pieces, and the rows of each piece spread over a part of the ranks."""
        return cls._all(spec, Grid(pieces, by))

    @classmethod
    def hierarchical(cls, spec: CollectionSpec, by: By = "modulo") -> ShardPlan:
        """The rows of every table spread over all ranks; partial pools are added up inside nodes first."""
        return cls._all(spec, Hierarchical(by))

    @classmethod
    def auto(cls, spec: CollectionSpec, topology: Topology, **options: Any) -> ShardPlan:
        """The plan that the cost model expects to be fastest among those that fit; see `planner/search.py`."""
        from embforge.codegen.planner.search import choose

        return choose(spec, topology, **options).plan

    @classmethod
    def _all(cls, spec: CollectionSpec, kind: Kind) -> ShardPlan:
        return cls({table.name: kind for table in spec.tables})

    def kind(self, table: str) -> Kind:
        """The kind of a table; `PlanError` if the plan does not name it."""
        for name, kind in self.kinds:
            if name == table:
                return kind
        raise PlanError(f"shard plan: no kind for table {table!r}; it names {', '.join(n for n, _ in self.kinds)}")

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, by table."""
        return {name: {"kind": kind.name, **asdict(kind)} for name, kind in self.kinds}

    @classmethod
    def from_dict(cls, data: Mapping[str, Mapping[str, Any]]) -> ShardPlan:
        """The plan of which `to_dict` returned the data."""
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
            make: Callable[..., Kind] = kind  # it has these fields; `ShardPlan` checks the values
            kinds[table] = make(**values)
        return cls(kinds)

    def digest(self) -> str:
        """A hash that is equal for equal plans; ranks compare it before they begin."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]


def _check_numbers(table: str, kind: Kind) -> None:
    where = f"shard plan: table {table!r}: {kind.name}"
    by, pieces, ranks = (getattr(kind, name, None) for name in ("by", "pieces", "ranks"))
    if by is not None and by not in BYS:
        raise PlanError(f"{where}: by={shown(by)} is not known; allowed: {', '.join(BYS)}")
    if pieces is not None and (type(pieces) is not int or pieces < 1):
        raise PlanError(f"{where}: pieces={shown(pieces)} is not allowed; allowed: a whole number, at least 1")
    if ranks is not None and not _are_ranks(ranks):
        raise PlanError(f"{where}: ranks={shown(ranks)} is not allowed; allowed: different ranks, at least one")


def _are_ranks(value: Any) -> bool:
    if not isinstance(value, Sequence) or not all(type(rank) is int and rank >= 0 for rank in value):
        return False
    return 0 < len(value) == len(set(value))
