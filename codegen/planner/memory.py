"""A check, before anything is allocated, whether a placement fits into every rank's memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from embforge.codegen.errors import PlanError
from embforge.codegen.planner.cost import Loads, Share, Step, costs_of
from embforge.codegen.planner.topology import Topology
from embforge.codegen.reading.numbers import size
from embforge.codegen.rules.rule import Update
from embforge.codegen.sharding.kinds import Kind
from embforge.codegen.sharding.placement import Placement

REMEDY = (
    "use more ranks, split it (row_wise, column_wise or grid), take a narrower dtype or an optimizer with less state"
)


def check_memory(
    placement: Placement, updates: Sequence[Update | None], topology: Topology, batch_size: int = 0
) -> None:
    """Raises `PlanError` if a rank's memory does not suffice; it names the table and the missing bytes.

    It counts rows and optimizer states; with a batch size also the buffers of a step. `updates` are those of the
    tables, in the order of the spec.
    """
    costs = {update: costs_of(placement, topology, Step(batch_size, update=update)) for update in updates}
    trained = [of_update for update, of_update in costs.items() if update is not None]
    loads = Loads.empty((trained or list(costs.values()))[0])
    by_name = dict(zip((table.name for table in placement.spec.tables), updates, strict=True))
    shares = {
        table.table.name: (table.kind, costs[by_name[table.table.name]].share(table)) for table in placement.tables
    }
    for table, (kind, share) in sorted(shares.items(), key=lambda item: (-item[1][1].memory, item[0])):
        loads.add(share)
        if loads.memory().max() > topology.limit:
            raise PlanError(fits_not(table, kind, loads, share))


def fits_not(table: str, kind: Kind, loads: Loads, share: Share) -> str:
    """A sentence about the last table that was added, which does not fit."""
    topology = loads.costs.topology
    memory = loads.memory()
    rank = int(np.argmax(memory))
    own_bytes = np.zeros(topology.world_size)
    own_bytes[share.ranks] = share.values[0]
    buffers = float(loads.buffers()[rank])
    others = [f"{size(float(loads['memory'][rank] - own_bytes[rank]))} of other tables"]
    others += [f"{size(buffers)} of buffers"] if buffers else []
    return (
        f"shard plan: table {table!r} does not fit: {kind.name} on {topology.world_size} ranks puts "
        f"{size(float(own_bytes[rank]))} of it with its optimizer states on rank {rank}, along with "
        f"{' and '.join(others)}; "
        f"that is {size(float(memory[rank] - topology.limit))} more than the {size(topology.limit)} that a rank may "
        f"use ({topology.usable:.0%} of {size(topology.memory)}, topology {topology.name!r}); {REMEDY}"
    )
