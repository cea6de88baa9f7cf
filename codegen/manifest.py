"""What `embforge gen` emits beside the kernels: `manifest.json`, the list by which they are found again.

Paths in it are relative to its directory, so a directory of kernels can be moved, shipped and mounted.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from embforge.codegen.cache import sha256_of, write_atomically
from embforge.codegen.errors import MissingKernelError
from embforge.codegen.plan import Plan
from embforge.codegen.signature import arguments_of
from embforge.codegen.stages import STAGES, StagePlan, stage_arguments

MANIFEST = "manifest.json"
MANIFEST_SCHEMA = 1

RECORD = ("uri", "source", "source_sha256", "binary", "binary_sha256", "symbols")
"""Fields by which a kernel is found again: a record without one of them is no record."""

HEADLINE = ("registers", "spill_bytes", "shared_bytes", "occupancy", "bytes_in_flight")
"""Resource figures lifted from a binary's symbols to the kernel itself: the worst of them."""


def kernel_record(
    plan: Plan | StagePlan,
    source: str,
    source_name: str,
    binary: bytes | None,
    binary_name: str | None,
    resources: list[dict[str, Any]],
) -> dict[str, Any]:
    """One kernel's line in the manifest. Figures nobody has (sources only, or a CPU) are null."""
    return {
        "uri": plan.uri,
        "op": plan.op,
        "target": plan.target,
        "arch": plan.arch,
        "id_dtype": plan.id_dtype,
        "collection": None if isinstance(plan, StagePlan) else plan.spec.name,
        "symbol": plan.symbol,
        "source": source_name,
        "source_sha256": sha256_of(source.encode()),
        "binary": binary_name,
        "binary_sha256": None if binary is None else sha256_of(binary),
        "params": {} if isinstance(plan, StagePlan) else asdict(plan.params),
        "arguments": _arguments(plan),
        **_headline(resources),
        "symbols": resources,
    }


def write_manifest(directory: Path, records: Iterable[dict[str, Any]]) -> str | None:
    """Adds records to the directory's manifest; one of the same URI is replaced.

    A manifest that cannot be read (damaged, or of another schema) is begun anew; the sentence returned says so.
    """
    path, note = directory / MANIFEST, None
    try:
        known = {r["uri"]: r for r in read_manifest(directory)["kernels"]} if path.exists() else {}
    except MissingKernelError as error:
        known, note = {}, f"begun anew, because {str(error).partition(';')[0]}"
    known.update((record["uri"], record) for record in records)
    manifest = {
        "schema": MANIFEST_SCHEMA,
        "embforge": version("embforge"),
        "kernels": [known[uri] for uri in sorted(known)],
    }
    write_atomically(path, (json.dumps(manifest, indent=2) + "\n").encode())
    return note


def read_manifest(directory: Path) -> dict[str, Any]:
    """The directory's manifest; `MissingKernelError` says what is wrong with it and the remedy."""
    path = directory / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        schema = manifest["schema"]
        if schema == MANIFEST_SCHEMA:
            whole = isinstance(manifest["embforge"], str) and all(
                name in r for r in manifest["kernels"] for name in RECORD
            )
            if not whole:
                raise ValueError(f"a kernel's record lacks one of {', '.join(RECORD)}")
    except FileNotFoundError:
        raise MissingKernelError(f"{path} does not exist; make it by `embforge gen SPEC --out {directory}`") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise MissingKernelError(
            f"{path} is not a manifest ({reason}); make it anew by `embforge gen SPEC --out {directory}`"
        ) from error
    if schema != MANIFEST_SCHEMA:
        raise MissingKernelError(
            f"{path} has schema {schema}, this embforge reads {MANIFEST_SCHEMA}; "
            f"make it anew by `embforge gen SPEC --out {directory}`"
        )
    return manifest


def find_kernel(directory: Path, plan: Plan | StagePlan, source: str) -> dict[str, Any] | None:
    """The plan's record with a binary, hashes checked; None if the directory has none for this plan.

    `MissingKernelError` if it has one that another version generated or that was changed since.
    """
    manifest = read_manifest(directory)
    record: dict[str, Any] | None = next((r for r in manifest["kernels"] if r["uri"] == plan.uri), None)
    if record is None or record["binary"] is None:
        return None
    remedy = "take it out" if isinstance(plan, StagePlan) else f"make it anew by `{gen_command(plan, directory)}`"
    if record["source_sha256"] != sha256_of(source.encode()):
        raise MissingKernelError(
            f"kernel {plan.uri} in {directory} was generated by embforge {manifest['embforge']}, whose source for this "
            f"plan differs from that of {version('embforge')}; {remedy}"
        )
    binary = directory / record["binary"]
    try:
        found = sha256_of(binary.read_bytes())
    except OSError as error:
        raise MissingKernelError(f"kernel {plan.uri}: {binary} cannot be read ({error.strerror}); {remedy}") from None
    if found != record["binary_sha256"]:
        raise MissingKernelError(f"kernel {plan.uri}: {binary} is not what its manifest says; {remedy}")
    return record


def gen_command(plan: Plan, directory: Path | None) -> str:
    """The command that emits exactly this plan's kernel; the spec's file is not known here, hence SPEC."""
    words = ["embforge gen SPEC", f"--target {plan.target}", f"--arch {plan.arch}", f"--ids {plan.id_dtype}"]
    if plan.op != "forward":
        from embforge.codegen.training import SPARSE, name_of

        rule = SPARSE if plan.update is None else name_of(plan.update) or "RULE.json"
        words.append(f"--train {rule}")
    for field in fields(plan.params):
        value = getattr(plan.params, field.name)
        if value != field.default:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else value
            words.append(f"--param {field.name}={text}")
    return " ".join([*words, f"--out {shlex.quote(str(directory)) if directory else 'DIR'}"])


def _arguments(plan: Plan | StagePlan) -> list[str]:
    """A kernel's arguments; of stages, which are several functions, each with its name."""
    if not isinstance(plan, StagePlan):
        return [f"{a.c_type} {a.name}" for a in arguments_of(plan.target, plan.op)]
    return [f"{stage}: {a.c_type} {a.name}" for stage in STAGES for a in stage_arguments(plan.target, stage)]


def _headline(resources: list[dict[str, Any]]) -> dict[str, Any]:
    # A kernel is as good as its worst symbol: most registers, spills and shared memory, least occupancy and bytes.
    worst = {"occupancy": min, "bytes_in_flight": min}
    found: dict[str, Any] = {}
    for name in HEADLINE:
        values = [r[name] for r in resources if r.get(name) is not None]
        found[name] = worst.get(name, max)(values) if values else None
    return found
