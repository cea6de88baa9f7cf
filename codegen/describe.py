"""The head comment of every generated source: what the file is, and what it was made for."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from embforge.codegen.buckets import Bucket
from embforge.codegen.kernel import KernelPlan
from embforge.codegen.plan import Plan

TITLES = {
    "forward": "All embedding lookups of a collection in one call",
    "forward_train": "All embedding lookups of a collection in one call, which also writes what a backward needs",
    "backward": "The backward of a collection: reduces the gradients of rows and updates the rows",
    "reduce": "The backward of a collection: reduces the gradients of rows",
    "weight_gradient": "The backward of a collection: the gradients of per-sample weights",
    "resolve": "Turns the ids of a collection into rows, before its lookups",
    "stages": "The stages between the ranks of a sharded collection",
}
"""What a library is, by its op."""


def head_facts(plan: KernelPlan, notes: Iterable[str]) -> dict[str, Any]:
    """Everything that `shared/header.h.j2` names. `notes` say what the source was made for, after an empty line."""
    return {
        "uri": plan.uri,
        "title": TITLES[plan.op],
        "version": version("embforge"),
        "arch": plan.arch,
        "notes": ["", *notes],
    }


def describe(plan: Plan) -> list[str]:
    """The tables, features and plan fields, one line each, aligned."""
    spec, layout = plan.spec, plan.layout
    lines = [f"Collection {spec.name or '(unnamed)'}: {plan.id_dtype} ids, {spec.output_dtype} output, {plan.arch}."]
    lines.append("Plan: " + ", ".join(f"{k}={json.dumps(v)}" for k, v in asdict(plan.params).items()))
    width = max(len(f.name) for f in spec.features)
    for f in layout.features:
        feature, table = f.feature, layout.tables[f.table_index]
        notes = [
            f"columns {f.column}..{f.column + f.width - 1}" if f.column is not None else "one row per id",
            *(["weighted"] if feature.weighted else []),
            *([f"padding {feature.padding_idx}"] if feature.padding_idx is not None else []),
        ]
        lines.append(
            f"  {feature.name:<{width}}  {feature.pooling:<6} of {table.table.name} "
            f"[{table.table.num_embeddings} x {table.table.embedding_dim} {table.table.dtype}], {', '.join(notes)}"
        )
    return lines


def describe_remaps(plan: Plan) -> list[str]:
    """How the ids of each feature turn into rows, one feature per line, for the source of the step that does so."""
    spec = plan.spec
    lines = [f"Collection {spec.name or '(unnamed)'}: {plan.id_dtype} ids, {plan.arch}."]
    width = max(len(f.name) for f in spec.features)
    for feature in spec.features:
        table = spec.table(feature.table)
        if table.ids_are_rows:
            lines.append(f"  {feature.name:<{width}}  ids are rows of {table.name}")
            continue
        padding = "" if feature.padding_idx is None else f", {feature.padding_idx} is absent"
        ids = f"{table.remap} ids of {table.name}, which has {table.num_embeddings} rows"
        lines.append(f"  {feature.name:<{width}}  {ids}{padding}")
    return lines


def bucket_line(bucket: Bucket) -> str:
    """The sizes and features of a bucket, for a comment above its code."""
    names = ", ".join(f.feature.name for f in bucket.features)
    return f"rows of {bucket.row_bytes} bytes, {bucket.stride_bytes} apart: {names}"


def counted(number: int, noun: str) -> str:
    """A number and its noun: `1 row`, `2 rows`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
