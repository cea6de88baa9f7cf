"""Counts the sectors that a lookup loads and stores, by the emulated GPU on a small batch of a workload.

The counts are of the loads and stores that the source issues; the emulated GPU has no caches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from embforge.codegen.layout import layout_of
from embforge.codegen.plan import Plan
from embforge.codegen.spec import CollectionSpec
from embforge.inputs import Batch
from embforge.tuner.workload.workload import Workload, make_batch
from embforge.verify.cases import draw_tables
from embforge.verify.counting import count_lookup
from embforge.verify.probes import shrunk

MOST_ROWS, MOST_TABLE_BYTES = 20_000, 1 << 24
"""A table is made at most this large for counting: large enough that lanes of a warp seldom read the same row."""
MOST_IDS, LEAST_SAMPLES = 4096, 16
"""A batch for counting has about this many ids, and at least this many samples. Counting goes thread by thread, so that
larger batches would take long."""


def sector_counter(spec: CollectionSpec, workload: Workload, seed: int = 0) -> Callable[[Plan], float]:
    """A function that returns a CUDA plan's sectors per output, loaded and stored; an output is a bag, or a row of
    pooling 'none'. Tables and the batch are drawn once."""
    widest = max(table.stride_bytes for table in layout_of(spec).tables)
    small = shrunk(spec, max(1, min(MOST_ROWS, MOST_TABLE_BYTES // widest)))
    probe = make_batch(spec, replace(workload, batch=LEAST_SAMPLES), seed)
    samples = LEAST_SAMPLES * MOST_IDS // max(1, probe.values.size)
    drawn = make_batch(spec, workload.at_most(max(samples, LEAST_SAMPLES)), seed)
    for index, feature in enumerate(small.features):  # recorded ids are rows of the whole table
        drawn.values[drawn.feature(index)] %= small.table(feature.table).num_embeddings
    # Copies, because torch's memory starts at a sector, as a GPU's does; numpy's may start anywhere.
    values, offsets = torch.from_numpy(drawn.values).clone(), torch.from_numpy(drawn.offsets).clone()
    weights = None if drawn.weights is None else torch.from_numpy(drawn.weights).clone()
    batch = Batch(values, offsets, weights, drawn.size, None)
    tables = draw_tables(small, seed)

    def count(plan: Plan) -> float:
        whole_lookup = count_lookup(replace(plan, target="simt"), tables, batch, seed=seed)[-1]
        moved = whole_lookup.counters.all_loads.sectors + whole_lookup.counters.all_stores.sectors
        return moved / max(1, whole_lookup.outputs)

    return count
