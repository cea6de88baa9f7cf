"""The spec in a few lines of plain text: the head comment of every generated source."""

from __future__ import annotations

import json
from dataclasses import asdict

from embforge.codegen.buckets import Bucket
from embforge.codegen.plan import Plan


def describe(plan: Plan) -> list[str]:
    """Tables, features and plan fields, a line each, aligned."""
    spec, layout = plan.spec, plan.layout
    lines = [f"Collection {spec.name or '(unnamed)'}: {plan.id_dtype} ids, {spec.output_dtype} output, {plan.arch}."]
    lines.append("Plan: " + ", ".join(f"{k}={json.dumps(v)}" for k, v in asdict(plan.params).items()))
    width = max(len(f.name) for f in spec.features)
    for placed in layout.features:
        feature, table = placed.feature, layout.tables[placed.table_index]
        notes = [
            f"columns {placed.column}..{placed.column + placed.width - 1}"
            if placed.column is not None
            else "a row an id",
            *(["weighted"] if feature.weighted else []),
            *([f"padding {feature.padding_idx}"] if feature.padding_idx is not None else []),
        ]
        lines.append(
            f"  {feature.name:<{width}}  {feature.pooling:<6} of {table.table.name} "
            f"[{table.table.num_embeddings} x {table.table.embedding_dim} {table.table.dtype}], {', '.join(notes)}"
        )
    return lines


def bucket_line(bucket: Bucket) -> str:
    """What a bucket holds, for a comment above its code."""
    names = ", ".join(f.feature.name for f in bucket.features)
    return f"rows of {bucket.row_bytes} bytes, {bucket.stride_bytes} apart: {names}"
