"""Which kernels the training of a collection needs: those that a module loads and `embforge gen --train` emits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

from embforge.codegen.errors import RuleError
from embforge.codegen.layout import layout_of
from embforge.codegen.params import Params, ResolveParams, params_type
from embforge.codegen.plan import Plan
from embforge.codegen.poolings import EACH_ROW
from embforge.codegen.reading.documents import DocumentError, read_json
from embforge.codegen.reading.suggestions import did_you_mean
from embforge.codegen.rules import builtin
from embforge.codegen.rules.language import program_of
from embforge.codegen.rules.rule import Rule, Update
from embforge.codegen.spec import CollectionSpec, FeatureSpec
from embforge.codegen.targets import check_plan

RULES: dict[str, Callable[[], Rule]] = {
    rule.__name__: rule
    for rule in (
        builtin.sgd,
        builtin.momentum,
        builtin.nesterov,
        builtin.adagrad,
        builtin.rowwise_adagrad,
        builtin.adam,
        builtin.rowwise_adam,
        builtin.rmsprop,
        builtin.ftrl,
        builtin.lamb,
        builtin.lars,
    )
}
OWN_DECAY: dict[str, Callable[..., Rule]] = {"lamb": builtin.lamb, "lars": builtin.lars}
"""Rules whose weight decay is a part of their formula."""
SPARSE = "none"
"""The name to write instead of a rule's for no fused optimizer: gradients go to one of torch's own."""
MODIFIERS = ("l2", "decoupled", "clip", "nearest")
"""What may follow a rule's name and changes its code: weight decay of either kind, clipping of a row's gradient, and
rows of narrow tables rounded to nearest instead of stochastically."""
SERVING = ("resolve", "forward")
"""The names in `training_plans` of the plans that a module runs if it does not train."""


def keeps_for_backward(spec: CollectionSpec) -> bool:
    """Whether a backward needs something that only the forward knows."""
    layout = layout_of(spec)
    return bool(layout.divisor_width or layout.winner_width)


def rowwise_spec(spec: CollectionSpec) -> CollectionSpec:
    """The collection in which a batch is rows and their gradients: each table is looked up by a feature without
    pooling.

    The gradients that have accumulated over several backward passes are such a batch.
    """
    spec = spec.by_rows()
    features = [FeatureSpec(table.name, table.name, pooling=EACH_ROW) for table in spec.tables]
    return CollectionSpec(spec.tables, tuple(features), name=spec.name)


def training_plans(
    spec: CollectionSpec,
    target: str,
    arch: str,
    id_dtype: str,
    params: Params,
    backward_params: Params | None = None,
    update: Update | None = None,
    accumulate: bool = False,
) -> dict[str, Plan]:
    """The plans that the training of a collection needs, by their purpose:

    - `forward`, and `train`: the forward before a backward, which is often the same plan
    - `weight_gradient`, if a feature is weighted
    - `backward`, if there is an update
    - `reduce`, if there is none, or if gradients accumulate
    - `step` and `merge` on the rowwise spec, if gradients accumulate
    - `resolve`, which runs before all of these, if ids of any table are not its rows

    `PlanError` if no compiler would take one of them.
    """
    other_params = backward_params or params_type(target, "backward")()

    def plan(op: str, spec: CollectionSpec = spec, ids: str = id_dtype) -> Plan:
        used = params if op.startswith("forward") else other_params
        return Plan(op, target, arch, ids, spec, used, update if op == "backward" else None)

    plans = {"forward": plan("forward")}
    if any(feature.weighted for feature in spec.features):
        plans["weight_gradient"] = plan("weight_gradient")
    plans["train"] = plan("forward_train") if keeps_for_backward(spec) else plans["forward"]
    if update is not None:
        plans["backward"] = plan("backward")
    if update is None or accumulate:
        plans["reduce"] = plan("reduce")
    if accumulate:
        rowwise = rowwise_spec(spec)
        plans |= {"step": plan("backward", rowwise, "int64"), "merge": plan("reduce", rowwise, "int64")}
    if spec.has_remaps:
        plans["resolve"] = resolve_plan(spec, target, arch, id_dtype)
    for each in plans.values():
        check_plan(each)
    return plans


def resolve_plan(spec: CollectionSpec, target: str, arch: str, id_dtype: str) -> Plan:
    """The plan of the kernel that turns ids into rows before a lookup of the spec."""
    return Plan("resolve", target, arch, id_dtype, spec, ResolveParams())


def update_named(text: str) -> Update | None:
    """The update that a text names; None for `none`. `RuleError` for a name that is not known.

    The text is a rule with modifiers, e.g. `adam` or `sgd+l2+clip`, or the path of a JSON file with the
    `update.to_dict()` of an optimizer, for rules of your own and for built-in rules with other options.
    """
    if text.endswith(".json"):
        return _update_from(Path(text))
    name, *modifiers = text.lower().split("+")
    unknown = [m for m in modifiers if m not in MODIFIERS]
    if name == SPARSE and not modifiers:
        return None
    if name not in RULES or unknown or {"l2", "decoupled"} <= set(modifiers):
        hint = "" if name in RULES else did_you_mean(name, [*RULES, SPARSE])
        raise RuleError(
            f"rule {text!r} is not known{hint}; allowed: {', '.join([*RULES, SPARSE])}, each with any of "
            f"{', '.join('+' + m for m in MODIFIERS)} (one kind of weight decay), e.g. adam+decoupled; or a JSON file "
            "of an optimizer's update.to_dict()"
        )
    if "decoupled" in modifiers and name in OWN_DECAY:
        raise RuleError(f"rule {text!r}: {name}'s own formula says where weights decay; use {name}+l2 for weight decay")
    decay: builtin.Decay = "l2" if "l2" in modifiers else "decoupled" if "decoupled" in modifiers else "none"
    rule = RULES[name]()
    if name in OWN_DECAY:
        rule, decay = OWN_DECAY[name](decay=decay != "none"), "none"
    rule = builtin.with_options(rule, decay=decay, clipped="clip" in modifiers)
    return Update(rule, "nearest" if "nearest" in modifiers else "stochastic")


def name_of(update: Update) -> str | None:
    """The rule's name and modifiers that `update_named` turns into this update; None if there are none."""
    for count in range(len(MODIFIERS)):
        for modifiers in combinations(MODIFIERS, count):
            name = update.rule.name
            if {"l2", "decoupled"} <= set(modifiers) or (name in OWN_DECAY and "decoupled" in modifiers):
                continue
            text = "+".join((name, *modifiers))
            if name in RULES and update_named(text) == update:
                return text
    return None


def numbers_named(text: str) -> dict[str, float]:
    """The numbers for a rule that its JSON file may have, e.g.
    `"hyper_values": {"beta": 0.9}`; none for other texts."""
    document = _json_of(Path(text)) if text.endswith(".json") else {}
    numbers = document.get("hyper_values", {}) if isinstance(document, dict) else {}
    if not isinstance(numbers, dict) or not all(isinstance(number, int | float) for number in numbers.values()):
        raise RuleError(f"{text}: hyper_values={numbers!r} is not allowed; an object of numbers by name")
    return {name: float(number) for name, number in numbers.items()}


def _update_from(path: Path) -> Update:
    data = _json_of(path)
    try:
        update = Update.from_dict(data)
        program_of(update.rule)
    except RuleError as error:
        raise RuleError(f"{path}: {error}") from error
    return update


def _json_of(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, DocumentError) as error:
        raise RuleError(f"{path}: not the JSON of an optimizer's update.to_dict(): {error}") from error
