"""Every kind of shard plan alone, on 2, 4 and 8 real ranks: each byte counter is what its formula says.

Mixtures of kinds and number formats: see `tests/codegen/planner/test_traffic.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.sharded.cases import (
    KINDS,
    Training,
    arguments_of,
    loss_of,
    node_size_of,
    one_kind,
    part_of,
    sharded_module,
    sizes_of,
    whole_batch,
)
from support.sharded.exact_traffic import COUNTERS, Traffic, count_ids, traffic_of
from support.sharded.ranks import run_ranks

from embforge.codegen.planner.traffic import Wire, id_bytes
from embforge.codegen.sharding.geometry import Geometry
from embforge.codegen.sharding.kinds import ShardPlan
from embforge.codegen.sharding.placement import place
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.sharded.stages.stage_metadata import BlockShape

TRAININGS = tuple(one_kind(kind) for kind in KINDS)
Counters = dict[str, int]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_counters_are_what_the_formulas_say(size: int) -> None:
    """Counts a call without gradients, and a step in which weights get gradients too."""
    found = run_ranks(size, counters_of_rank)
    for number, training in enumerate(TRAININGS):
        traffic = expected(training, size)
        for rank in range(size):
            quiet, loud = found[rank][number]
            sent = traffic.sent(rank)
            assert loud == sent, f"{training.name}, rank {rank} of {size}"
            asked = {name: count for name, count in sent.items() if name in ("header", "ids") or "vectors" in name}
            assert quiet == asked, f"{training.name}, rank {rank} of {size}, without gradients"
        for name in COUNTERS:
            together = sum(found[rank][number][1].get(name, 0) for rank in range(size))
            assert together == traffic.pairs[name].sum(), f"{training.name}: {name} of all ranks"


def expected(training: Training, size: int) -> Traffic:
    """The counters by the formulas, with the ids of the batch."""
    spec, optimizer = training.spec, training.optimizer
    geometry = Geometry(place(training.plan(size), spec, size, node_size_of(size)))
    parts = [part_of(spec, whole_batch(spec, 0), sizes_of(size, 0), rank) for rank in range(size)]
    batches = [tuple(map(np.asarray, arguments_of(part)[:2])) for part in parts]
    counted = count_ids(geometry, batches)  # type: ignore[arg-type]
    return traffic_of(geometry, counted, Wire(weight_gradients=True, pools="different"), optimizer.update)


def counters_of_rank(rank: int, size: int) -> list[tuple[Counters, Counters]]:
    found = []
    for training in TRAININGS:
        module = sharded_module(training, size)
        part = part_of(training.spec, whole_batch(training.spec, 0), sizes_of(size, 0), rank)
        values, offsets, weights = arguments_of(part)
        module.reset_counters()
        with torch.no_grad():
            module.forward_dict(values, offsets, weights)
        quiet = counted(module.counters())
        module.reset_counters()
        loss_of(part, module.forward_dict(values, offsets, weights.requires_grad_())).backward()
        found.append((quiet, counted(module.counters())))
    return found


def counted(counters: Counters) -> Counters:
    """The counters without those that are 0."""
    return {name: count for name, count in counters.items() if count}


def test_blocks_of_wide_ids_are_filled_up_to_whole_ids() -> None:
    """With more than 2^32 rows an id takes two words, and starts at a multiple of two words in every block."""
    spec = CollectionSpec((TableSpec("t", 2**33, 4),), (FeatureSpec("f", "t"), FeatureSpec("g", "t", weighted=True)))
    geometry = Geometry(place(ShardPlan.row_wise(spec), spec, 2))
    counts, samples = np.array([[2, 3], [1, 4]]), np.array([3, 3])
    blocks = BlockShape.of(geometry, geometry.streams_to).blocks(counts, samples, np.zeros_like(counts))
    assert (4 * blocks.sizes).tolist() == id_bytes(counts.sum(1), samples, 2, counts[:, 1], True).tolist()
    assert not (blocks.ids_at % 2).any()
