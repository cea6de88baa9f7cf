"""Reads `forward.toml` and `training.toml`: named workloads, each a spec and a workload string."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embforge.codegen.spec import CollectionSpec, FeatureSpec, TableSpec
from embforge.tuner.bench.training_rules import RULES

FORWARD = Path(__file__).with_name("forward.toml")
TRAINING = Path(__file__).with_name("training.toml")
GROUPS = ("large", "cache", "overhead")


@dataclass(frozen=True)
class BenchWorkload:
    """One workload of a suite: a spec and a workload string."""

    name: str
    group: str
    spec: CollectionSpec
    load: str
    against_torch: float | None = None
    """For group `overhead` only: how many times as fast as the nn.EmbeddingBag loop a call must be."""
    train: str | None = None
    """The update rule of a training step; None for a lookup."""


def read_workloads(path: Path = FORWARD) -> list[BenchWorkload]:
    """The workloads of a file, in the order of the file. `ValueError` names an entry that cannot be read."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["workload"]
    return [_workload(entry) for entry in entries]


def _workload(entry: dict[str, Any]) -> BenchWorkload:
    name, group, rule = entry["name"], entry["group"], entry.get("rule")
    if group not in GROUPS:
        raise ValueError(f"workload {name!r}: group={group!r} is not known; allowed: {', '.join(GROUPS)}")
    if (group == "overhead") != ("against_torch" in entry):
        raise ValueError(f"workload {name!r}: group 'overhead' needs against_torch, other groups do not take it")
    if rule is not None and rule not in RULES:
        raise ValueError(f"workload {name!r}: rule={rule!r} is not known; allowed: {', '.join(RULES)}")
    spec = collection_of(name, entry["tables"], [entry["rows"]], entry["dims"], entry.get("dtype", "fp32"))
    return BenchWorkload(name, group, spec, entry["load"], entry.get("against_torch"), rule)


def collection_of(
    name: str, tables: int, rows: Sequence[int], dims: Sequence[int], dtype: Any = "fp32"
) -> CollectionSpec:
    """A collection of `tables` tables with one feature each. Shorter lists of rows and dims are repeated."""
    specs = tuple(TableSpec(f"table{i}", rows[i % len(rows)], dims[i % len(dims)], dtype) for i in range(tables))
    features = tuple(FeatureSpec(f"feature{index}", table.name) for index, table in enumerate(specs))
    slug = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_").lower()
    return CollectionSpec(specs, features, name=slug if slug[0].isalpha() else f"case_{slug}")
