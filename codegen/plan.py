"""A plan: op x target x layout x launch parameters. It fully determines one generated source file.

Its canonical text rebuilds it in another process. Its URI, a readable name with a short hash of that text, names the
directory, the symbol and the log line.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from embforge.codegen.buckets import Bucket, buckets_of
from embforge.codegen.dtypes import ID_DTYPES
from embforge.codegen.errors import PlanError
from embforge.codegen.kernel import OPS
from embforge.codegen.layout import CollectionLayout, layout_of
from embforge.codegen.params import Params, params_from, params_type
from embforge.codegen.reading.documents import DocumentError, parse_json
from embforge.codegen.remap import resolve_spec
from embforge.codegen.rules.rule import Update
from embforge.codegen.spec import CollectionSpec
from embforge.codegen.target import BACKENDS, target_named

PLAN_SCHEMA = 1
"""This is raised whenever the meaning of a plan's text changes, so that no old binary is taken for a new plan's."""


@dataclass(frozen=True)
class Plan:
    """One kernel to be generated. `arch` is `sm_90` for cuda and simt, an instruction set such as `avx512` for cpu."""

    op: str
    target: str
    arch: str
    id_dtype: str
    spec: CollectionSpec
    params: Params
    update: Update | None = None
    """What a backward does to a row. Other ops have none."""
    generated_as: str | None = None
    """The symbol in the binary, if that was generated for a plan with other names. It is not in the text or the URI."""

    def __post_init__(self) -> None:
        _check("op", self.op, OPS)
        _check("target", self.target, tuple(BACKENDS))
        _check("id_dtype", self.id_dtype, ID_DTYPES)
        if not isinstance(self.params, params_type(self.target, self.op)):
            raise PlanError(f"plan field params={self.params!r} does not fit target {self.target!r}, op {self.op!r}")
        if (self.update is None) == (self.op == "backward"):
            raise PlanError(
                f"plan field update={self.update!r} does not fit op {self.op!r}; only a backward has an update"
            )

    @cached_property
    def layout(self) -> CollectionLayout:
        return layout_of(self.spec, self.update)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        return buckets_of(self.layout)

    @cached_property
    def text(self) -> str:
        """Canonical JSON: equal plans have equal text."""
        data = {
            "schema": PLAN_SCHEMA,
            "op": self.op,
            "target": self.target,
            "arch": self.arch,
            "id_dtype": self.id_dtype,
            "spec": self.spec.to_dict(),
            "params": asdict(self.params),
        }
        if self.update is not None:
            data["update"] = self.update.to_dict()
        return json.dumps(data, sort_keys=True, separators=(",", ":"))

    @cached_property
    def uri(self) -> str:
        """A C identifier: `forward_cpu_avx512_dlrm_26t_26f_int64_1f0c2a9b`."""
        name = re.sub(r"[^A-Za-z0-9]+", "_", self.spec.name or "collection")[:40]
        shape = f"{len(self.spec.tables)}t_{len(self.spec.features)}f"
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:10]
        rule = "" if self.update is None else "_" + re.sub(r"[^A-Za-z0-9]+", "_", self.update.rule.name)[:24]
        return f"{self.op}{rule}_{self.target}_{self.arch}_{name}_{shape}_{self.id_dtype}_{digest}"

    @property
    def symbol(self) -> str:
        """The kernel's name in its binary: the plan's URI, or for an emulating target that of the plan it emulates."""
        if self.generated_as is not None:
            return self.generated_as
        return self.on(target_named(self.target).text_of).uri

    @cached_property
    def nameless(self) -> Plan:
        """The plan without the names in its spec. Plans that are equal without names have the same code, apart from
        comments and the symbol. Plans of lookups do not say how ids are turned into rows, and plans of that step say
        nothing about lookups, because neither depends on the other."""
        spec = resolve_spec(self.spec) if self.op == "resolve" else self.spec.by_rows()
        return replace(self, spec=spec.without_names(), generated_as=None)

    @property
    def manifest_fields(self) -> Mapping[str, object]:
        """What a manifest says about the plan in addition to what all plans have: `collection` and `params`."""
        return {"collection": self.spec.name, "params": asdict(self.params)}

    def on(self, target: str) -> Plan:
        """The same plan for another target that takes the same params."""
        return self if target == self.target else replace(self, target=target)

    def called(self, symbol: str) -> Plan:
        """The same plan for a binary that was generated under another symbol."""
        return self if symbol == self.symbol else replace(self, generated_as=symbol)

    @classmethod
    def from_text(cls, text: str) -> Plan:
        """The plan that has this canonical text. `PlanError` if the text has another schema or is not a plan's."""
        try:
            data: dict[str, Any] = parse_json(text)
            schema = data.pop("schema")
        except (DocumentError, KeyError, TypeError, AttributeError) as error:
            raise _no_plan(text) from error
        if schema != PLAN_SCHEMA:
            raise PlanError(f"plan text of schema {schema}, this embforge reads {PLAN_SCHEMA}; make the plan again")
        try:
            data["spec"] = CollectionSpec.from_dict(data["spec"])
            data["params"] = params_from(data["target"], data["params"], data["op"])
            if "update" in data:
                data["update"] = Update.from_dict(data["update"])
            return cls(**data)
        except (KeyError, TypeError, AttributeError) as error:
            raise _no_plan(text) from error


def _no_plan(text: str) -> PlanError:
    return PlanError(f"not a plan's canonical text: {text[:80]!r}; take it from Plan.text")


def _check(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise PlanError(f"plan field {field}={value!r} is not known; allowed: {', '.join(allowed)}")
