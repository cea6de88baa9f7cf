"""Predictions for a placement on any number of ranks: memory, bytes per link, seconds of a step, imbalance.

The ranks do not have to exist."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from embforge.codegen.planner.access import Floats
from embforge.codegen.planner.cost import PHASES, Loads, Step, costs_of, links_of, loads_of
from embforge.codegen.planner.topology import Topology
from embforge.codegen.plans import name_of
from embforge.codegen.sharding.placement import Placement


@dataclass(frozen=True)
class Spread:
    """The least, mean and largest of a number that every rank has."""

    low: float
    mean: float
    high: float

    @property
    def imbalance(self) -> float:
        """The highest divided by the mean; 1 if all ranks have the same."""
        return self.high / self.mean if self.mean else 1.0


@dataclass(frozen=True)
class Simulation:
    """Predictions for one placement."""

    world_size: int
    nodes: int
    memory: Spread
    """Bytes of rows and states."""
    buffers: Spread
    total: Spread
    """Memory and buffers together."""
    limit: float
    """Bytes that a rank may use."""
    node_bytes: dict[str, Spread]
    """Bytes that a rank sends to other ranks of its node in a step, by counter."""
    rail_bytes: dict[str, Spread]
    """Bytes that a rank sends to other nodes in a step, by counter."""
    replica_bytes: float
    """Bytes of the all-reduce of replicated tables."""
    phases: dict[str, Spread]
    """Seconds of each phase of a step."""
    work: Spread
    """Seconds of lookup and update of a rank."""

    @property
    def seconds(self) -> float:
        """Seconds of a step without overlap: each phase takes as long as its slowest rank."""
        return sum(spread.high for spread in self.phases.values())

    @property
    def prefetched_seconds(self) -> float:
        """Seconds of a step whose ids were exchanged during the previous step."""
        ids = self.phases["ids"].high
        return max(ids, self.seconds - ids)

    @property
    def fits(self) -> bool:
        return self.total.high <= self.limit

    def to_json(self) -> dict[str, Any]:
        """The predictions as plain data."""
        more = {"seconds": self.seconds, "prefetched_seconds": self.prefetched_seconds, "fits": self.fits}
        return asdict(self) | more | {"imbalance": {"work": self.work.imbalance, "memory": self.memory.imbalance}}


def simulate(placement: Placement, topology: Topology, step: Step) -> Simulation:
    """The predictions of the cost model for a placement."""
    costs = costs_of(placement, topology, step)
    loads = loads_of(placement, costs)
    phases = loads.phases()
    inside, outside = sent_bytes(loads)
    return Simulation(
        placement.world_size,
        placement.nodes,
        _spread(loads["memory"]),
        _spread(loads.buffers()),
        _spread(loads.memory()),
        costs.topology.limit,
        {name: _spread(bytes_) for name, bytes_ in inside.items() if bytes_.any()},
        {name: _spread(bytes_) for name, bytes_ in outside.items() if bytes_.any()},
        float(loads.total("replicas")[0]),
        {name: _spread(phases[name]) for name in PHASES},
        _spread(phases["lookup"] + phases["update"]),
    )


def sent_bytes(loads: Loads) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Bytes that every rank sends within its node, and by its rail, by counter. With more than one node, row norms
    count as sent by the rail."""
    topology = loads.costs.topology
    inside: dict[str, Floats] = {}
    outside: dict[str, Floats] = {}
    for name, to_owner in loads.to_owner().items():
        node_out, rail_out, node_in, rail_in = links_of(to_owner, topology)
        back = name in ("vectors", "weight_gradients")  # owners send these, so the directions are swapped
        inside[name], outside[name] = (node_in, rail_in) if back else (node_out, rail_out)
    for name, bytes_ in loads.hierarchical().items():
        (inside if name.startswith("node") else outside)[name] = np.full(topology.world_size, float(bytes_[0]))
    (outside if topology.nodes > 1 else inside)["row_norms"] = loads["norms"]
    return inside, outside


def assumptions(topology: Topology, step: Step) -> list[str]:
    """The assumptions of a prediction, as sentences."""
    link, rail = topology.node_link, topology.rail
    wire = step.wire
    numbers = "measured" if topology.measured else "assumed, not measured"
    update = "no update (a forward only)" if step.update is None else f"{name_of(step.update) or step.update.rule.name}"
    return [
        f"topology {topology.name!r}: numbers are {numbers}" + (f" ({topology.source})" if topology.source else ""),
        f"rows are read at {topology.lookup_bandwidth / 1e9:,.4g} GB/s and updated at "
        f"{topology.update_bandwidth / 1e9:,.4g} GB/s; every id reads its row from memory, none from a cache",
        f"inside a node {link.bandwidth / 1e9:,.4g} GB/s each way and {link.latency * 1e6:g} µs per collective, "
        f"{link.message * 1e6:g} µs per peer; a rail {rail.bandwidth / 1e9:,.4g} GB/s, {rail.latency * 1e6:g} µs, "
        f"{rail.message * 1e6:g} µs; both at the same time",
        f"{step.batch_size:,} samples per rank, ids {step.access}, {update}; vectors travel as {wire.forward}, "
        f"gradients as {wire.gradients}, duplicates: {wire.duplicates}, pools: {wire.pools}",
        "phases follow each other and all ranks wait for the slowest; the dense part of a model is not included",
    ]


def _spread(values: Iterable[float]) -> Spread:
    numbers = np.asarray(values)
    return Spread(float(numbers.min()), float(numbers.mean()), float(numbers.max()))
