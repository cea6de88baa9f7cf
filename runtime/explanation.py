"""`ef.explain(module)`: what a module will run and why, in plain text."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from embforge.codegen.buckets import Bucket
from embforge.codegen.build import jit_allowed, locate
from embforge.codegen.manifest import gen_command
from embforge.codegen.plan import Plan
from embforge.collection import EmbeddingCollection


def explain(module: EmbeddingCollection, id_dtype: str = "int64") -> str:
    """Backend, kernel and where it comes from, plan fields, buckets and memory. Compiles nothing."""
    if not isinstance(module, EmbeddingCollection):
        raise TypeError(f"explain takes an EmbeddingCollection, got {module!r}")
    plan = module.plan(id_dtype)
    sections = [
        [f"{module.extra_repr()} on {module.device}, bounds_check={module.bounds_check}"],
        _kernel(plan, module.kernels),
        _fields(plan),
        ["buckets (features that share one inner loop):", *map(_bucket, plan.buckets)],
        _memory(plan),
    ]
    return "\n".join("\n  ".join(section) for section in sections if section)


def _kernel(plan: Plan, kernels: str | None) -> list[str]:
    if plan.target == "reference":
        return ["kernel: none; plain torch operations"]
    directory = Path(kernels) if kernels else None
    found = locate(plan, kernels=directory)
    if found:
        place = f"loaded from {found}"
    elif jit_allowed():
        place = "not built yet: compiled at the first call"
    else:
        place = f"missing, and EMBFORGE_JIT forbids compiling it; make it by `{gen_command(plan, directory)}`"
    return [f"kernel: {plan.uri}", place]


def _fields(plan: Plan) -> list[str]:
    listed = [f"{f.name} = {getattr(plan.params, f.name)}: {f.metadata['doc']}" for f in fields(plan.params)]
    return ["plan fields (none changes a bit of the result):", *listed] if listed else []


def _bucket(bucket: Bucket) -> str:
    names = [f.feature.name for f in bucket.features]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    gap = bucket.stride_bytes - bucket.row_bytes
    padding = f" + {gap} padding" if gap else ""
    return f"{bucket.label}: rows of {bucket.row_bytes}{padding} bytes; {shown}"


def _memory(plan: Plan) -> list[str]:
    used = sum(t.row_bytes * t.table.num_embeddings for t in plan.layout.tables)
    held = sum(t.stride_bytes * t.table.num_embeddings for t in plan.layout.tables)
    return [f"tables: {held / 1e6:.1f} MB, of which padding {(held - used) / 1e6:.1f} MB"]
