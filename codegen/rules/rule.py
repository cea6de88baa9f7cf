"""An update rule as it is stored in a plan: plain text and names, which `codegen/rules/language.py` checks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from embforge.codegen.errors import RuleError

Extent = Literal["element", "row"]
"""How many numbers a state has: one per element of the table, or one per row."""
Rounding = Literal["stochastic", "nearest"]
"""How rows of tables narrower than fp32 are rounded when they are stored."""

HYPER = ("lr", "grad_scale")
"""The first numbers of the fp64 `hyper` array of a call; a rule's own follow. `grad_scale` is the factor of a scaled
loss, and then all gradients are checked to be finite; 0 means that the loss is not scaled and nothing is checked."""
COUNTERS = ("step", "seed")
"""The int64 `counters` of a call: updates done so far (a rule's `t` is one more), and stochastic rounding's key."""


@dataclass(frozen=True)
class State:
    """One state of a rule, fp32."""

    name: str
    extent: Extent = "element"


@dataclass(frozen=True)
class Rule:
    """How a row and its states change when its gradient is known. `lines` are statements of the rule language."""

    name: str
    lines: tuple[str, ...]
    states: tuple[State, ...] = ()
    hyper: tuple[str, ...] = ()
    """Names of the rule's numbers other than `lr` and `t`, in their order in the `hyper` array, after `HYPER`."""


@dataclass(frozen=True)
class Update:
    """A rule together with the way in which new rows are rounded to the table's format."""

    rule: Rule
    rounding: Rounding = "stochastic"

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> Update:
        """The update that `to_dict` wrote; `RuleError` names a field of the wrong type. It does not check the lines."""
        rule = _field(data, "rule", dict)
        lines, states, hyper = (_field(rule, key, list | tuple) for key in ("lines", "states", "hyper"))
        for text in (*lines, *hyper):
            if not isinstance(text, str):
                raise RuleError(f"{text!r} among lines or hyper numbers is not allowed; allowed: texts")
        of_rule = tuple(State(_field(state, "name", str), _field(state, "extent", str)) for state in states)
        rounding = _field(data, "rounding", str)
        if rounding not in get_args(Rounding):
            raise RuleError(f"rounding={rounding!r} is not allowed; allowed: {', '.join(get_args(Rounding))}")
        return cls(Rule(_field(rule, "name", str), tuple(lines), of_rule, tuple(hyper)), rounding)


def _field(data: Any, key: str, kind: Any) -> Any:
    if not isinstance(data, dict) or not isinstance(data.get(key), kind):
        actual = repr(data.get(key)) if isinstance(data, dict) else f"missing in {data!r}"
        expected = {str: "a text", dict: "an object"}.get(kind, "a list")
        raise RuleError(f"{key!r} is {actual[:80]}; it must be {expected}")
    return data[key]
