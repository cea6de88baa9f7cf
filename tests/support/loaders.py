"""Every kind of file that the package reads: the function that reads it, the error it may raise, and a valid file."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from support.tuned_records import record_of

from benchmarks.oracle_cases import read_oracle
from embforge.cli.plan import _fixed_plan
from embforge.codegen import cache
from embforge.codegen.errors import (
    EmbforgeError,
    MissingKernelError,
    PlanError,
    RuleError,
    SpecError,
    TunedError,
    WorkloadError,
)
from embforge.codegen.layout import layout_of
from embforge.codegen.manifest import find_kernel, read_manifest
from embforge.codegen.params import CpuParams
from embforge.codegen.plan import Plan
from embforge.codegen.planner.topology import load_topology
from embforge.codegen.plans import numbers_named, update_named
from embforge.codegen.sharding.kinds import ShardPlan
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.tuned.document import read_records, to_json
from embforge.codegen.tuned.stores import read_file as read_stored
from embforge.trace.file_format import read_trace

SPEC = CollectionSpec.from_dict(
    {
        "name": "small",
        "table": [{"name": "t", "num_embeddings": 10, "embedding_dim": 4, "dtype": "bf16"}],
        "feature": [
            {"name": "f", "table": "t", "pooling": "mean", "weighted": True, "padding_idx": 3},
            {"name": "g", "table": "t", "pooling": "concat", "hotness": 2},
        ],
    }
)
PLAN = Plan("forward", "cpu", "avx2", "int64", SPEC, CpuParams())


@dataclass(frozen=True)
class Loader:
    """A kind of file."""

    file: str
    """The file's name, which some loaders look for."""
    good: bytes
    read: Callable[[Path], Any]
    """Reads the file and uses what it contains."""
    error: type[EmbforgeError] | tuple[()]
    """The error that a damaged file raises, which names the file; empty if damaged files are skipped."""


def _spec(path: Path) -> None:
    spec = CollectionSpec.from_toml(path)
    layout_of(spec)
    assert CollectionSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def _topology(path: Path) -> None:
    topology = load_topology(path)
    assert 0 < topology.limit < float("inf")
    topology.to_toml()


def _manifest(path: Path) -> None:
    read_manifest(path.parent)
    find_kernel(path.parent, PLAN, "source")


def _trace(path: Path) -> None:
    trace = read_trace(path)
    ids = [trace.ids_of(feature) for feature in range(len(trace.features))]
    assert sum(part.size for part in ids) == trace.values.size == trace.lengths.sum()
    assert all(((part >= 0) & (part < rows)).all() for part, rows in zip(ids, trace.rows, strict=True))
    assert (trace.lengths >= 0).all() and trace.lengths.size == trace.samples * len(trace.features)
    assert len(trace.digest) == 16


def _rule(path: Path) -> None:
    update_named(str(path))
    numbers_named(str(path))


def _plan_text(path: Path) -> None:
    """The text of a plan, which has no file of its own: exported programs contain it."""
    try:
        Plan.from_text(path.read_text(encoding="utf-8", errors="replace"))
    except EmbforgeError as error:
        raise PlanError(f"{path}: {error}") from error


@dataclass(frozen=True)
class _At:
    """The attributes of a case that `read_oracle` reads."""

    table_file: Path
    train: str | None = None


def archive(**arrays: Any) -> bytes:
    """A `.npz` file's bytes."""
    data = io.BytesIO()
    np.savez_compressed(data, **arrays)
    return data.getvalue()


HEADER = json.dumps({"schema": 1, "features": ["f", "g"], "rows": [10, 20], "shape": "s"})
PARTS: dict[str, Any] = {
    "header": np.array(HEADER),
    "sizes": np.array([1, 2]),
    "lengths": np.array([1, 0, 2, 0, 1, 1]),
    "values": np.array([9, 0, 1, 19, 2]),
    "weights": np.ones(5, np.float32),
}
TOPOLOGY = b"""name = "here"
nodes = 2
ranks_per_node = 4
measured = true
source = "a data sheet"
[rank]
memory_gb = 80.0
usable = 0.9
lookup_gb_s = 1e3
launch_us = 3
[node_link]
gb_s = 100
latency_us = 5
[rail]
gb_s = 10
latency_us = 9
message_us = 1
[hardware]
arch = "sm_90"
"""
_MANIFEST = {
    "schema": 2,
    "embforge": "1",
    "kernels": [
        {
            "uri": PLAN.uri,
            "shape": PLAN.nameless.uri,
            "symbol": PLAN.symbol,
            "code_sha256": "0",
            "source": "k.cpp",
            "source_sha256": "0",
            "binary": "k.so",
            "binary_sha256": "0",
            "symbols": [{"symbol": "k"}],
        }
    ],
}
_ENTRY = {"schema": "1", "key": "k", "source": "a", "source_sha256": "0", "binary": "b", "binary_sha256": "0"}
_ORACLE = {"fields": ["prefetch_bytes"], "best": [4096], "facts": {}, "points": [[4096, 1.0], [0, 1.5]]}

LOADERS = {
    "spec": Loader("spec.toml", SPEC.to_toml().encode(), _spec, SpecError),
    "topology": Loader("topology.toml", TOPOLOGY, _topology, PlanError),
    "manifest": Loader("manifest.json", json.dumps(_MANIFEST, indent=1).encode(), _manifest, MissingKernelError),
    "trace": Loader("trace.npz", archive(**PARTS), _trace, WorkloadError),
    "tuned results": Loader(
        "tuned.json", to_json([record_of()]).encode(), lambda path: _named(path, read_records), TunedError
    ),
    "tuned store": Loader("forward-cpu-0123456789abcdef.json", to_json([record_of()]).encode(), read_stored, ()),
    "rule": Loader("rule.json", json.dumps(update_named("adam").to_dict()).encode(), _rule, RuleError),  # type: ignore[union-attr]
    "shard plan": Loader(
        "plan.json",
        json.dumps(ShardPlan({"t": "grid", "u": "table_wise"}).to_dict()).encode(),
        lambda path: _fixed_plan(SPEC, None, path),
        PlanError,
    ),
    "plan text": Loader("plan.txt", PLAN.text.encode(), _plan_text, PlanError),
    "oracle": Loader("oracle.json", json.dumps(_ORACLE).encode(), lambda path: read_oracle(_At(path)), TunedError),  # type: ignore[arg-type]
    "cache entry": Loader("entry.json", json.dumps(_ENTRY).encode(), lambda path: cache.load(path.parent), ()),
}


def _named(path: Path, read: Callable[[Path], Any]) -> Any:
    """Reads a file and puts its name before errors, as the commands that read such a file do."""
    try:
        return read(path)
    except TunedError as error:
        raise TunedError(f"{path}: {error}") from error
