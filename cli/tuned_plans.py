"""The plans that a module on this machine would run, for `gen --tuned`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from embforge.codegen.target import target_named

if TYPE_CHECKING:
    from embforge.codegen.plan import Plan
    from embforge.codegen.rules.rule import Update
    from embforge.codegen.spec import CollectionSpec
    from embforge.codegen.tuned.choose import Choice
    from embforge.codegen.tuned.record import Hardware


def tuned_plans_for(
    spec: CollectionSpec,
    target: str,
    archs: Iterable[str],
    id_dtypes: Sequence[str],
    rules: Sequence[str],
    accumulate: bool,
    batch_size: int | None,
) -> tuple[list[Plan], list[str]]:
    """The plans without duplicates, and lines that say which parameters they take and why: one line for each
    combination of architecture, op and type of ids.

    For this machine's hardware these are the plans that its modules choose; for another architecture, the parameters
    come from the nearest result on hardware of that architecture.
    """
    from embforge.codegen.plans import SERVING, training_plans, update_named

    by_uri: dict[str, Plan] = {}
    why: dict[str, None] = {}  # an ordered set
    for arch in archs:
        for update in [update_named(rule) for rule in rules] or [None]:
            for ids in id_dtypes:
                chosen = _choices(spec, target, arch, update, batch_size, ids)
                shown = chosen if rules else {"forward": chosen["forward"]}
                of_ids = f" of {ids} ids" if len(id_dtypes) > 1 else ""
                why |= dict.fromkeys(f"{arch} {op}{of_ids}: {choice.why}" for op, choice in shown.items())
                params = (chosen["forward"].params, chosen["backward"].params)
                plans = training_plans(spec, target, arch, ids, *params, update, accumulate and update is not None)
                wanted = plans.values() if rules else [plans[name] for name in SERVING if name in plans]
                by_uri |= {plan.uri: plan for plan in wanted}
    return list(by_uri.values()), list(why)


def _choices(
    spec: CollectionSpec, target: str, arch: str, update: Update | None, batch_size: int | None, id_dtype: str
) -> dict[str, Choice]:
    from embforge.codegen.tuned.choose import choose
    from embforge.codegen.tuned.shape import rule_named, usual_traffic

    hardware, traffic = hardware_for(target, arch), usual_traffic(spec, batch_size)
    rule = {"forward": None, "backward": rule_named(update)}
    return {op: choose(op, target, spec, hardware, rule=rule[op], traffic=traffic, id_dtype=id_dtype) for op in rule}


def hardware_for(target: str, arch: str) -> Hardware:
    """The hardware of this machine if it has that architecture; otherwise only what the architecture's name implies."""
    from embforge.codegen.tuned.hardware import any_cpu, any_gpu

    facts = target_named(target)
    if facts.is_native:
        return _cpu_here(arch) or any_cpu(arch)
    return (_gpu_here(target, arch) if facts.needs_gpu else None) or any_gpu(arch)


def _cpu_here(arch: str) -> Hardware | None:
    from embforge.codegen.machine import host_isa

    if arch != host_isa():
        return None
    from embforge.plan_choice import cpu_hardware

    return cpu_hardware()


def _gpu_here(target: str, arch: str) -> Hardware | None:
    import torch

    from embforge.codegen.errors import PlanError
    from embforge.codegen.targets.cuda.arch import nearest_arch
    from embforge.plan_choice import hardware_of

    for index in range(torch.cuda.device_count()) if torch.cuda.is_available() else ():
        try:
            served = nearest_arch(*torch.cuda.get_device_capability(index))
        except PlanError:  # a GPU that is too old for these kernels
            continue
        if served == arch:
            return hardware_of(target, torch.device("cuda", index))
    return None
