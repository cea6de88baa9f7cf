"""The facts of the CUDA sources of a backward and of a reduction.

The row at a position, numbered over all tables, is the position's key. Keys are sorted; equal keys are a run; a group
of lanes adds up the gradients of a run and updates its row. Runs of more than `medium_run` occurrences are put into the
list `waiting` of their bucket and worked on after all others. The full chunks of runs that are longer than a chunk are
added up by earlier kernels.
"""

from __future__ import annotations

import math
from typing import Any

from embforge.codegen.describe import counted, describe, head_facts
from embforge.codegen.dtypes import DTYPES, FLOATS
from embforge.codegen.kernel import MISTAKES, arguments_of, records_of
from embforge.codegen.layout import FeatureLayout, StateLayout, largest_power_of_two
from embforge.codegen.plan import Plan
from embforge.codegen.poolings import RESULTS
from embforge.codegen.rules.emit import rule_facts
from embforge.codegen.semantics import CHUNK, PHILOX_ROUNDS, ROW_LANES
from embforge.codegen.targets.cuda.arch import arch_named
from embforge.codegen.targets.cuda.backward_geometry import (
    RowBucket,
    backward_params,
    is_row_wise,
    key_dtype,
    key_firsts,
    key_tables,
    min_blocks,
    partial_width,
    row_buckets,
    scaled_columns,
    scaled_features,
    scaled_width,
    scales_sequence,
    sums_rows,
)
from embforge.codegen.targets.cuda.backward_launch import EACH, KERNELS, BackwardShape, backward_shape, symbol_of
from embforge.codegen.targets.cuda.formats import format_facts
from embforge.codegen.targets.cuda.shared_memory import check_shared

LOAD_HINT = ".L1::no_allocate"
"""The gradient of a bag is read once per row of the bag, which caches beyond L1 absorb."""
LIGHT_BLOCKS = 4
"""Blocks of 256 threads that a multiprocessor must hold, for kernels that move no rows."""
CONSTANT_MEMORY = 60 * 1024
FEATURE_RECORD, SLOT_RECORD = 80, 16
"""Bytes of the template's structures Feature and Slot, at most."""


def backward_facts(plan: Plan) -> dict[str, Any]:
    """Everything that `cuda/backward/backward.cu.j2` names. `PlanError` for a plan that cannot work."""
    check_shared(plan)
    buckets = row_buckets(plan)
    update = plan.update
    firsts, tables = key_firsts(plan), key_tables(plan)
    facts = common_facts(plan, buckets, {t.dtype for t in plan.spec.tables} | {b.item for b in buckets} | {"fp32"})
    facts |= {
        "symbols": {name: symbol_of(plan.symbol, name) for name in KERNELS},
        "load_bytes": sorted({16, *(b.item_load for b in buckets), *(_partial_load(b) for b in buckets)}, reverse=True),
        "own_bytes": _own_bytes(buckets) if update else set(),
        "key_type": DTYPES[key_dtype(plan)].c_type,
        "min_blocks": min_blocks(plan),
        "light_blocks": light_blocks(plan),
        "chunk_bits": CHUNK.bit_length() - 1,
        "words": backward_shape_of(plan).words,
        "each": EACH,
        "medium_run": backward_params(plan).medium_run,
        "key_firsts": firsts,
        "slots": [
            {"first": first, "table": table, "comment": plan.spec.tables[table].name}
            for first, table in zip(firsts, tables, strict=False)
        ],
        "first_slots": [*(b.first for b in buckets), len(tables)],
        "buckets": [bucket_facts(b) for b in buckets],
        "scaled": [f.index for f in scaled_features(plan) if f.column is not None],
        "scaled_width": scaled_width(plan),
        "scales_sequence": scales_sequence(plan),
        "any_weighted": any(b.weighted for b in buckets),
        "any_selected": any(b.selects for b in buckets),
        "partial_width": partial_width(plan),
        "row_wise": is_row_wise(plan),
        "row_sums": sums_rows(plan),
        **sum_facts(buckets),
        "update": update is not None,
        "gradient_store": largest_power_of_two(math.gcd(*(b.dim for b in buckets)) * 4, 16),
    }
    if update is not None:
        any_narrow = any(FLOATS[b.dtype].is_narrow for b in buckets)
        facts |= rule_facts(update) | {
            "any_narrow": any_narrow,
            "stochastic": update.rounding == "stochastic" and any_narrow,
            "philox_rounds": PHILOX_ROUNDS,
        }
    return facts


def sum_facts(buckets: tuple[RowBucket, ...]) -> dict[str, Any]:
    """The sizes of the memory for sums of rows."""
    return {
        "row_lanes": ROW_LANES,
        "most_elements": max(b.elements for b in buckets),
        "most_per_warp": max(b.per_warp for b in buckets),
    }


def backward_shape_of(plan: Plan) -> BackwardShape:
    """What all launches of the plan have in common."""
    scalars = 0 if plan.update is None else len(rule_facts(plan.update)["rule"]["scalar_fields"])
    return backward_shape(plan, scalars=2 + scalars)


def common_facts(plan: Plan, buckets: tuple[RowBucket, ...], dtypes: set[str]) -> dict[str, Any]:
    """The facts of all kernels of a backward: types, features,
    arguments. `dtypes`: the formats of rows that they read."""
    notes = [*describe(plan), "", "Buckets, widest rows first:", *map(bucket_line, buckets)]
    tables, layout = key_tables(plan), plan.layout
    records = FEATURE_RECORD * len(layout.features) + SLOT_RECORD * (len(tables) + 1)
    firsts = dict(zip(tables, key_firsts(plan), strict=False))
    columns = scaled_columns(plan)
    scaled = {f.index for f in scaled_features(plan)}
    sequence = {f.index: number for number, f in enumerate(layout.sequence_features)}
    return {
        **head_facts(plan, notes),
        "load_hint": LOAD_HINT,
        **format_facts(dtypes, arch_named(plan.arch), alone=[plan.spec.output_dtype]),
        "narrow": None,
        "gradient": FLOATS[plan.spec.output_dtype],
        "output_dtype": "fp32",
        "id_type": DTYPES[plan.id_dtype].c_type,
        "key_type": DTYPES[key_dtype(plan)].c_type,
        "out_type": DTYPES[plan.spec.output_dtype].c_type,
        "constants": "__constant__" if records <= CONSTANT_MEMORY else "__device__",
        "threads": backward_params(plan).block,
        "output_width": layout.output_width,
        "divisor_width": layout.divisor_width,
        "winner_width": layout.winner_width,
        "chunk_bits": CHUNK.bit_length() - 1,
        "mistakes": MISTAKES,
        "arguments": arguments_of(plan.target, plan.op),
        "records": records_of(arguments_of(plan.target, plan.op)),
        "pooling_results": RESULTS,
        "sequences": list(sequence),
        "any_absent": plan.spec.has_absent_ids,
        "features": [
            _feature_facts(
                plan, f, firsts[f.table_index], columns.get(f.index, 0 if f.index in scaled else -1), sequence
            )
            for f in layout.features
        ],
    }


def _feature_facts(plan: Plan, f: FeatureLayout, first: int, scaled: int, sequence: dict[int, int]) -> dict[str, Any]:
    feature = f.feature
    padding = plan.spec.padding_row(feature)
    return {
        "table": f.table_index,
        "dim": f.dim,
        "first": first,
        "padding": -1 if padding is None else padding,
        "absent": plan.spec.absent_id(feature) or 0,
        "column": -1 if f.column is None else f.column,
        "scaled": scaled,
        "kept": plan.layout.kept_column(f.index),
        "hotness": feature.slots,
        "sequence": sequence.get(f.index, -1),
        "pooling": feature.kind.result,
        "weighted": feature.weighted,
        "comment": f"{feature.name} -> {feature.table}",
    }


def bucket_facts(b: RowBucket) -> dict[str, Any]:
    """The numbers of the struct that the source has for a bucket."""
    states = b.layout.states
    return {
        "name": b.name,
        "index": b.index,
        "comment": f"rows of {b.layout.row_bytes} bytes, {b.layout.stride_bytes} apart",
        "element": DTYPES[b.dtype].c_type,
        "item": DTYPES[b.item].c_type,
        "dim": b.dim,
        "stride": b.layout.stride_bytes,
        "elements": b.elements,
        "vectors": b.vectors,
        "lanes": b.lanes,
        "tiles": b.tiles,
        "per_warp": b.per_warp,
        "groups": b.groups,
        "item_load": b.item_load,
        "rows": b.rows,
        "weighted": b.weighted,
        "selects": b.selects,
        "first": b.first,
        "last": b.first + len(b.tables),
        "state_stride": b.layout.state_stride_bytes,
        "state_load": b.state_load,
        "element_states": [s.offset for s in states if s.extent == "element"],
        "row_states": [_row_state(s) for s in states if s.extent == "row"],
    }


def _row_state(state: StateLayout) -> str:
    return f"{'row' if state.placement == 'tail' else 'states'} + {state.offset}"


def bucket_line(b: RowBucket) -> str:
    """A line about a bucket for the head comment of the source."""
    tiles = f" in {b.tiles} tiles" if b.tiles > 1 else ""
    return (
        f"  {b.name}: {counted(b.vectors, 'vector')} of {b.elements} per row{tiles}, "
        f"{counted(b.groups, 'row')} per block at once, {counted(b.rows, 'gradient')} in flight per lane"
    )


def _partial_load(b: RowBucket) -> int:
    return min(16, 4 * b.elements)


def _own_bytes(buckets: tuple[RowBucket, ...]) -> set[int]:
    """Bytes of the loads of rows and states."""
    return {b.elements * DTYPES[b.dtype].bytes for b in buckets} | {b.state_load for b in buckets}


def light_blocks(plan: Plan) -> int:
    """The number of blocks that a multiprocessor must hold, for kernels that move no rows."""
    return max(1, min(256 * LIGHT_BLOCKS, arch_named(plan.arch).threads) // backward_params(plan).block)
