"""What the CUDA templates of a backward and of a reduction state about a plan.

A position's row, numbered over all tables, is its key. Keys are sorted; equal ones are a run; a group of lanes adds up
a run's gradients and updates its row. Runs of more than `medium_run` occurrences are put into the list `waiting` of
their bucket and worked on behind all others. Of runs past a chunk, kernels before have summed the full chunks.
"""

from __future__ import annotations

import math
from typing import Any

from embforge.codegen.describe import describe, head_facts
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
"""Gradients of a bag are read once a row, which caches further away absorb."""
LIGHT_BLOCKS = 4
"""Blocks of 256 threads a multiprocessor must hold of kernels that move no rows."""
CONSTANT_MEMORY = 60 * 1024
FEATURE_RECORD, SLOT_RECORD = 80, 16
"""Bytes of the template's records, at most."""


def backward_facts(plan: Plan) -> dict[str, Any]:
    """Everything `cuda/backward/backward.cu.j2` names. `PlanError` for a plan that cannot work."""
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
    """How large the room for sums of rows is."""
    return {
        "row_lanes": ROW_LANES,
        "most_elements": max(b.elements for b in buckets),
        "most_per_warp": max(b.per_warp for b in buckets),
    }


def backward_shape_of(plan: Plan) -> BackwardShape:
    """What launches of the plan have in common."""
    scalars = 0 if plan.update is None else len(rule_facts(plan.update)["rule"]["scalar_fields"])
    return backward_shape(plan, scalars=2 + scalars)


def common_facts(plan: Plan, buckets: tuple[RowBucket, ...], dtypes: set[str]) -> dict[str, Any]:
    """What all kernels of a backward state: types, features, arguments. `dtypes` are those that rows are read in."""
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


def _feature_facts(
    plan: Plan, placed: FeatureLayout, first: int, scaled: int, sequence: dict[int, int]
) -> dict[str, Any]:
    feature = placed.feature
    padding = plan.spec.padding_row(feature)
    return {
        "table": placed.table_index,
        "dim": placed.dim,
        "first": first,
        "padding": -1 if padding is None else padding,
        "absent": plan.spec.absent_id(feature) or 0,
        "column": -1 if placed.column is None else placed.column,
        "scaled": scaled,
        "kept": plan.layout.kept_column(placed.index),
        "hotness": feature.slots,
        "sequence": sequence.get(placed.index, -1),
        "pooling": feature.kind.result,
        "weighted": feature.weighted,
        "comment": f"{feature.name} -> {feature.table}",
    }


def bucket_facts(b: RowBucket) -> dict[str, Any]:
    states = b.placed.states
    return {
        "name": b.name,
        "index": b.index,
        "comment": f"rows of {b.placed.row_bytes} bytes, {b.placed.stride_bytes} apart",
        "element": DTYPES[b.dtype].c_type,
        "item": DTYPES[b.item].c_type,
        "dim": b.dim,
        "stride": b.placed.stride_bytes,
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
        "state_stride": b.placed.state_stride_bytes,
        "state_load": b.state_load,
        "element_states": [s.offset for s in states if s.extent == "element"],
        "row_states": [_row_state(s) for s in states if s.extent == "row"],
    }


def _row_state(state: StateLayout) -> str:
    return f"{'row' if state.placement == 'tail' else 'states'} + {state.offset}"


def bucket_line(b: RowBucket) -> str:
    tiles = f" in {b.tiles} tiles" if b.tiles > 1 else ""
    return (
        f"  {b.name}: {b.vectors} vectors of {b.elements} per row{tiles}, {b.groups} rows per block at once, "
        f"{b.rows} gradients in flight per lane"
    )


def _partial_load(b: RowBucket) -> int:
    return min(16, 4 * b.elements)


def _own_bytes(buckets: tuple[RowBucket, ...]) -> set[int]:
    """Widths of the loads of rows and states."""
    return {b.elements * DTYPES[b.dtype].bytes for b in buckets} | {b.state_load for b in buckets}


def light_blocks(plan: Plan) -> int:
    return max(1, min(256 * LIGHT_BLOCKS, arch_named(plan.arch).threads) // backward_params(plan).block)
