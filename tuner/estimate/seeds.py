"""Estimates on disk, from which a measured study starts: `estimates/` in the user's folder of tuned results.

There is one file for each op, architecture, shape and rule. Modules never read them, and none of them holds a time.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embforge.codegen.cache import write_atomically
from embforge.codegen.params import Params, params_from
from embforge.codegen.reading.documents import read_json
from embforge.codegen.rules.rule import Update
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.tuned.shape import rule_named, shape_of
from embforge.codegen.tuned.stores import Problem, user_dir, warn_once
from embforge.tuner.estimate.estimate import FORMULA

if TYPE_CHECKING:
    from embforge.tuner.estimate.static import StaticReport

FOLDER = "estimates"
SCHEMA, VERSION = "embforge_estimate", 1


def save_seeds(report: StaticReport) -> Path:
    """Stores an estimate with all its rows. It replaces one for the same op, architecture, shape and rule."""
    path = _path(report.op, report.arch, report.spec, report.update)
    data = {
        SCHEMA: VERSION,
        "formula": FORMULA,
        "op": report.op,
        "arch": report.arch,
        "workload": report.workload,
        "rows": [asdict(row) for row in report.rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(data, indent=1) + "\n").encode())
    return path


def load_seeds(
    op: str, arch: str, spec: CollectionSpec, update: Update | None = None, count: int | None = None
) -> list[Params]:
    """The plans of the stored estimate, best first and at most `count`; empty if there is no estimate.

    A file that cannot be read, or whose plans this embforge does not know, is skipped with a warning.
    """
    path = _path(op, arch, spec, update)
    try:
        return _plans(read_json(path), op)[:count]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warn_once(
            Problem(path, f"not an estimate of this embforge ({error}); write it again by `embforge tune --static`")
        )
        return []


def _plans(data: Any, op: str) -> list[Params]:
    if data[SCHEMA] != VERSION:
        raise ValueError(f"schema {data[SCHEMA]}, this embforge reads {VERSION}")
    return [params_from("cuda", row["params"], op) for row in data["rows"]]


def _path(op: str, arch: str, spec: CollectionSpec, update: Update | None) -> Path:
    rule = f"-{re.sub(r'[^A-Za-z0-9]+', '_', rule_named(update))}" if op == "backward" else ""
    return user_dir() / FOLDER / f"{op}{rule}-{arch}-{shape_of(spec).digest}.json"
