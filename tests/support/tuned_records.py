"""Tuned results for tests, by default for one spec on this machine."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from embforge.codegen.params import CpuBackwardParams, CpuParams, Params
from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.codegen.tuned.record import Gain, Hardware, Key, Record, Traffic
from embforge.codegen.tuned.shape import shape_of
from embforge.plan_choice import cpu_hardware

SPEC = CollectionSpec([TableSpec("t", 500, 16)], [FeatureSpec("f", "t"), FeatureSpec("g", "t", "mean")])
FAST = CpuParams(prefetch_bytes=1024, tile_vectors=4)
FASTER = CpuParams(prefetch_bytes=4096)
FAST_BACKWARD = CpuBackwardParams(radix_bits=8)


def this_machine() -> Hardware:
    """This machine as modules describe it when they look for tuned results."""
    return cpu_hardware()


def record_of(
    params: Params = FAST,
    spec: CollectionSpec = SPEC,
    *,
    op: str = "forward",
    target: str = "cpu",
    rule: str | None = None,
    hardware: Hardware | None = None,
    traffic: Traffic = Traffic(2048, 1, 1.05),  # noqa: B008  # frozen
    id_dtype: str = "int64",
    cache: str = "warm",
    **changes: Any,
) -> Record:
    key = Key(op, target, rule, shape_of(spec), hardware or this_machine(), traffic, id_dtype, cache)
    record = Record(
        key=key,
        params=asdict(params),
        workload="zipf:1.05,batch=2048",
        gain=Gain(1.23, 1.2, 1.26),
        noise_floor=0.008,
        samples={"default": (1.23e-4, 1.25e-4), "best": (1e-4, 1.01e-4), "duplicate": (1e-4, 1e-4)},
        versions={"embforge": "0.1.0"},
        created="2026-01-31T12:00:00+00:00",
    )
    return replace(record, **changes)


def scaled(spec: CollectionSpec, rows: int) -> CollectionSpec:
    """The spec with `rows` times as many rows in every table."""
    tables = [TableSpec(t.name, t.num_embeddings * rows, t.embedding_dim, t.dtype) for t in spec.tables]
    return CollectionSpec(tables, spec.features, spec.output_dtype, spec.name)


def write_spec(path: Path, spec: CollectionSpec = SPEC) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(spec.to_toml())
    return path
