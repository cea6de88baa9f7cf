"""What `embforge verify` leaves behind to attach to an issue: one JSON file."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embforge.codegen.spec import CollectionSpec
    from embforge.verify import VerifyReport


def report_name(spec: CollectionSpec, report: VerifyReport) -> str:
    """The file's name unless the user gives one."""
    return f"embforge-verify-{spec.name or 'collection'}-{report.on}-{report.arch}.json"


def report_data(spec: CollectionSpec, report: VerifyReport, device: dict[str, Any] | None) -> dict[str, Any]:
    """Spec, checks, device and the versions of everything that had a part in it; no path of the machine."""
    from embforge.codegen.cli.env import collect

    machine = collect()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **verdict(spec, report),
        "device": device,
        "system": machine["system"],
        "packages": machine["packages"],
        "collection": spec.to_dict(),
    }


def verdict(spec: CollectionSpec, report: VerifyReport) -> dict[str, Any]:
    """What was checked and how it went, as plain data."""
    return {
        "spec": spec.name,
        "on": report.on,
        "arch": report.arch,
        "passed": report.passed,
        "plans": report.plans,
        "plans_left_out": report.left_out,
        "checks": [vars(row) for row in report.rows],
    }


def write_report(path: Path, data: dict[str, Any]) -> None:
    """Writes the file whole or not at all. Infinities and NaN are null: JSON has no word for them."""
    from embforge.codegen.cache import write_atomically
    from embforge.codegen.cli.common import finite

    text = json.dumps(finite(data), indent=2, allow_nan=False)
    write_atomically(path, f"{text}\n".encode())
