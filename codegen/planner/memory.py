"""Whether a placement fits into every rank's memory, asked before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from embforge.codegen.errors import PlanError
from embforge.codegen.rules.rule import Update
from embforge.codegen.planner.cost import Loads, Share, Step, costs_of
from embforge.codegen.sharding.kinds import Kind
from embforge.codegen.sharding.placement import Placement
from embforge.codegen.planner.topology import Topology

REMEDY = (
    "use more ranks, split it (row_wise, column_wise or grid), take a narrower dtype or an optimizer with less state"
)


def check_memory(
    placement: Placement, updates: Sequence[Update | None], topology: Topology, batch_size: int = 0
) -> None:
    """`PlanError` names the table with which a rank's memory ends, and how many bytes are missing.

    Rows and optimizer states; with a batch size also what a step needs beside them. `updates`: of each table, in the
    order of the spec.
    """
    costs = {update: costs_of(placement, topology, Step(batch_size, update=update)) for update in updates}
    trained = [of_update for update, of_update in costs.items() if update is not None]
    loads = Loads.empty((trained or list(costs.values()))[0])
    by_name = dict(zip((table.name for table in placement.spec.tables), updates, strict=True))
    shares = {
        placed.table.name: (placed.kind, costs[by_name[placed.table.name]].share(placed)) for placed in placement.tables
    }
    for table, (kind, share) in sorted(shares.items(), key=lambda item: (-item[1][1].memory, item[0])):
        loads.add(share)
        if loads.memory().max() > topology.limit:
            raise PlanError(fits_not(table, kind, loads, share))


def fits_not(table: str, kind: Kind, loads: Loads, share: Share) -> str:
    """The sentence about the table that came last."""
    topology = loads.costs.topology
    memory = loads.memory()
    rank = int(np.argmax(memory))
    mine = np.zeros(topology.world_size)
    mine[share.ranks] = share.values[0]
    buffers = float(loads.buffers()[rank])
    beside = [f"{size(float(loads['memory'][rank] - mine[rank]))} of other tables"]
    beside += [f"{size(buffers)} of buffers"] if buffers else []
    return (
        f"shard plan: table {table!r} does not fit: {kind.name} on {topology.world_size} ranks puts "
        f"{size(float(mine[rank]))} of it with its optimizer states on rank {rank}, beside {' and '.join(beside)}; "
        f"that is {size(float(memory[rank] - topology.limit))} more than the {size(topology.limit)} that a rank may "
        f"use ({topology.usable:.0%} of {size(topology.memory)}, topology {topology.name!r}); {REMEDY}"
    )


def size(bytes_: float) -> str:
    """Bytes as people read them, in powers of ten."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(bytes_) < 999.5 or unit == "TB":
            return f"{bytes_:.0f} {unit}" if unit == "B" else f"{bytes_:.3g} {unit}"
        bytes_ /= 1000
    raise AssertionError
