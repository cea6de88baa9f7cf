"""The JSON file that `embforge verify` writes, to be attached to an issue."""

from __future__ import annotations

import json
import tempfile
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embforge.codegen.spec import CollectionSpec
    from embforge.verify.lookups import VerifyReport


def why_not_writable(directory: Path) -> str | None:
    """Why no file can be written there; None if one can. It tries, because permissions are not the only reason."""
    try:
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return error.strerror or str(error)


def report_name(spec: CollectionSpec, report: VerifyReport, began: datetime) -> str:
    """The file's name if the user names none: it contains the time, so every run writes its own file."""
    return f"embforge-verify-{spec.name or 'collection'}-{report.on}-{report.arch}-{began:%Y%m%dT%H%M%SZ}.json"


def report_data(spec: CollectionSpec, report: VerifyReport, began: datetime) -> dict[str, Any]:
    """Spec, checks, device and the versions of all software involved, but no path of the machine.

    `began` is a time in UTC.
    """
    from embforge.cli.env import collect

    machine = collect()
    return {
        "date": began.isoformat(timespec="seconds"),
        **verdict(spec, report),
        "device": report.device,
        "system": machine["system"],
        "packages": machine["packages"],
        "collection": spec.to_dict(),
    }


def verdict(spec: CollectionSpec, report: VerifyReport) -> dict[str, Any]:
    """The checks and their results, as plain data."""
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
    """Writes the whole file or none. Infinities and NaN become null, because JSON has neither."""
    from embforge.cli.common import finite
    from embforge.codegen.cache import write_atomically

    text = json.dumps(finite(data), indent=2, allow_nan=False)
    write_atomically(path, f"{text}\n".encode())
