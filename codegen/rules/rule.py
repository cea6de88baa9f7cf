"""A rule as a plan carries it: plain text and names, checked by `codegen/rules/language.py`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from embforge.codegen.errors import RuleError

Extent = Literal["element", "row"]
"""How much a state holds: a number an element of the table, or one a row."""
Rounding = Literal["stochastic", "nearest"]
"""How rows of narrow tables are stored. fp32 rows need no rounding."""

HYPER = ("lr", "grad_scale")
"""The first words of the fp64 `hyper` array of a call; a rule's own follow. `grad_scale` is what the loss was
multiplied by, and asks for a check that all gradients are finite; 0: neither."""
COUNTERS = ("step", "seed")
"""The int64 `counters` of a call: updates done so far (a rule's `t` is one more), and stochastic rounding's key."""


@dataclass(frozen=True)
class State:
    """One state of a rule, fp32."""

    name: str
    extent: Extent = "element"


@dataclass(frozen=True)
class Rule:
    """What happens to a row once its gradient is known. `lines` are statements of the rule language."""

    name: str
    lines: tuple[str, ...]
    states: tuple[State, ...] = ()
    hyper: tuple[str, ...] = ()
    """Names of numbers beside `lr` and `t`, in the order in which `hyper` holds them behind `HYPER`."""


@dataclass(frozen=True)
class Update:
    """A rule, and how its new rows are rounded to the table's format."""

    rule: Rule
    rounding: Rounding = "stochastic"

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> Update:
        """`RuleError` names what has the wrong type. What the rule says is not checked here."""
        rule = _field(data, "rule", dict)
        lines, states, hyper = (_field(rule, key, list | tuple) for key in ("lines", "states", "hyper"))
        for text in (*lines, *hyper):
            if not isinstance(text, str):
                raise RuleError(f"{text!r} among lines or hyper numbers is not allowed; texts are")
        kept = tuple(State(_field(state, "name", str), _field(state, "extent", str)) for state in states)
        rounding = _field(data, "rounding", str)
        if rounding not in get_args(Rounding):
            raise RuleError(f"rounding={rounding!r} is not allowed; allowed: {', '.join(get_args(Rounding))}")
        return cls(Rule(_field(rule, "name", str), tuple(lines), kept, tuple(hyper)), rounding)


def _field(data: Any, key: str, kind: Any) -> Any:
    if not isinstance(data, dict) or not isinstance(data.get(key), kind):
        found = repr(data.get(key)) if isinstance(data, dict) else f"missing in {data!r}"
        wanted = {str: "a text", dict: "an object"}.get(kind, "a list")
        raise RuleError(f"{key!r} is {found[:80]}; it must be {wanted}")
    return data[key]
