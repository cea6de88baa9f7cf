"""Chooses the plan fields of a module's kernels: those that the user set, or tuned ones, or the defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from embforge.codegen.build import directory_from_environment, jit_allowed, locate
from embforge.codegen.errors import MissingKernelError
from embforge.codegen.params import Params, params_type
from embforge.codegen.plan import Plan
from embforge.codegen.rules.rule import Update
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.target import TUNED, target_named
from embforge.codegen.tuned.choose import Choice, choose
from embforge.codegen.tuned.hardware import gpu_hardware, this_cpu
from embforge.codegen.tuned.record import Hardware
from embforge.codegen.tuned.shape import rule_named, usual_traffic

ARGUMENT = {"forward": "params", "backward": "backward_params"}
"""The argument of a module's constructor that sets the plan fields of an op. All kernels of training except the forward
have the fields of the backward."""
Choices = Mapping[str, Choice]
"""The choice for each op, "forward" and "backward"."""
CHOSEN_AS = {
    "forward": "forward",
    "forward_train": "forward",
    "backward": "backward",
    "reduce": "backward",
    "weight_gradient": "backward",
    "resolve": None,
}
"""The entry of `Choices` that a kernel's fields come from, by the kernel's op; None for an op without fields."""
PlansOf = Callable[[Params, Params], Mapping[str, Plan]]
"""A function that makes a module's kernel plans with these fields of a forward and of a backward."""


def check_params(params: Params | None, backend: str, op: str) -> None:
    """Raises ValueError for plan fields of another backend or op."""
    kind = params_type(backend, op)
    if params is not None and not isinstance(params, kind):
        raise ValueError(f"{ARGUMENT[op]}={params!r} does not fit {op} on backend {backend!r}; pass a {kind.__name__}")


def check_batch_size(batch_size: object) -> None:
    """Raises ValueError unless `batch_size` is a positive int or None."""
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise ValueError(
            f"batch_size={batch_size!r} is not allowed; allowed: a whole number from 1, or None if it is not known"
        )


def cpu_hardware() -> Hardware:
    """This machine's processor, with as many cores as torch has threads, because kernels run on torch's threads."""
    cpu = this_cpu()
    return replace(cpu, sizes=cpu.sizes | {"cores": min(cpu.sizes["cores"], torch.get_num_threads())})


def hardware_of(backend: str, device: torch.device) -> Hardware | None:
    """The hardware on which a backend's kernels run; None on meta, where nothing runs, and for backends that are not
    tuned."""
    target = target_named(backend)
    if target.hardware == "cpu":
        return cpu_hardware()
    if target.hardware == "gpu" and device.type != "meta":
        from embforge.device_facts import hardware_facts

        return gpu_hardware(hardware_facts(torch.cuda.get_device_properties(device)))
    return None


def choose_params(
    spec: CollectionSpec,
    backend: str,
    device: torch.device,
    requested: Mapping[str, Params | None],
    updates: Sequence[Update],
    batch_size: int | None,
    id_dtype: str,
) -> Choices:
    """The plan fields of each op: those that were requested; or else those that a tuned store has for this hardware and
    id dtype with warm caches; or else the defaults.

    `updates`: the updates of the fused optimizers; several if tables have different rules.
    """
    hardware, traffic = hardware_of(backend, device), usual_traffic(spec, batch_size)

    def choice(op: str, params: Params | None) -> Choice:
        if params is not None:
            return Choice(params, f"set by {ARGUMENT[op]}=")
        if hardware is None:
            reason = "on meta nothing runs" if backend in TUNED else f"nothing is tuned for {backend}"
            return Choice(params_type(backend, op)(), f"default: {reason}")
        if op == "backward" and len(updates) > 1:
            return Choice(params_type(backend, op)(), "default: nothing is tuned for tables of several rules")
        rule = rule_named(updates[0] if updates else None) if op == "backward" else None
        return choose(op, backend, spec, hardware, rule=rule, traffic=traffic, id_dtype=id_dtype)

    return {op: choice(op, params) for op, params in requested.items()}


def choice_of(plan: Plan, choices: Choices) -> Choice:
    """The choice from which a plan has its fields."""
    chosen_as = CHOSEN_AS[plan.op]
    return Choice(plan.params, "it has nothing to tune") if chosen_as is None else choices[chosen_as]


def usable(choices: Choices, plans_of: PlansOf, kernels: str | None) -> Choices:
    """The choices, in which defaults replace tuned fields that would cost a compilation which the user does not expect.

    If kernels come from a directory, or compiling is forbidden, a tuned choice is used only if as many of its kernels
    are available as of the default's. Otherwise nothing is searched.
    """
    directory = Path(kernels) if kernels else directory_from_environment()
    if directory is None and jit_allowed():
        return choices
    return {op: _usable(op, choice, choices, plans_of, directory) for op, choice in choices.items()}


def _usable(op: str, choice: Choice, choices: Choices, plans_of: PlansOf, directory: Path | None) -> Choice:
    default = type(choice.params)()
    if choice.record is None or choice.params == default:
        return choice

    def plans(params: Params) -> list[Plan]:
        both = {name: other.params for name, other in choices.items()} | {op: params}
        all_plans = plans_of(both["forward"], both["backward"]).values()
        of_op = [plan for plan in all_plans if plan.op.startswith("forward") == (op == "forward")]
        return list({plan.uri: plan for plan in of_op}.values())

    # A default kernel of another version counts as available, so that the user sees its error and no compilation hides
    # it.
    available = _available(plans(choice.params), directory, stale=0)
    if available >= _available(plans(default), directory, stale=1) and (available or jit_allowed()):
        return choice
    where = f"{directory} and the cache have" if directory else "the cache has"
    why = f"default: {where} no kernel for what is {choice.source}"  # the default does not have the gain in choice.why
    return replace(choice, params=default, why=why)


def _available(plans: list[Plan], directory: Path | None, stale: int) -> int:
    """The number of kernels that need no compilation. `stale`: what a kernel of another version counts, 0 or 1."""
    count = 0
    for plan in plans:
        try:
            count += locate(plan, kernels=directory) is not None
        except MissingKernelError:
            count += stale
    return count
