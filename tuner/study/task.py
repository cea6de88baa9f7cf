"""The task of a study: one op of a spec on one machine under some workloads."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from embforge.codegen.build import source_of
from embforge.codegen.errors import ToolchainError
from embforge.codegen.machine import find_compiler, host_isa, package_version
from embforge.codegen.params import Params, params_from
from embforge.codegen.plan import Plan
from embforge.codegen.plans import update_named
from embforge.codegen.rules.rule import Update
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.target import TUNED, target_named
from embforge.codegen.tuned.choose import choose, key_of
from embforge.codegen.tuned.hardware import gpu_hardware
from embforge.codegen.tuned.record import Hardware, Key
from embforge.codegen.tuned.shape import rule_named, shape_of
from embforge.tuner.estimate.seeds import load_seeds
from embforge.tuner.judge.judge import Cache
from embforge.tuner.search.space import Space, covering_points, settle, space_of
from embforge.tuner.workload.workload import Workload, parse, traffic

STUDY_SCHEMA = 1
"""The version of studies, raised whenever their meaning or content changes, so that old trials are not used."""
DIGEST_DIGITS = 10
EXAMPLES = 4
ESTIMATED_FIRST = 8
"""How many plans of an estimate a measured run begins with."""


@dataclass(frozen=True)
class Task:
    """One op of a spec, the space of its plans, and what they are measured on."""

    spec: CollectionSpec
    target: str
    arch: str
    train: str | None
    """The update's name as the user gave it; None: a forward."""
    update: Update | None
    hardware: Hardware
    space: Space
    workloads: tuple[str, ...]
    baseline: Params | None
    """The point at which the search starts and next to which candidates are timed; None: the default."""
    cache: Cache = "warm"
    id_dtype: str = "int64"

    @property
    def op(self) -> str:
        """The op: forward or backward."""
        return self.space.op

    @property
    def rule(self) -> str | None:
        """The name of the update in keys of results."""
        return None if self.train is None else rule_named(self.update)

    @property
    def default(self) -> Params:
        return self.space.default

    @property
    def anchor(self) -> Plan:
        """The plan with which every candidate is compared, in the same rounds."""
        return self.plan(self.baseline or self.default)

    def plan(self, params: Params) -> Plan:
        """The plan of a point; for a backward without an update, the reduction."""
        op = "reduce" if self.op == "backward" and self.update is None else self.op
        return Plan(op, self.target, self.arch, self.id_dtype, self.spec, params, self.update)

    def key(self, workload: str) -> Key:
        """The key of a result for that workload."""
        asked = traffic(self.spec, parse(workload))
        return key_of(self.op, self.target, self.spec, self.hardware, self.rule, asked, self.id_dtype, self.cache)

    def seeds(self) -> list[Params]:
        """Points to try first: the baseline or the default, the stores' nearest results, the best of an estimate."""
        points = [self.baseline or self.default]
        for workload in self.workloads:
            numbers = self.key(workload).traffic
            known: dict[str, Any] = {"rule": self.rule, "id_dtype": self.id_dtype, "cache": self.cache}
            choice = choose(self.op, self.target, self.spec, self.hardware, traffic=numbers, **known)
            if choice.record is not None:
                points.append(choice.params)
        if target_named(self.target).needs_gpu:  # what was estimated without a GPU
            points += load_seeds(self.op, self.arch, self.spec, self.update, count=ESTIMATED_FIRST)
        return list(dict.fromkeys(settle(self.space, params) for params in points))

    @cached_property
    def name(self) -> str:
        """The study's name: equal for equal tasks, with the spec's name, on equal machines, templates and compilers."""
        means = {
            "schema": STUDY_SCHEMA,
            "op": [self.op, self.target, self.arch, self.rule, self.id_dtype],
            "shape": shape_of(self.spec).digest,
            "hardware": [self.hardware.identity, self.hardware.sizes],
            "workloads": [parse(workload).identity() for workload in self.workloads],
            "cache": self.cache,
            "fields": self.space.fields,
            "anchor": asdict(self.anchor.params),
            "sources": [hashlib.sha256(source_of(self.plan(p)).encode()).hexdigest() for p in self._examples()],
            "versions": {name: self.versions().get(name) for name in ("torch", "compiler")},
        }
        digest = hashlib.sha256(json.dumps(means, sort_keys=True).encode()).hexdigest()[:DIGEST_DIGITS]
        rule = "" if self.rule is None else f"-{self.rule}"
        return f"{self.op}{rule}-{self.target}-{self.arch}-{self.spec.name or 'collection'}-{digest}"

    def _examples(self) -> list[Params]:
        """A few points whose sources show the effect of every field."""
        return [self.default, *covering_points(self.space)[:EXAMPLES]]

    def about(self) -> dict[str, Any]:
        """Plain data about the task that is stored with the study, for readers of the storage."""
        space = {"fields": self.space.fields, "size": self.space.size, "points": len(self.space.points)}
        return {
            "schema": STUDY_SCHEMA,
            "op": self.op,
            "target": self.target,
            "arch": self.arch,
            "rule": self.rule,
            "train": self.train,
            "id_dtype": self.id_dtype,
            "spec": self.spec.to_toml(),
            "workloads": list(self.workloads),
            "cache": self.cache,
            "hardware": asdict(self.hardware),
            "versions": self.versions(),
            "space": _plain(space | {"removed": [asdict(removed) for removed in self.space.removed]}),
            "default": _plain(asdict(self.default)),
            "anchor": _plain(asdict(self.anchor.params)),
        }

    def versions(self) -> dict[str, str]:
        """The versions of everything on which a time may depend."""
        packages = {name: package_version(name) or "not installed" for name in ("embforge", "torch", "optuna")}
        compiler = {"compiler": find_compiler().version} if target_named(self.target).is_native else {}
        return {"python": platform.python_version(), "system": platform.platform()} | packages | compiler


def task_of(
    spec: CollectionSpec,
    *,
    on: str = "cpu",
    train: str | None = None,
    workloads: Sequence[str | Workload] = (),
    baseline: Mapping[str, Any] | None = None,
    cache: Cache = "warm",
    id_dtype: str = "int64",
) -> Task:
    """The task on this machine: a forward, or with `train` the backward of that rule (`none`: gradients only).

    `ToolchainError` if `on` is "cuda" and there is no GPU; `PlanError`, `RuleError` and `WorkloadError` for mistakes of
    the user.
    """
    hardware, arch = _hardware(on)
    op = "forward" if train is None else "backward"
    update = None if train is None else update_named(train)
    # The different ones, in their order.
    texts = tuple(dict.fromkeys(str(parse(w) if isinstance(w, str) else w) for w in workloads or (Workload(),)))
    return Task(
        spec=spec,
        target=on,
        arch=arch,
        train=train,
        update=update,
        hardware=hardware,
        space=space_of(op, on, arch, spec, hardware, update, id_dtype=id_dtype),
        workloads=texts,
        baseline=params_from(on, dict(baseline), op) if baseline else None,
        cache=cache,
        id_dtype=id_dtype,
    )


def builders(task: Task) -> int:
    """How many compilers run at the same time."""
    return max(1, min(8, task.hardware.sizes.get("cores", os.cpu_count() or 1)))


def _hardware(on: str) -> tuple[Hardware, str]:
    """The hardware as modules on this machine describe it, so that they find the results."""
    import torch

    if on not in TUNED:
        raise ToolchainError(f"tune --on {on!r} is not known; allowed: {', '.join(TUNED)}")
    if target_named(on).hardware == "cpu":
        from embforge.plan_choice import cpu_hardware

        return cpu_hardware(), host_isa()
    if not torch.cuda.is_available():
        raise ToolchainError(
            "tune --on cuda needs a CUDA device and a torch built for it; none is here. Nothing was tuned; "
            "`embforge tune SPEC --on cuda --static --arch sm_90` ranks plans by estimates, as seeds for a later run"
        )
    from embforge.device_facts import gpu_facts

    facts = gpu_facts(torch.device("cuda", torch.cuda.current_device()))
    return gpu_hardware(facts), str(facts["arch"])


def _plain(data: Any) -> Any:
    """The data after a round trip through JSON, so that they equal what is stored."""
    return json.loads(json.dumps(data))
