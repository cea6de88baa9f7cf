"""`ef.explain(module)`: which kernels a module runs, and why, as plain text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from embforge.codegen.buckets import Bucket
from embforge.codegen.build import jit_allowed, locate
from embforge.codegen.manifest import gen_command
from embforge.codegen.plan import Plan
from embforge.codegen.reading.numbers import size
from embforge.codegen.target import target_named
from embforge.codegen.tuned.choose import Choice
from embforge.collection import EmbeddingCollection


def explain(module: EmbeddingCollection, id_dtype: str = "int64") -> str:
    """Describes what a module runs for ids of a dtype: backend, optimizer, all kernels and where their binaries are,
    their plan fields and the reasons for them, buckets, and memory. It compiles nothing.
    """
    if not isinstance(module, EmbeddingCollection):
        raise TypeError(
            f"explain takes an EmbeddingCollection, got a {type(module).__name__}; pass the collection in it, such as "
            "explain(model.embeddings)"
        )
    plans, choices = module.plans(id_dtype), module.choices(id_dtype)
    plan = plans["forward"]
    backward = next(plans[name] for name in plans if name not in ("resolve", "forward", "train"))
    generated = target_named(plan.target).is_generated
    kernels = [] if not generated else [(role, name) for role in ROLES for name in _named(role, plans)]
    sections = [
        [f"{module.extra_repr()} on {module.device}, bounds_check={module.bounds_check}"],
        _kernel(plan, module.kernels, choices["forward"]),
        _fields(plan, "plan fields"),
        ["buckets (features that share one inner loop):", *map(_bucket, plan.buckets)],
        _memory(plan, module),
        *(_kernel(plans[name], module.kernels, choices[name], _title(role, name)) for role, name in kernels),
        _fields(backward, "plan fields of the backward"),
    ]
    return "\n".join("\n  ".join(section) for section in sections if section)


ROLES = {
    "resolve": "kernel that turns ids into rows",
    "train": "kernel of a forward with a backward",
    "backward": "kernel of the update in a backward",
    "reduce": "kernel of the gradients of rows",
    "weight_gradient": "kernel of the gradients of weights",
    "step": "kernel of the update in step()",
    "merge": "kernel of clip_grad_norm_()",
}
"""Titles of all kernels except the forward without gradients, by their names in `plans`."""


def _named(role: str, plans: Mapping[str, Plan]) -> list[str]:
    """The names of the plans for a role. With a mapping of optimizers there is one per optimizer: `backward[users]`."""
    return [name for name in plans if name.partition("[")[0] == role]


def _title(role: str, name: str) -> str:
    return f"{ROLES[role]} ({name[len(role) + 1 : -1]})" if name != role else ROLES[role]


def _kernel(plan: Plan, kernels: str | None, choice: Choice, role: str = "kernel") -> list[str]:
    if not target_named(plan.target).is_generated:
        return ["kernel: none; plain torch operations"]
    if role == ROLES["train"] and plan.op == "forward":
        return [f"{role}: the same as without a backward"]
    directory = Path(kernels) if kernels else None
    binary = locate(plan, kernels=directory)
    if binary:
        origin = f"loaded from {binary}"
    elif jit_allowed():
        origin = "not built yet: compiled by the first call"
    else:
        origin = f"missing, and EMBFORGE_JIT forbids compiling it; make it with `{gen_command([plan], directory)}`"
    return [f"{role}: {plan.uri}", origin, f"parameters: {_changed(plan)}; {choice.why}"]


def _changed(plan: Plan) -> str:
    """The plan fields that differ from the default."""
    default = type(plan.params)()
    names = [f.name for f in fields(plan.params) if getattr(plan.params, f.name) != getattr(default, f.name)]
    return ", ".join(f"{name}={getattr(plan.params, name)}" for name in names) or "all have their defaults"


def _fields(plan: Plan, title: str) -> list[str]:
    listed = [f"{f.name} = {getattr(plan.params, f.name)}: {f.metadata['doc']}" for f in fields(plan.params)]
    return [f"{title} (none changes a bit of the result):", *listed] if listed else []


def _bucket(bucket: Bucket) -> str:
    names = [f.feature.name for f in bucket.features]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    gap = bucket.stride_bytes - bucket.row_bytes
    padding = f" + {gap} padding" if gap else ""
    return f"{bucket.label}: rows of {bucket.row_bytes}{padding} bytes; {shown}"


def _memory(plan: Plan, module: EmbeddingCollection) -> list[str]:
    used = sum(t.row_bytes * t.table.num_embeddings for t in plan.layout.tables)
    held = sum(t.stride_bytes * t.table.num_embeddings for t in plan.layout.tables)
    states = sum(t.state_stride_bytes * t.table.num_embeddings for t in module.layout.tables)
    other = f"; other states of the optimizer: {size(states)}" if states else ""
    remaps = sum(remap.entries.nbytes for remap in module.remaps().values())
    other += f"; rows of ids: {size(remaps)}" if remaps else ""
    return [f"tables: {size(held)}, of which padding {size(held - used)}{other}"]
