"""The memory instructions of a kernel, as the SIMT executor counts them: warp instructions, as the source issues them.

These are not measurements of a GPU: its caches and replays, and the changes of its compiler, are unknown here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import reduce
from operator import add
from typing import Any

SECTOR = 32
"""The least number of bytes that global memory moves at once."""

TABLE = "table "
"""The prefix of the names of regions that hold tables; the name of the table follows."""
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
"""The kinds of regions: rows of tables, ids, their weights, offsets of bags, ..., work space of the kernels."""


def kind_of(region: str) -> str:
    """The kind of the region with this name."""
    return "rows" if region.startswith(TABLE) else KIND_OF[region]


@dataclass(frozen=True)
class Traffic:
    """Counts of the loads or stores of some memory. For shared memory, `sectors` are wavefronts of 32 4-byte banks."""

    instructions: int = 0
    """Warp instructions with at least one active lane."""
    idle: int = 0
    """Warp instructions without an active lane: every lane was predicated off."""
    lanes: int = 0
    """Active lanes, summed over instructions."""
    bytes: int = 0
    """Bytes that all lanes requested."""
    useful: int = 0
    """Bytes that were requested, where a byte counts only once per instruction."""
    sectors: int = 0
    """Sectors that were accessed, summed over instructions."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Traffic)))

    @property
    def efficiency(self) -> float | None:
        """The share of the moved bytes that was requested; None if nothing was moved."""
        return self.useful / (SECTOR * self.sectors) if self.sectors else None

    @property
    def active_lanes(self) -> float | None:
        """The mean number of active lanes per instruction, of 32; None if there are no instructions."""
        return self.lanes / self.instructions if self.instructions else None


@dataclass(frozen=True)
class KernelCounters:
    """The counters of one kernel. `loads` and `stores` have those of global memory by the names of regions."""

    kernel: str
    loads: Mapping[str, Traffic]
    stores: Mapping[str, Traffic]
    shared_loads: Traffic = Traffic()
    shared_stores: Traffic = Traffic()
    bank_conflicts: int = 0
    """Wavefronts in excess of those that the bytes need."""
    barriers: int = 0
    """Barriers, each counted once per block."""
    warp_syncs: int = 0
    """Shuffles, votes and __syncwarp, each counted once per warp."""
    atomics: int = 0
    """Atomic operations, counted as warp instructions."""
    atomic_lanes: int = 0
    """Active lanes of atomic operations, summed over instructions."""

    @property
    def all_loads(self) -> Traffic:
        """All loads from global memory."""
        return total(self.loads.values())

    @property
    def all_stores(self) -> Traffic:
        """All stores to global memory."""
        return total(self.stores.values())

    def loaded(self, kind: str) -> Traffic:
        """The loads from regions of a kind."""
        return total(traffic for region, traffic in self.loads.items() if kind_of(region) == kind)

    def stored(self, kind: str) -> Traffic:
        """The stores to regions of a kind."""
        return total(traffic for region, traffic in self.stores.items() if kind_of(region) == kind)

    def rows_of(self, tables: Iterable[str]) -> Traffic:
        """The loads of rows of these tables."""
        return total(self.loads.get(TABLE + name, Traffic()) for name in tables)

    def to_json(self) -> dict[str, Any]:
        """The counters as plain data: sums by kind with the figures computed from them, and the loads of rows by
        table."""
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
"""The names of the counters that are a single number."""


def total(traffic: Iterable[Traffic]) -> Traffic:
    """The sum of several counts."""
    return reduce(add, traffic, Traffic())


def together(kernels: Iterable[KernelCounters], name: str = "all") -> KernelCounters:
    """The sum of the counters of several kernels, under a name."""
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
