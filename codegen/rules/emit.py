"""A checked rule as C++ statements, for the template `templates/shared/rule.h.j2`.

The values of a rule are sorted by how often they must be computed: numbers of the call (`Scalars`, in fp64, rounded
once), numbers of a row (`Row`, in the order in which its reductions become known), and elements.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from typing import Any

from embforge.codegen.rules.language import program_of
from embforge.codegen.rules.program import (
    Choice,
    Definition,
    Input,
    Kind,
    Node,
    Number,
    Operation,
    Program,
    Reduction,
    Reference,
    nodes_of,
)
from embforge.codegen.rules.rule import HYPER, Update

LONGEST_NAME = 32

_RESERVED = """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl concept const consteval
    constexpr constinit continue decltype default delete do double dynamic_cast else enum explicit export extern false
    float for friend goto if inline int long mutable namespace new noexcept not not_eq nullptr operator or or_eq private
    protected public register reinterpret_cast requires return short signed sizeof static static_assert static_cast
    struct switch template this thread_local throw true try typedef typeid typename union unsigned using virtual void
    volatile wchar_t while xor xor_eq errno linux unix stdin stdout stderr
"""
"""Words that cannot be names in C++, and macros that look like names."""
_IN_SCOPE = """
    s row g w t state row_state hyper total dim value root magnitude smaller larger chosen spread power scalars open
    term close finish apply sqrt fabs smaller_number larger_number
"""
"""Names that have a meaning already in the functions where the template puts locals."""
_NO_FIELD = frozenset(_RESERVED.split())
_NO_LOCAL = _NO_FIELD.union(_IN_SCOPE.split())

_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}
_UNARY, _ATOM = 3, 4
_CALLS = {"sqrt": "root", "abs": "magnitude", "min": "smaller", "max": "larger"}
_FP64_CALLS = {"sqrt": "sqrt", "abs": "fabs", "min": "smaller_number", "max": "larger_number"}
_WORDS = {"+": "plus", "-": "minus", "*": "times", "/": "over", "sqrt": "root", "abs": "magnitude", "power": "to_the_t"}
_NUMBERS = {1.0: "one", 2.0: "two"}


def rule_facts(update: Update) -> dict[str, Any]:
    """The template's fact `rule`: names, and the statements of each function of the struct."""
    return {"rule": _Emitter(program_of(update.rule)).facts()}


class _Emitter:
    """Emits one rule. Fields of `Scalars` and `Row` are collected while the expressions that need them are written."""

    def __init__(self, program: Program) -> None:
        self.program = program
        states = program.rule.states
        self.element_states = [state.name for state in states if state.extent == "element"]
        self.row_states = [state.name for state in states if state.extent == "row"]
        self.folds = [step.name for step in program.reductions]
        self.stages: dict[str, int] = {}
        """The last reduction on which a step depends (-1: none), for each step that is a number of a row."""
        for step in program.steps:  # a step refers to earlier ones only
            if isinstance(step, Reduction):
                self.stages[step.name] = self.folds.index(step.name)
            elif step.kind == Kind.ROW:
                self.stages[step.name] = self.stage(step.value)
        self.scalars: dict[str, tuple[str, Node]] = {}
        """Field and value by the value's text."""
        self.row: dict[str, tuple[str, int, str]] = {}
        """By the value's text: the field, the last reduction on which it depends (-1: none), and the assigned value."""

    def facts(self) -> dict[str, Any]:
        for name in self.row_states:
            self.row_field(Input(name, Kind.ROW), name, f"row_state[{self.row_states.index(name)}]")
        terms = []
        closes = []
        for step in self.program.steps:
            if isinstance(step, Reduction):
                terms.append({"comment": step.text, "lines": self.term(step)})
                total = {"sum": "total", "mean": "total / float(dim)", "norm": "root(total)"}[step.fold]
                self.row_field(Reference(step.name, Kind.ROW), step.name, total)
            elif step.kind == Kind.ROW:
                self.row_field(Reference(step.name, Kind.ROW), step.name, self.spelled(step.value, Kind.ROW))
        apply = self.apply()
        finish = [
            f"row_state[{self.row_states.index(name)}] = {self.spelled(result, Kind.ROW)};"
            for name, result in self.program.results
            if name in self.row_states
        ]
        for index in range(len(self.folds)):
            closes.append({"comment": terms[index]["comment"], "lines": self.row_lines(index)})
        return {
            "name": self.program.rule.name,
            "source": self.program.lines,
            "element_states": self.element_states,
            "row_states": self.row_states,
            "scalar_fields": [field for field, _ in self.scalars.values()],
            "row_fields": [field for field, _, _ in self.row.values()],
            "scalars": self.scalar_lines(),
            "open": self.row_lines(-1),
            "terms": terms,
            "closes": closes,
            "finish": finish,
            "apply": apply,
            "scalar_calls": {
                node.operator
                for step in self.program.steps
                for node in nodes_of(step.value)
                if isinstance(node, Operation) and node.kind == Kind.SCALAR
            },
        }

    # ---- Once per call --------------------------------------------------------------------------------

    def scalar(self, node: Node) -> str:
        """A scalar as a part of an fp32 expression: a literal, or a field that was rounded once."""
        if isinstance(node, Number):
            return _fp32(node.value)
        key = repr(node)
        if key not in self.scalars:
            self.scalars[key] = (_unique(_slug(node, "c"), (field for field, _ in self.scalars.values())), node)
        return f"s.{self.scalars[key][0]}"

    def scalar_lines(self) -> list[str]:
        """Statements of `scalars()`: inputs and locals as fp64, then the fields."""
        lines = []
        needed = [node for _, value in self.scalars.values() for node in nodes_of(value)]
        for step in reversed(self.program.steps):
            if step.kind == Kind.SCALAR and Reference(step.name, Kind.SCALAR) in needed:
                needed += nodes_of(step.value)
        numbers = (*HYPER, *self.program.rule.hyper)
        for index, name in enumerate(numbers):
            if Input(name, Kind.SCALAR) in needed:
                lines.append(f"const double {_local(name)} = hyper[{index}];")
        for step in self.program.steps:
            if step.kind == Kind.SCALAR and Reference(step.name, Kind.SCALAR) in needed:
                lines.append(f"const double {_local(step.name)} = {self.fp64(step.value)};")
        lines += [f"s.{field} = float({self.fp64(value)});" for field, value in self.scalars.values()]
        return lines

    def fp64(self, node: Node, least: int = 0) -> str:
        """A scalar as an fp64 expression. The text binds at least as tightly as `least`."""
        if isinstance(node, Number):
            return _bound(repr(node.value), _UNARY if node.value < 0 else _ATOM, least)
        if isinstance(node, Input):
            return "double(t)" if node.name == "t" else _local(node.name)
        if isinstance(node, Reference):
            return _local(node.name)
        if isinstance(node, Choice):
            left, right, yes, no = (self.fp64(operand, 1) for operand in node.operands)
            return f"({left} {node.relation} {right} ? {yes} : {no})"
        if node.operator in ("min", "max"):
            left, right = (self.fp64(operand) for operand in node.operands)
            return f"{_FP64_CALLS[node.operator]}({left}, {right})"
        if node.operator == "power":
            return f"power({self.fp64(node.operands[0])}, t)"
        if node.operator in _FP64_CALLS:
            return f"{_FP64_CALLS[node.operator]}({self.fp64(node.operands[0])})"
        return self.infix(node, least, self.fp64)

    # ---- Once per row ---------------------------------------------------------------------------------

    def row_field(self, node: Node, wish: str, assigned: str) -> str:
        field = _unique(_field(wish), (field for field, _, _ in self.row.values()))
        self.row[repr(node)] = (field, self.stage(node), assigned)
        return field

    def row_lines(self, stage: int) -> list[str]:
        return [f"row.{field} = {assigned};" for field, at, assigned in self.row.values() if at == stage]

    def stage(self, node: Node) -> int:
        """The last reduction on which a value depends; -1: none."""
        names = [part.name for part in nodes_of(node) if isinstance(part, Reference) and part.kind == Kind.ROW]
        return max((self.stages[name] for name in names), default=-1)

    def row_number(self, node: Node) -> str:
        """A row's number as a part of an expression of elements: a field, because it is computed once per row."""
        key = repr(node)
        if key not in self.row:
            self.row_field(node, _slug(node, "r"), self.spelled(node, Kind.ROW))
        return f"row.{self.row[key][0]}"

    # ---- Once per element -----------------------------------------------------------------------------

    def term(self, step: Reduction) -> list[str]:
        lines = self.element_lines([step.value])
        value = self.spelled(step.value, Kind.ELEMENT)
        if step.fold != "norm":
            return [*lines, f"return {value};"]
        if not value.isidentifier():
            lines.append(f"const V value = {value};")
            value = "value"
        return [*lines, f"return {value} * {value};"]

    def apply(self) -> list[str]:
        results = [(name, result) for name, result in self.program.results if name not in self.row_states]
        lines = self.element_lines([result for _, result in results])
        for name, result in results:
            place = "w" if name == "w" else f"state[{self.element_states.index(name)}]"
            lines.append(f"{place} = {_local(result.name)};")
        return lines

    def element_lines(self, wanted: list[Node]) -> list[str]:
        """Definitions of the constants that the wanted values need."""
        needed = [node for value in wanted for node in nodes_of(value)]
        for step in reversed(self.program.steps):
            if step.kind == Kind.ELEMENT and Reference(step.name, Kind.ELEMENT) in needed:
                needed += nodes_of(step.value)
        lines = []
        for index, name in enumerate(self.element_states):
            if Input(name, Kind.ELEMENT) in needed:
                lines.append(f"const V {_local(name)} = state[{index}];")
        for step in self.program.steps:
            if isinstance(step, Definition) and Reference(step.name, Kind.ELEMENT) in needed:
                lines.append(f"const V {_local(step.name)} = {self.full(step.value)};")
        return lines

    def full(self, node: Node) -> str:
        """A value of any kind as an expression of the vector type V."""
        text = self.spelled(node, Kind.ELEMENT)
        return text if node.kind == Kind.ELEMENT else f"spread<V>({text})"

    def spelled(self, node: Node, kind: Kind, least: int = 0) -> str:
        """An fp32 value as part of an expression of `kind`. The text binds at least as tightly as `least`."""
        if node.kind == Kind.SCALAR:
            text = self.scalar(node)
            return _bound(text, _UNARY if text.startswith("-") else _ATOM, least)
        if node.kind == Kind.ROW and (kind == Kind.ELEMENT or isinstance(node, Input | Reference)):
            return self.row_number(node)
        if isinstance(node, Input):
            return node.name if node.name in ("g", "w") else _local(node.name)
        if isinstance(node, Reference):
            return _local(node.name)
        assert not isinstance(node, Number)  # numbers are scalars
        alike = self.full if kind == Kind.ELEMENT else lambda operand: self.spelled(operand, kind)
        if isinstance(node, Choice):
            left, right, yes, no = (alike(operand) for operand in node.operands)
            left, right = (
                f"({text})" if isinstance(operand, Choice) else text
                for text, operand in ((left, node.left), (right, node.right))
            )
            return f"chosen({left} {node.relation} {right}, {yes}, {no})"
        if node.operator in _CALLS:
            return f"{_CALLS[node.operator]}({', '.join(alike(operand) for operand in node.operands)})"
        return self.infix(node, least, lambda operand, least: self.spelled(operand, kind, least))

    def infix(self, node: Operation, least: int, spell: Any) -> str:
        """A unary or binary operator. Operators bind to the left, as in Python, so the order is that of the rule."""
        if len(node.operands) == 1:
            return _bound(f"-{spell(node.operands[0], _ATOM)}", _UNARY, least)
        strength = _PRECEDENCE[node.operator]
        left, right = spell(node.operands[0], strength), spell(node.operands[1], strength + 1)
        if right.startswith("-"):
            right = f"({right})"
        return _bound(f"{left} {node.operator} {right}", strength, least)


def _bound(text: str, strength: int, least: int) -> str:
    return text if strength >= least else f"({text})"


def _field(name: str) -> str:
    return name + "_" if name in _NO_FIELD else name


def _local(name: str) -> str:
    return name + "_" if name in _NO_LOCAL else name


def _unique(name: str, taken: Iterable[str]) -> str:
    names, count, unique = set(taken), 2, name
    while unique in names:
        unique, count = f"{name}_{count}", count + 1
    return unique


def _slug(node: Node, otherwise: str) -> str:
    """A name that describes an expression, or `otherwise` if that would be too long."""
    words = "_".join(_words(node))
    return _field(words if 0 < len(words) <= LONGEST_NAME and re.fullmatch(r"[a-z]\w*", words) else otherwise)


def _words(node: Node) -> list[str]:
    if isinstance(node, Number):
        return [_NUMBERS.get(node.value, "number")]
    if isinstance(node, Input | Reference):
        return [node.name]
    if isinstance(node, Choice) or node.operator not in _WORDS:
        return ["x" * (LONGEST_NAME + 1)]  # too long to be a name
    word = _WORDS[node.operator]
    if len(node.operands) == 2:
        return [*_words(node.operands[0]), word, *_words(node.operands[1])]
    inner = _words(node.operands[0])
    return [*inner, word] if node.operator == "power" else [word, *inner]


def _fp32(value: float) -> str:
    """The shortest C++ literal whose value is the number rounded to fp32."""
    rounded = struct.unpack("f", struct.pack("f", value))[0]
    for digits in range(1, 10):
        text = f"{rounded:.{digits}g}"
        if struct.unpack("f", struct.pack("f", float(text)))[0] == rounded:
            break
    return text + ("f" if "." in text or "e" in text else ".0f")
