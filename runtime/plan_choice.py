"""Which plan fields a module runs with, and why: those that were given, else tuned ones, else the default."""

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
"""What a module's constructor calls the fields of an op. All kernels behind a forward share the backward's."""
Choices = Mapping[str, Choice]
"""By op: forward and backward."""
PlansOf = Callable[[Params, Params], Mapping[str, Plan]]
"""A module's plans with such fields of a forward and of a backward."""


def check_given(given: Params | None, backend: str, op: str) -> None:
    """ValueError for fields of another backend or op."""
    kind = params_type(backend, op)
    if given is not None and not isinstance(given, kind):
        raise ValueError(f"{ARGUMENT[op]}={given!r} does not fit {op} on backend {backend!r}; give a {kind.__name__}")


def check_batch_size(batch_size: object) -> None:
    """ValueError for what is no number of samples."""
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise ValueError(
            f"batch_size={batch_size!r} is not allowed; allowed: a whole number from 1, or None: not known"
        )


def cpu_hardware() -> Hardware:
    """This machine's processor with as many cores as torch has threads: kernels run on its pool."""
    cpu = this_cpu()
    return replace(cpu, sizes=cpu.sizes | {"cores": min(cpu.sizes["cores"], torch.get_num_threads())})


def hardware_of(backend: str, device: torch.device) -> Hardware | None:
    """What kernels of a backend run on; None on meta, where nothing runs, and for what is never tuned."""
    target = target_named(backend)
    if target.hardware == "cpu":
        return cpu_hardware()
    if target.hardware == "gpu" and device.type != "meta":
        from embforge.device import hardware_facts

        return gpu_hardware(hardware_facts(torch.cuda.get_device_properties(device)))
    return None


def choose_params(
    spec: CollectionSpec,
    backend: str,
    device: torch.device,
    given: Mapping[str, Params | None],
    updates: Sequence[Update],
    batch_size: int | None,
    id_dtype: str,
) -> Choices:
    """What is given, else what the tuned stores say for this hardware and such ids in warm caches, else the default.

    `updates`: what a fused optimizer does to rows; several where tables have rules of their own.
    """
    hardware, traffic = hardware_of(backend, device), usual_traffic(spec, batch_size)

    def choice(op: str, params: Params | None) -> Choice:
        if params is not None:
            return Choice(params, f"given as {ARGUMENT[op]}=")
        if hardware is None:
            reason = "on meta nothing runs" if backend in TUNED else f"nothing is tuned for {backend}"
            return Choice(params_type(backend, op)(), f"default: {reason}")
        if op == "backward" and len(updates) > 1:
            return Choice(params_type(backend, op)(), "default: nothing is tuned for tables of several rules")
        rule = rule_named(updates[0] if updates else None) if op == "backward" else None
        return choose(op, backend, spec, hardware, rule=rule, traffic=traffic, id_dtype=id_dtype)

    return {op: choice(op, params) for op, params in given.items()}


def usable(choices: Choices, plans_of: PlansOf, kernels: str | None) -> Choices:
    """The choices, with defaults for tuned ones that would cost a compilation nobody expects.

    Where kernels come from a directory, or none may be compiled, a tuned choice counts if as many of its kernels are
    at hand as of the default's. Elsewhere nothing is looked for.
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
        made = plans_of(both["forward"], both["backward"]).values()
        return list({plan.uri: plan for plan in made if plan.op.startswith("forward") == (op == "forward")}.values())

    # A stale default counts as at hand, so that its error is seen and not hidden by a compilation.
    at_hand = _at_hand(plans(choice.params), directory, stale=0)
    if at_hand >= _at_hand(plans(default), directory, stale=1) and (at_hand or jit_allowed()):
        return choice
    where = f"{directory} and the cache have" if directory else "the cache has"
    why = f"default: {where} no kernel for what is {choice.source}"  # without a gain, which the default does not have
    return replace(choice, params=default, why=why)


def _at_hand(plans: list[Plan], directory: Path | None, stale: int) -> int:
    """How many of the kernels need no compilation. `stale`: what one counts that another version made."""
    count = 0
    for plan in plans:
        try:
            count += locate(plan, kernels=directory) is not None
        except MissingKernelError:
            count += stale
    return count
