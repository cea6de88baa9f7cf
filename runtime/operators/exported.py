"""A lookup as exported graphs describe it: what is computed. The process that runs a graph chooses the kernel.

A program (`launch/kernels.py`) is only for the process that made it: it names an instruction set or a GPU's
architecture, plan fields that were tuned for one machine, and maybe a directory. An exported graph must not contain any
of this.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, lru_cache
from importlib.metadata import version
from typing import Any

import torch

from embforge.backends import DEVICES_OF, arch_of
from embforge.codegen.dtypes import ID_DTYPES
from embforge.codegen.errors import PlanError
from embforge.codegen.layout import CollectionLayout, layout_of
from embforge.codegen.machine import runs_here
from embforge.codegen.params import Params, params_from
from embforge.codegen.plan import PLAN_SCHEMA, Plan
from embforge.codegen.plans import resolve_plan
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.target import target_named
from embforge.launch.kernels import Program, kernel_of
from embforge.plan_choice import choose_params, usable

EXPORTED_OPS = ("forward", "resolve")
"""The ops of kernels that an exported graph may call."""


@dataclass(frozen=True)
class ExportedLookup:
    """A forward, or the resolve step that turns ids into rows before it, without anything that depends on a machine."""

    target: str
    id_dtype: str
    spec: CollectionSpec
    params: Params | None = None
    """The `params` argument of the module; None: the process that runs the graph chooses plan fields."""
    batch_size: int | None = None
    """The `batch_size` argument of the module, by which plan fields are chosen."""
    op: str = "forward"

    @cached_property
    def text(self) -> str:
        """One line of JSON, from which any process can rebuild the lookup. Its schema number is that of plans."""
        data: dict[str, Any] = {
            "embforge": _version(),
            "schema": PLAN_SCHEMA,
            "op": self.op,
            "target": self.target,
            "id_dtype": self.id_dtype,
            "spec": self.spec.to_dict(),
        }
        if self.params is not None:
            data["params"] = asdict(self.params)
        if self.batch_size is not None:
            data["batch_size"] = self.batch_size
        return json.dumps(data, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> ExportedLookup:
        """The lookup that has this text. `PlanError` if the text has another schema or does not describe a lookup."""
        try:
            data: dict[str, Any] = json.loads(text)
            schema, maker, op = data.pop("schema"), data.pop("embforge"), data["op"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"not the text of an exported lookup: {text[:80]!r}; export the model again") from error
        if schema != PLAN_SCHEMA or op not in EXPORTED_OPS:
            raise PlanError(
                f"this graph was exported by embforge {maker}, its lookup has schema {schema} and op {op!r}; embforge "
                f"{_version()} runs schema {PLAN_SCHEMA} and ops {', '.join(EXPORTED_OPS)}: export the model again "
                f"with it, or run the graph with embforge {maker}"
            )
        try:
            data["spec"] = CollectionSpec.from_dict(data["spec"])
            _check_known("target", data["target"], DEVICES_OF)
            _check_known("id_dtype", data["id_dtype"], ID_DTYPES)
            if "params" in data:
                data["params"] = params_from(data["target"], data["params"])
            return cls(**data)
        except (KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"the text of an exported lookup is damaged ({error!r}); export the model again") from error

    @cached_property
    def layout(self) -> CollectionLayout:
        return layout_of(self.spec)

    def plan_on(self, device: torch.device) -> Plan:
        """The kernel plan that runs on a device of this machine. Its fields are those of `params`, tuned, or the
        default.

        Tuned fields are used under the same conditions as in a module: `EMBFORGE_KERNELS` and `EMBFORGE_JIT` apply.
        """
        if device.type not in DEVICES_OF[self.target]:
            raise ValueError(
                f"the lookup was exported for backend {self.target!r} and is called with tensors on {device}; allowed: "
                f"{', '.join(DEVICES_OF[self.target])}; export the model from the device that it is to run on"
            )
        arch = arch_of(self.target, device)
        if self.op == "resolve":
            return resolve_plan(self.spec, self.target, arch, self.id_dtype)

        def plan(params: Params) -> Plan:
            return Plan("forward", self.target, arch, self.id_dtype, self.spec, params)

        requested = {"forward": self.params, "backward": None}
        choices = choose_params(self.spec, self.target, device, requested, (), self.batch_size, self.id_dtype)
        chosen = usable(choices, lambda forward, backward: {"forward": plan(forward)}, None)
        return plan(chosen["forward"].params)


@lru_cache(maxsize=256)
def lookup_named(text: str) -> Plan | ExportedLookup:
    """The lookup that the `program` argument of an operator describes: a kernel plan or an exported lookup, both of
    which have a spec and a layout. `PlanError` if it describes neither."""
    return Program.from_text(text).plan if "\n" in text else ExportedLookup.from_text(text)


@lru_cache(maxsize=256)
def lookup_kernel(text: str, device: torch.device) -> Any:
    """The kernel that an operator runs on a device for its `program` argument. Raises the errors of `kernel_of`."""
    if "\n" in text:
        program = Program.from_text(text)
        if target_named(program.plan.target).is_native and not runs_here(program.plan.arch):
            # Another machine exported this graph with an earlier version, whose texts named the instruction set.
            program = replace(program, plan=replace(program.plan, arch=arch_of(program.plan.target, device)))
    else:
        program = Program(ExportedLookup.from_text(text).plan_on(device))
    return kernel_of(program.text)


def _check_known(field: str, value: object, known: Collection[str]) -> None:
    if value not in known:
        raise PlanError(
            f"an exported lookup with {field}={value!r} is not known; allowed: {', '.join(known)}; export it again"
        )


@cache
def _version() -> str:
    return version("embforge")
