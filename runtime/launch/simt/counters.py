"""What memory instructions cost, as the SIMT executor counts them: warp instructions as the source issues them.

Not what a GPU measured: caches, replays and what its compiler makes of the source are unknown here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import reduce
from operator import add
from typing import Any

SECTOR = 32
"""Bytes that global memory moves at least."""

TABLE = "table "
"""What the name of a table's region begins with; the table's own name follows."""
KIND_OF = {
    "values": "ids",
    "weights": "weights",
    "offsets": "offsets",
    "metadata": "metadata",
    "pooled": "outputs",
    "sequence": "outputs",
    "scratch": "work",
    "queue": "work",
    "status": "work",
}
KINDS = ("rows", *dict.fromkeys(KIND_OF.values()))
"""What regions are for: rows of tables; ids; their weights; bag borders; ...; work space of the kernels."""


def kind_of(region: str) -> str:
    """What a region of that name is for."""
    return "rows" if region.startswith(TABLE) else KIND_OF[region]


@dataclass(frozen=True)
class Traffic:
    """Loads or stores of some memory. For shared memory, `sectors` are wavefronts of 32 banks of 4 bytes."""

    instructions: int = 0
    """With at least one active lane."""
    idle: int = 0
    """With none: every lane was predicated off."""
    lanes: int = 0
    """Active, summed over instructions."""
    bytes: int = 0
    """Asked for, by all lanes."""
    useful: int = 0
    """The same without what several lanes of an instruction asked for at once."""
    sectors: int = 0
    """Touched, summed over instructions."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Traffic)))

    @property
    def efficiency(self) -> float | None:
        """The share of the moved bytes that was asked for; None if nothing was moved."""
        return self.useful / (SECTOR * self.sectors) if self.sectors else None

    @property
    def active_lanes(self) -> float | None:
        """Lanes of 32 that an instruction had work for, in the mean; None without instructions."""
        return self.lanes / self.instructions if self.instructions else None


@dataclass(frozen=True)
class KernelCounters:
    """One kernel's counters; `loads` and `stores` by region."""

    kernel: str
    loads: Mapping[str, Traffic]
    stores: Mapping[str, Traffic]
    shared_loads: Traffic = Traffic()
    shared_stores: Traffic = Traffic()
    bank_conflicts: int = 0
    """Wavefronts beyond those that the bytes need."""
    barriers: int = 0
    """A block counts once."""
    warp_syncs: int = 0
    """Shuffles, votes, __syncwarp: a warp counts once."""
    atomics: int = 0
    """Warp instructions."""
    atomic_lanes: int = 0

    @property
    def all_loads(self) -> Traffic:
        """From global memory."""
        return total(self.loads.values())

    @property
    def all_stores(self) -> Traffic:
        """To global memory."""
        return total(self.stores.values())

    def loaded(self, kind: str) -> Traffic:
        """All loads from regions of a kind."""
        return total(traffic for region, traffic in self.loads.items() if kind_of(region) == kind)

    def stored(self, kind: str) -> Traffic:
        """All stores to regions of a kind."""
        return total(traffic for region, traffic in self.stores.items() if kind_of(region) == kind)

    def rows_of(self, tables: Iterable[str]) -> Traffic:
        """Row loads from some of the tables."""
        return total(self.loads.get(TABLE + name, Traffic()) for name in tables)

    def to_json(self) -> dict[str, Any]:
        """Plain data: sums by kind with what follows from them, and the row loads of each table."""
        single = {name: getattr(self, name) for name in SINGLE}
        tables = {name.removeprefix(TABLE): t for name, t in self.loads.items() if kind_of(name) == "rows"}
        return {
            "kernel": self.kernel,
            "all_loads": _plain(self.all_loads),
            "all_stores": _plain(self.all_stores),
            "loads": {kind: _plain(self.loaded(kind)) for kind in KINDS},
            "stores": {kind: _plain(self.stored(kind)) for kind in KINDS},
            "tables": {name: _plain(traffic) for name, traffic in tables.items() if traffic.instructions},
            "shared_loads": asdict(self.shared_loads),
            "shared_stores": asdict(self.shared_stores),
            **single,
        }


SINGLE = ("bank_conflicts", "barriers", "warp_syncs", "atomics", "atomic_lanes")
"""Counters that are one number."""


def total(traffic: Iterable[Traffic]) -> Traffic:
    """The sum."""
    return reduce(add, traffic, Traffic())


def together(kernels: Iterable[KernelCounters], name: str = "all") -> KernelCounters:
    """Several kernels' counters as if they were one's."""
    kernels = tuple(kernels)
    return KernelCounters(
        name,
        _by_region(kernel.loads for kernel in kernels),
        _by_region(kernel.stores for kernel in kernels),
        total(kernel.shared_loads for kernel in kernels),
        total(kernel.shared_stores for kernel in kernels),
        **{field: sum(getattr(kernel, field) for kernel in kernels) for field in SINGLE},
    )


def _by_region(parts: Iterable[Mapping[str, Traffic]]) -> dict[str, Traffic]:
    sums: dict[str, Traffic] = {}
    for part in parts:
        for region, traffic in part.items():
            sums[region] = sums.get(region, Traffic()) + traffic
    return sums


def _plain(traffic: Traffic) -> dict[str, Any]:
    return asdict(traffic) | {"efficiency": traffic.efficiency, "active_lanes": traffic.active_lanes}
