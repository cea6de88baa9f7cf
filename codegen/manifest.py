"""What `embforge gen` emits beside the kernels: `manifest.json`, the list by which they are found again.

Paths in it are relative to its directory, so a directory of kernels can be moved, shipped and mounted.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from embforge.codegen.cache import MOST_BYTES, sha256_of, write_atomically
from embforge.codegen.reading.documents import DocumentError, is_file_name, read_file, read_json, shown
from embforge.codegen.errors import MissingKernelError
from embforge.codegen.plan import Plan
from embforge.codegen.signature import arguments_of
from embforge.codegen.stages import STAGES, StagePlan, stage_arguments

MANIFEST = "manifest.json"
MANIFEST_SCHEMA = 2

RECORD: dict[str, tuple[Callable[[Any], bool], str]] = {
    "uri": (lambda value: isinstance(value, str), "text"),
    "shape": (lambda value: isinstance(value, str), "text"),
    "symbol": (lambda value: isinstance(value, str), "text"),
    "code_sha256": (lambda value: isinstance(value, str), "text"),
    "source": (is_file_name, "the name of a file beside it"),
    "source_sha256": (lambda value: isinstance(value, str), "text"),
    "binary": (lambda value: value is None or is_file_name(value), "the name of a file beside it, or null"),
    "binary_sha256": (lambda value: value is None or isinstance(value, str), "text, or null"),
    "symbols": (lambda value: isinstance(value, list) and all(isinstance(v, dict) for v in value), "a list of objects"),
}
"""Fields by which a kernel is found again, what each may be, and that in words: anything else is no record."""

HEADLINE = ("registers", "spill_bytes", "shared_bytes", "occupancy", "bytes_in_flight")
"""Resource figures lifted from a binary's symbols to the kernel itself: the worst of them."""


def kernel_record(
    plan: Plan | StagePlan,
    code: str,
    source: str,
    source_name: str,
    binary: bytes | None,
    binary_name: str | None,
    resources: list[dict[str, Any]],
) -> dict[str, Any]:
    """One kernel's line in the manifest. `code` is the source of the plan without names. Figures that do not exist
    (sources only, or a CPU) are null."""
    return {
        "uri": plan.uri,
        "shape": shape_of(plan).uri,
        "op": plan.op,
        "target": plan.target,
        "arch": plan.arch,
        "id_dtype": plan.id_dtype,
        "collection": None if isinstance(plan, StagePlan) else plan.spec.name,
        "symbol": plan.symbol,
        "code_sha256": sha256_of(code.encode()),
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
    path, remedy = directory / MANIFEST, f"make it anew by `embforge gen SPEC --out {directory}`"
    try:
        manifest = read_json(path)
        schema = manifest.get("schema") if isinstance(manifest, dict) else None
        if schema is None:
            raise DocumentError("it has no 'schema'")
        if schema == MANIFEST_SCHEMA:
            _check(manifest)
    except FileNotFoundError:
        raise MissingKernelError(f"{path} does not exist; make it by `embforge gen SPEC --out {directory}`") from None
    except DocumentError as error:
        raise MissingKernelError(f"{path} is not a manifest ({error}); {remedy}") from error
    if schema != MANIFEST_SCHEMA:
        raise MissingKernelError(f"{path} has schema {shown(schema)}, this embforge reads {MANIFEST_SCHEMA}; {remedy}")
    return dict(manifest)


def _check(manifest: dict[str, Any]) -> None:
    """`DocumentError` for a manifest by which kernels cannot be found."""
    if not isinstance(manifest.get("embforge"), str):
        raise DocumentError("it has no 'embforge', the version that wrote it")
    kernels = manifest.get("kernels")
    if not isinstance(kernels, list):
        raise DocumentError("it has no list 'kernels'")
    for record in kernels:
        for name, (is_right, wanted) in RECORD.items():
            if not isinstance(record, dict) or name not in record:
                raise DocumentError(f"a kernel's record lacks {name!r}")
            if not is_right(record[name]):
                raise DocumentError(f"a kernel's {name} is {shown(record[name])}, and not {wanted}")


def shape_of(plan: Plan | StagePlan) -> Plan | StagePlan:
    """The plan by whose URI a kernel is found again: without names, because no code depends on them."""
    return plan if isinstance(plan, StagePlan) else plan.nameless


def find_kernel(directory: Path, plan: Plan | StagePlan, code: str) -> dict[str, Any] | None:
    """The record of a kernel of the plan's shape with a binary, hashes checked; None if the directory has none.

    Of several that differ in names the plan's own is taken, else the first. `code` is the source of the plan without
    names. `MissingKernelError` if another version generated the kernel, or if it was changed since.
    """
    manifest, shape = read_manifest(directory), shape_of(plan).uri
    fitting = [r for r in manifest["kernels"] if r["shape"] == shape and r["binary"] is not None]
    if not fitting:
        return None
    record: dict[str, Any] = next((r for r in fitting if r["uri"] == plan.uri), fitting[0])
    remedy = "take it out" if isinstance(plan, StagePlan) else f"make it anew by `{gen_command(plan, directory)}`"
    if record["code_sha256"] != sha256_of(code.encode()):
        raise MissingKernelError(
            f"kernel {plan.uri} in {directory} was generated by embforge {manifest['embforge']}, whose source for this "
            f"plan differs from that of {version('embforge')}; {remedy}"
        )
    binary = directory / record["binary"]
    try:
        found = sha256_of(read_file(binary, MOST_BYTES))
    except (FileNotFoundError, DocumentError) as error:
        reason = "No such file" if isinstance(error, FileNotFoundError) else error
        raise MissingKernelError(f"kernel {plan.uri}: {binary} cannot be read ({reason}); {remedy}") from None
    if found != record["binary_sha256"]:
        raise MissingKernelError(f"kernel {plan.uri}: {binary} is not what its manifest says; {remedy}")
    return record


def gen_command(plan: Plan, directory: Path | None) -> str:
    """The command that emits exactly this plan's kernel; the spec's file is not known here, hence SPEC."""
    words = ["embforge gen SPEC", f"--target {plan.target}", f"--arch {plan.arch}", f"--ids {plan.id_dtype}"]
    if plan.op != "forward":
        from embforge.codegen.plans import SPARSE, name_of

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
