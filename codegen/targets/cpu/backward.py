"""The facts of the sources of a CPU backward, which reduces gradients of rows and updates the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from embforge.codegen.describe import describe, head_facts
from embforge.codegen.dtypes import DTYPES, FLOATS, narrow_floats
from embforge.codegen.kernel import Outcome, arguments_of, records_of
from embforge.codegen.layout import CollectionLayout, FeatureLayout, TableLayout
from embforge.codegen.params import CpuBackwardParams
from embforge.codegen.plan import Plan
from embforge.codegen.poolings import RESULTS, Shape
from embforge.codegen.rules.emit import rule_facts
from embforge.codegen.semantics import CHUNK, PHILOX_ROUNDS, ROW_LANES
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.targets.cpu.geometry import fits_in_cache, touched_bytes
from embforge.codegen.targets.cpu.isa import FLAGS, isa_of


@dataclass(frozen=True)
class Kind:
    """How the gradients of a table's ids are found. Tables of the same kind, dim and dtype share code."""

    sources: tuple[str, ...]
    """Where the gradients are: in `grad_pooled` ("pooled"), in
    `grad_sequence` ("sequence"), or divided beforehand ("scaled")."""
    any_weighted: bool = False
    any_selected: bool = False

    @property
    def direct(self) -> bool:
        """Whether an address is enough to find a gradient: there is one source, no weights and no selection."""
        return len(self.sources) == 1 and not self.any_weighted and not self.any_selected

    @property
    def label(self) -> str:
        return "_".join((*self.sources, *("weighted",) * self.any_weighted, *("selected",) * self.any_selected))


def reduce_facts(plan: Plan) -> dict[str, Any]:
    """Everything that `cpu/backward/backward.cpp.j2` names, for a reduction."""
    layout = plan.layout
    by_table = [[f for f in layout.features if f.table_index == index] for index in range(len(layout.tables))]
    kinds = [_kind_of(users) for users in by_table]
    labels = [f"d{t.table.embedding_dim}_{t.table.dtype}_{k.label}" for t, k in zip(layout.tables, kinds, strict=True)]
    tables, first = [], 0
    for table, kind, label, users in zip(layout.tables, kinds, labels, by_table, strict=True):
        tables.append(_table_facts(plan, table, kind, label) | {"first_feature": first})
        first += len(users)
        tables[-1]["last_feature"] = first
    features = _features(plan.spec, layout)
    return {
        **_shared(plan),
        "entries": [f"{plan.symbol}_count", plan.symbol],
        "tables": tables,
        "table_features": [f.index for users in by_table for f in users],
        "buckets": _buckets(plan, kinds, labels),
        "features": features,
        "poolings": {f["pooling"] for f in features},
        "dividing": [f for f in features if f["source"] == "scaled"],
        "scaled_width": sum(f["dim"] for f in features if f["source"] == "scaled"),
        "any_items": not all(kind.direct for kind in kinds),
        "output": FLOATS[plan.spec.output_dtype],
    }


def backward_facts(plan: Plan) -> dict[str, Any]:
    """Everything that `cpu/backward/backward.cpp.j2` names, for a reduction with an update after it."""
    update = plan.update
    assert update is not None
    any_narrow = any(FLOATS[table.dtype].is_narrow for table in plan.spec.tables)
    return {
        **reduce_facts(plan),
        **rule_facts(update),
        "entries": [plan.symbol],
        "any_narrow": any_narrow,
        "stochastic": any_narrow and update.rounding == "stochastic",
        "philox_rounds": PHILOX_ROUNDS,
        "counters": _counters(isa_of(plan).width // 2),
        "row_lanes": ROW_LANES,
    }


def weight_gradient_facts(plan: Plan) -> dict[str, Any]:
    """Everything that `cpu/backward/weight_gradient.cpp.j2` names."""
    layout = plan.layout
    features = _features(plan.spec, layout)
    for facts, f in zip(features, layout.features, strict=True):
        facts["label"] = f"d{f.dim}_{layout.tables[f.table_index].table.dtype}"
        # Here, the padding id of a bag that is not pooled is a row like any other.
        facts["padding"] = facts["padding"] if f.feature.kind.pooled else -1
    weighted = {f["label"]: layout.tables[f["table"]] for f in features if f["weighted"]}
    buckets = [
        {
            "label": label,
            "dim": table.table.embedding_dim,
            "table_type": DTYPES[table.table.dtype].c_type,
            "stride_bytes": table.stride_bytes,
            "ahead": max(1, _params(plan).prefetch_bytes // touched_bytes(table.row_bytes)),
        }
        for label, table in weighted.items()
    ]
    poolings = {f["pooling"] for f in features}
    return {**_shared(plan), "features": features, "poolings": poolings, "buckets": buckets, "row_lanes": ROW_LANES}


def _counters(lanes: int) -> list[int]:
    """The counter that each lane of a generator has: even lanes have the first half of them, odd lanes the second."""
    return [lane // 2 + lane % 2 * (lanes // 2) for lane in range(lanes)]


def _shared(plan: Plan) -> dict[str, Any]:
    isa, layout = isa_of(plan), plan.layout
    return {
        **head_facts(plan, describe(plan)),
        "op": plan.op,
        "compile_line": " ".join(["c++", *FLAGS, *isa.flags]),
        "isa": isa,
        "formats": narrow_floats([plan.spec.output_dtype, *(table.dtype for table in plan.spec.tables)]),
        "chunk": CHUNK,
        "params": _params(plan),
        "id_type": DTYPES[plan.id_dtype].c_type,
        "out_type": DTYPES[plan.spec.output_dtype].c_type,
        "output_width": layout.output_width,
        "divisor_width": layout.divisor_width,
        "winner_width": layout.winner_width,
        "most_dim": max(t.table.embedding_dim for t in layout.tables),
        "pooling_results": RESULTS,
        "any_absent": plan.spec.has_absent_ids,
        "arguments": arguments_of(plan.target, plan.op),
        "records": records_of(arguments_of(plan.target, plan.op)),
        "outcomes": Outcome,
    }


def _params(plan: Plan) -> CpuBackwardParams:
    assert isinstance(plan.params, CpuBackwardParams)
    return plan.params


def _source_of(f: FeatureLayout) -> str:
    if f.feature.kind.shape is Shape.SEQUENCE:
        return "sequence"
    return "scaled" if f.feature.kind.divides else "pooled"


def _kind_of(features: list[FeatureLayout]) -> Kind:
    sources = tuple(sorted({_source_of(f) for f in features}))
    weighted = any(f.feature.weighted for f in features)
    return Kind(sources, weighted, any(f.feature.kind.selects for f in features))


def _features(spec: CollectionSpec, layout: CollectionLayout) -> list[dict[str, Any]]:
    facts, scaled = [], 0
    for f in layout.features:
        feature = f.feature
        padding = spec.padding_row(feature)
        facts.append(
            {
                "index": f.index,
                "name": feature.name,
                "table": f.table_index,
                "pooling": feature.kind.result,
                "source": _source_of(f),
                "weighted": feature.weighted,
                "dim": f.dim,
                "column": f.column or 0,
                "padding": -1 if padding is None else padding,
                "absent": spec.absent_id(feature) or 0,
                "hotness": feature.slots,
                "kept": layout.kept_column(f.index),
                "scaled": scaled,
            }
        )
        scaled += f.dim if facts[-1]["source"] == "scaled" else 0
    return facts


def _table_facts(plan: Plan, layout: TableLayout, kind: Kind, label: str) -> dict[str, Any]:
    table, params = layout.table, _params(plan)
    key_bits = (table.num_embeddings - 1).bit_length()
    row_bytes = touched_bytes(layout.row_bytes) + touched_bytes(layout.state_stride_bytes)
    item_bytes = touched_bytes(table.embedding_dim * _source_bytes(plan, kind))
    return {
        "name": table.name,
        "label": label,
        "dim": table.embedding_dim,
        "key_bits": key_bits,
        "shift": 64 - key_bits if key_bits else 63,
        "direct": kind.direct,
        "rows_ahead": 0 if fits_in_cache(layout) else -(-params.prefetch_bytes // row_bytes),
        "gradients_ahead": -(-params.prefetch_bytes // item_bytes),
        "word_cost": 2 * row_bytes + item_bytes,
    }


def _buckets(plan: Plan, kinds: list[Kind], labels: list[str]) -> list[dict[str, Any]]:
    buckets: dict[str, dict[str, Any]] = {}
    for layout, kind, label in zip(plan.layout.tables, kinds, labels, strict=True):
        if label in buckets:
            buckets[label]["comment"] += f", {layout.table.name}"
            continue
        element = [s for s in layout.states if s.extent == "element"]
        row = [s for s in layout.states if s.extent == "row"]
        buckets[label] = {
            "label": label,
            "comment": f"rows of {layout.row_bytes} bytes: {layout.table.name}",
            "table_type": DTYPES[layout.table.dtype].c_type,
            "source_type": "float" if "scaled" in kind.sources else "out_t",
            "dim": layout.table.embedding_dim,
            "direct": kind.direct,
            "sources": kind.sources,
            "any_weighted": kind.any_weighted,
            "any_selected": kind.any_selected,
            "stride_bytes": layout.stride_bytes,
            "state_stride_bytes": layout.state_stride_bytes,
            "state_bytes": layout.state_stride_bytes,
            "element_states": [s.offset for s in element],
            "row_states": [s.offset for s in row],
            "row_states_in_tail": [str(s.placement == "tail") for s in row],
        }
    return list(buckets.values())


def _source_bytes(plan: Plan, kind: Kind) -> int:
    return DTYPES["fp32" if "scaled" in kind.sources else plan.spec.output_dtype].bytes
