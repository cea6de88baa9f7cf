"""The file `manifest.json` that `embforge gen` writes with the kernels: the list in which modules look them up.

Its paths are relative to its directory, so a directory of kernels can be moved, shipped and mounted.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from embforge.codegen.cache import MOST_BYTES, sha256_of, write_atomically
from embforge.codegen.errors import MissingKernelError
from embforge.codegen.kernel import KernelPlan, kernels_of
from embforge.codegen.params import Params
from embforge.codegen.plan import Plan
from embforge.codegen.reading.documents import DocumentError, is_file_name, read_file, read_json, shown

MANIFEST = "manifest.json"
MANIFEST_SCHEMA = 2

RECORD: dict[str, tuple[Callable[[Any], bool], str]] = {
    "uri": (lambda value: isinstance(value, str), "text"),
    "shape": (lambda value: isinstance(value, str), "text"),
    "symbol": (lambda value: isinstance(value, str), "text"),
    "code_sha256": (lambda value: isinstance(value, str), "text"),
    "source": (is_file_name, "the name of a file in the same directory"),
    "source_sha256": (lambda value: isinstance(value, str), "text"),
    "binary": (lambda value: value is None or is_file_name(value), "the name of a file in the same directory, or null"),
    "binary_sha256": (lambda value: value is None or isinstance(value, str), "text, or null"),
    "symbols": (lambda value: isinstance(value, list) and all(isinstance(v, dict) for v in value), "a list of objects"),
}
"""The fields by which a kernel is looked up: for each, a check of its value, and what is allowed, in words."""

HEADLINE = ("registers", "spill_bytes", "shared_bytes", "occupancy", "bytes_in_flight")
"""Resource figures of a kernel: the worst of those of its symbols."""


def kernel_record(
    plan: KernelPlan,
    code: str,
    source: str,
    source_name: str,
    binary: bytes | None,
    binary_name: str | None,
    resources: list[dict[str, Any]],
) -> dict[str, Any]:
    """The record of one kernel. `code` is the source of the plan without names. Figures that do not exist (for sources
    only, or on a CPU) are null."""
    about = plan.manifest_fields
    return {
        "uri": plan.uri,
        "shape": plan.nameless.uri,
        "op": plan.op,
        "target": plan.target,
        "arch": plan.arch,
        "id_dtype": plan.id_dtype,
        "collection": about["collection"],
        "symbol": plan.symbol,
        "code_sha256": sha256_of(code.encode()),
        "source": source_name,
        "source_sha256": sha256_of(source.encode()),
        "binary": binary_name,
        "binary_sha256": None if binary is None else sha256_of(binary),
        "params": about["params"],
        "arguments": _arguments(plan),
        **_headline(resources),
        "symbols": resources,
    }


def write_manifest(directory: Path, records: Iterable[dict[str, Any]]) -> str | None:
    """Adds records to the directory's manifest; a record with the same URI is replaced.

    A manifest that cannot be read (damaged, or of another schema) is replaced by a new one; the result then is a
    sentence that says so.
    """
    path, note = directory / MANIFEST, None
    try:
        known = {r["uri"]: r for r in read_manifest(directory)["kernels"]} if path.exists() else {}
    except MissingKernelError as error:
        known, note = {}, f"wrote a new manifest, because {str(error).partition(';')[0]}"
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
    path, remedy = directory / MANIFEST, f"make it again by `embforge gen SPEC --out {directory}`"
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
    """Raises `DocumentError` for a manifest in which kernels cannot be looked up."""
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


def find_kernel(directory: Path, plan: KernelPlan, code: str) -> dict[str, Any] | None:
    """The record of a kernel of the plan's shape with a binary, hashes checked; None if the directory has none.

    If there are several that differ only in names, the plan's own is taken, or else the first. `code` is the source of
    the plan without names. `MissingKernelError` if another version generated the kernel, or if it was changed later.
    """
    manifest, shape = read_manifest(directory), plan.nameless.uri
    fitting = [r for r in manifest["kernels"] if r["shape"] == shape and r["binary"] is not None]
    if not fitting:
        return None
    record: dict[str, Any] = next((r for r in fitting if r["uri"] == plan.uri), fitting[0])
    remedy = f"make it again by `{gen_command([plan], directory)}`" if isinstance(plan, Plan) else "take it out"
    if record["code_sha256"] != sha256_of(code.encode()):
        raise MissingKernelError(
            f"kernel {plan.uri} in {directory} was generated by embforge {manifest['embforge']}, whose source for this "
            f"plan differs from that of {version('embforge')}; {remedy}"
        )
    binary = directory / record["binary"]
    try:
        digest = sha256_of(read_file(binary, MOST_BYTES))
    except (FileNotFoundError, DocumentError) as error:
        reason = "No such file" if isinstance(error, FileNotFoundError) else error
        raise MissingKernelError(f"kernel {plan.uri}: {binary} cannot be read ({reason}); {remedy}") from None
    if digest != record["binary_sha256"]:
        raise MissingKernelError(f"kernel {plan.uri}: {binary} is not what its manifest says; {remedy}")
    return record


def gen_command(plans: Sequence[Plan], directory: Path | None) -> str:
    """The command that generates the kernels of these plans of one module; the first plan has the module's spec.

    The spec's file is not known here, so the command says SPEC. There are two commands if a forward and a backward
    differ in a plan field that both have, because `--param` sets it for both.
    """
    first, out = plans[0], shlex.quote(str(directory)) if directory else "DIR"
    words = ["embforge gen SPEC", f"--target {first.target}", f"--arch {first.arch}", f"--ids {first.id_dtype}"]
    words += _training_options(plans)
    kinds = {plan.op.startswith("forward"): plan.params for plan in plans}.values()
    changed = {name: value for params in kinds for name, value in _changed(params).items()}
    if all(getattr(params, name, value) == value for params in kinds for name, value in changed.items()):
        commands = [changed]
    else:
        commands = [_changed(params) for params in kinds]
    return " && ".join(" ".join([*words, *map(_override, one.items()), f"--out {out}"]) for one in commands)


def _training_options(plans: Sequence[Plan]) -> list[str]:
    """The options of `gen` for plans other than a plain forward."""
    from embforge.codegen.plans import SPARSE, name_of

    updates = [plan.update for plan in plans if plan.update is not None]
    if not updates:
        return [f"--train {SPARSE}"] if any(plan.op != "forward" for plan in plans) else []
    rules = dict.fromkeys(name_of(update) or "RULE.json" for update in updates)
    accumulated = ["--accumulate"] if any(plan.op == "reduce" for plan in plans) else []
    return [*(f"--train {rule}" for rule in rules), *accumulated]


def _changed(params: Params) -> dict[str, Any]:
    """The plan fields that differ from their defaults."""
    return {f.name: getattr(params, f.name) for f in fields(params) if getattr(params, f.name) != f.default}


def _override(item: tuple[str, Any]) -> str:
    name, value = item
    return f"--param {name}={','.join(map(str, value)) if isinstance(value, tuple) else value}"


def _arguments(plan: KernelPlan) -> list[str]:
    """A kernel's arguments; for a library of several kernels, each with the name of its kernel."""
    kernels = kernels_of(plan.op)
    return [
        (f"{kernel.name}: " if len(kernels) > 1 else "") + f"{argument.c_type} {argument.name}"
        for kernel in kernels
        for argument in kernel.on(plan.target)
    ]


def _headline(resources: list[dict[str, Any]]) -> dict[str, Any]:
    # The worst figures of any symbol: most registers, spills and shared memory, least occupancy and bytes.
    worst = {"occupancy": min, "bytes_in_flight": min}
    figures: dict[str, Any] = {}
    for name in HEADLINE:
        values = [r[name] for r in resources if r.get(name) is not None]
        figures[name] = worst.get(name, max)(values) if values else None
    return figures
