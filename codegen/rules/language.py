"""The rule language: a few Python statements, parsed and checked here, and never executed.

Statements assign (`=`, `+=`, `-=`, `*=`, `/=`) to `w`, a state, `g` or a local name; each sees what the ones before it
assigned. docs/custom_rules.md describes the language.
"""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from typing import NoReturn, get_args

from embforge.codegen.errors import RuleError
from embforge.codegen.rules.program import (
    Choice,
    Definition,
    Fold,
    Input,
    Kind,
    Node,
    Number,
    Operation,
    Program,
    Reduction,
    Reference,
    Step,
    nodes_of,
)
from embforge.codegen.rules.rule import HYPER, Extent, Rule

MAX_LINES = 64
MAX_LINE_LENGTH = 1000
MAX_LINE_NODES = 100
MAX_REDUCTIONS = 8
MAX_EXPONENT = 8
LARGEST_FP32 = float.fromhex("0x1.fffffep127")

OPERATORS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
RELATIONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}
FUNCTIONS = {"sqrt": 1, "abs": 1, "sign": 1, "min": 2, "max": 2, "clip": 3, "where": 3}
"""Elementwise functions with the number of their arguments."""
FOLDS: tuple[Fold, ...] = get_args(Fold)
INEXACT = ("exp", "log", "pow", "exp2", "log2", "log10", "sin", "cos", "tan", "tanh", "sigmoid", "rsqrt", "erf")
"""Functions that users may expect but that math libraries round differently."""
INPUTS = ("w", "g", "lr", "t")
EXTENT_KINDS: dict[Extent, Kind] = {"row": Kind.ROW, "element": Kind.ELEMENT}
EXTENTS: tuple[Extent, ...] = get_args(Extent)

_NAME = re.compile(r"[a-z](_?[a-z0-9])*")
_RULE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")
_NAME_ALLOWED = "a name is at most 32 lower case letters, digits and single underscores between them"


@lru_cache(maxsize=256)
def program_of(rule: Rule) -> Program:
    """Parses and checks a rule; `RuleError` says what is wrong with it and where."""
    if not _RULE_NAME.fullmatch(rule.name):
        raise RuleError(
            f"rule name {rule.name!r} is not allowed; it is a letter, then at most 39 letters, digits and underscores"
        )
    return _Parser(rule).program()


class _Parser:
    """Walks through the statements in order. `values` holds the current value of every name."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.at = f"rule {rule.name!r}"
        self.states = {state.name: state.extent for state in rule.states}
        self.values: dict[str, Node] = {
            "w": Input("w", Kind.ELEMENT),
            "g": Input("g", Kind.ELEMENT),
            "lr": Input("lr", Kind.SCALAR),
            "t": Input("t", Kind.SCALAR),
        }
        self.steps: list[Step] = []
        self.taken: set[str] = set()

    def program(self) -> Program:
        self.declare()
        if not 1 <= len(self.rule.lines) <= MAX_LINES:
            self.fail(f"it has {len(self.rule.lines)} lines; 1 to {MAX_LINES} are allowed")
        lines = []
        for number, line in enumerate(self.rule.lines, 1):
            self.at = f"rule {self.rule.name!r}, line {number} {line[:80]!r}"
            lines.append(self.statement(line))
        self.at = f"rule {self.rule.name!r}"
        self.check_results()
        results = tuple((name, self.final(name)) for name in ("w", *self.states))
        steps = _needed(self.steps, results)
        self.check_hyper(steps)
        return Program(self.rule, tuple(lines), steps, results)

    def fail(self, message: str) -> NoReturn:
        raise RuleError(f"{self.at}: {message}")

    # ---- Names ----------------------------------------------------------------------------------------

    def declare(self) -> None:
        for state in self.rule.states:
            self.declared("state", state.name)
            if state.extent not in EXTENTS:
                self.fail(f"state {state.name!r} is per {state.extent!r}; allowed: {', '.join(map(repr, EXTENTS))}")
            self.values[state.name] = Input(state.name, EXTENT_KINDS[state.extent])
        for name in self.rule.hyper:
            self.declared("hyper number", name)
            self.values[name] = Input(name, Kind.SCALAR)
        self.taken = set(self.values)

    def declared(self, what: str, name: str) -> None:
        self.check_name(what, name)
        if name in self.values or name in HYPER:
            self.fail(f"{what} {name!r} is declared twice, or one of {', '.join(dict.fromkeys((*INPUTS, *HYPER)))}")

    def check_name(self, what: str, name: str) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > 32:
            self.fail(f"{what} {name!r} is not a name; {_NAME_ALLOWED}")
        if name in FUNCTIONS or name in FOLDS or name in INEXACT:
            self.fail(f"{what} {name!r} has the name of a function; choose another name")

    def fresh(self, wish: str) -> str:
        """A name for a step: `wish`, or if that is taken, `wish` followed by a number."""
        name, count = wish, 2
        while name in self.taken:
            name, count = f"{wish}{count}", count + 1
        self.taken.add(name)
        return name

    def check_results(self) -> None:
        if isinstance(self.values["w"], Input):
            self.fail("no line assigns to w, so it would train nothing; add one such as `w -= lr * g`")
        for name in self.states:
            if isinstance(self.values[name], Input):
                self.fail(
                    f"no line assigns to state {name!r}; remove it, or make it a hyper number if it never changes"
                )

    def check_hyper(self, steps: tuple[Step, ...]) -> None:
        read = {node.name for step in steps for node in nodes_of(step.value) if isinstance(node, Input)}
        for name in self.rule.hyper:
            if name not in read:
                self.fail(f"hyper number {name!r} changes neither w nor a state; remove it")

    def final(self, name: str) -> Reference:
        value = self.values[name]
        assert isinstance(value, Reference)  # check_results made sure of it
        return value

    # ---- Statements -----------------------------------------------------------------------------------

    def statement(self, line: str) -> str:
        """Reads one line and returns its uniform spelling."""
        if len(line) > MAX_LINE_LENGTH:
            self.fail(f"it has {len(line)} characters; at most {MAX_LINE_LENGTH} are allowed")
        try:
            body = ast.parse(line.strip()).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            self.fail(f"it cannot be read: {getattr(error, 'msg', error)}")
        if len(body) != 1:
            self.fail(f"it has {len(body)} statements; write one per line")
        statement = body[0]
        count = sum(isinstance(node, ast.expr) for node in ast.walk(statement))
        if count > MAX_LINE_NODES:
            self.fail(f"it has {count} operands; at most {MAX_LINE_NODES} are allowed; split it with a local name")
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            name = self.target(statement.targets[0])
            self.assign(name, self.expression(statement.value))
        elif isinstance(statement, ast.AugAssign):
            name = self.target(statement.target)
            if name not in self.values:
                self.fail(f"{name!r} has no value yet that could be changed; known: {self.known()}")
            if type(statement.op) not in OPERATORS:
                self.fail("that assignment is not allowed; allowed: = += -= *= /=")
            value = self.expression(statement.value)
            self.assign(name, _operation(OPERATORS[type(statement.op)], self.values[name], value))
        else:
            self.fail("it is not an assignment; a line is `name = expression`, or has += -= *= /=")
        return ast.unparse(statement)

    def target(self, target: ast.expr) -> str:
        if not isinstance(target, ast.Name):
            self.fail(f"it assigns to {ast.unparse(target)!r}; allowed: w, g, a state, a local name")
        name = target.id
        if name in ("lr", "t") or name in self.rule.hyper:
            self.fail(f"it assigns to {name!r}, which is read-only; allowed: w, g, a state, a local name")
        self.check_name("the local", name)
        return name

    def assign(self, name: str, value: Node) -> None:
        kind = value.kind
        if name in ("w", "g"):
            kind = Kind.ELEMENT
        elif name in self.states:
            kind = EXTENT_KINDS[self.states[name]]
            if value.kind > kind:
                self.fail(
                    f"state {name!r} is per row and cannot hold a value per element; reduce it by sum, mean or norm"
                )
        local = name not in self.states and name not in INPUTS
        self.values[name] = self.define(name if local else f"{name}_new", value, kind)

    def define(self, wish: str, value: Node, kind: Kind) -> Reference:
        step = Definition(self.fresh(wish), value, kind)
        self.steps.append(step)
        return Reference(step.name, kind)

    def named(self, wish: str, value: Node) -> Node:
        """The value, stored under a name if it is an expression, so that it can be used twice and is computed once."""
        return self.define(wish, value, value.kind) if isinstance(value, Operation | Choice) else value

    # ---- Expressions ----------------------------------------------------------------------------------

    def expression(self, node: ast.expr) -> Node:
        if isinstance(node, ast.Constant):
            return self.number(node.value)
        if isinstance(node, ast.Name):
            return self.name(node.id)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            operand = self.expression(node.operand)
            if isinstance(node.op, ast.UAdd):
                return operand
            return Number(-operand.value) if isinstance(operand, Number) else _operation("-", operand)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return _operation(OPERATORS[type(node.op)], self.expression(node.left), self.expression(node.right))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            return self.power(node)
        if isinstance(node, ast.Call):
            return self.call(node)
        if isinstance(node, ast.Compare):
            self.fail(
                f"the comparison {ast.unparse(node)!r} is not allowed here; only as the condition of where(c, a, b)"
            )
        self.fail(
            f"{ast.unparse(node)!r} ({type(node).__name__}) is not in the language; allowed: numbers, names, + - * /, "
            f"x ** 2, {self.functions()}"
        )

    def number(self, value: object) -> Number:
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(f"{value!r} is not a number")
        if abs(value) > LARGEST_FP32:
            self.fail(f"{str(value)[:24]} is not a finite fp32 number")
        return Number(float(value))

    def name(self, name: str) -> Node:
        if name not in self.values:
            hint = " is a function; call it" if name in FUNCTIONS or name in FOLDS else " is not known here"
            self.fail(f"{name!r}{hint}; known: {self.known()}")
        return self.values[name]

    def power(self, node: ast.BinOp) -> Node:
        base = self.expression(node.left)
        exponent = node.right
        if isinstance(exponent, ast.Name) and exponent.id == "t":
            if base.kind != Kind.SCALAR:
                self.fail(
                    f"{ast.unparse(node)!r}: only scalars can be raised to t, not values of a {base.kind.name.lower()}"
                )
            return _operation("power", base)
        value = exponent.value if isinstance(exponent, ast.Constant) else None
        if isinstance(value, bool) or not isinstance(value, int) or not 2 <= value <= MAX_EXPONENT:
            self.fail(
                f"{ast.unparse(node)!r}: an exponent is t or an integer from 2 to {MAX_EXPONENT}; "
                "other powers are not the same bits on every target; sqrt(x) is"
            )
        base = self.named("base", base)
        product = base
        for _ in range(value - 1):
            product = _operation("*", product, base)
        return product

    def call(self, node: ast.Call) -> Node:
        if not isinstance(node.func, ast.Name):
            self.fail(f"{ast.unparse(node.func)!r} cannot be called; allowed: {self.functions()}")
        name = node.func.id
        if name in INEXACT:
            self.fail(f"function {name!r} does not give the same bits on every target; allowed: {self.functions()}")
        if name not in FUNCTIONS and name not in FOLDS:
            self.fail(f"function {name!r} is not known; allowed: {self.functions()}")
        if node.keywords or any(isinstance(argument, ast.Starred) for argument in node.args):
            self.fail(f"{ast.unparse(node)!r}: arguments are plain expressions, not name=value or *values")
        count = FUNCTIONS.get(name, 1)
        if len(node.args) != count:
            self.fail(f"{name}() takes {count} argument{'s' * (count > 1)}, not {len(node.args)}")
        if name == "where":
            return self.where(node)
        arguments = [self.expression(argument) for argument in node.args]
        if name in FOLDS:
            return self.reduction(FOLDS[FOLDS.index(name)], arguments[0], ast.unparse(node))
        if name == "clip":
            return _operation("min", _operation("max", arguments[0], arguments[1]), arguments[2])
        if name == "sign":
            return _sign(self.named("signed_value", arguments[0]))
        return _operation(name, *arguments)

    def where(self, node: ast.Call) -> Node:
        condition = node.args[0]
        if not isinstance(condition, ast.Compare) or len(condition.ops) != 1:
            self.fail(f"{ast.unparse(node)!r}: the condition is one comparison, such as where(x > 0, a, b)")
        if type(condition.ops[0]) not in RELATIONS:
            self.fail(f"{ast.unparse(condition)!r}: allowed comparisons: {' '.join(RELATIONS.values())}")
        left, right = self.expression(condition.left), self.expression(condition.comparators[0])
        return _choice(
            RELATIONS[type(condition.ops[0])], left, right, self.expression(node.args[1]), self.expression(node.args[2])
        )

    def reduction(self, fold: Fold, value: Node, text: str) -> Node:
        if value.kind != Kind.ELEMENT:
            self.fail(
                f"{text!r} reduces a value of a {value.kind.name.lower()}; only values of an element can be reduced"
            )
        reductions = [step for step in self.steps if isinstance(step, Reduction)]
        for step in reductions:
            if step.fold == fold and repr(step.value) == repr(value):  # by text: 0.0 is not -0.0
                return Reference(step.name, Kind.ROW)
        if len(reductions) == MAX_REDUCTIONS:
            self.fail(f"{text!r} is reduction {MAX_REDUCTIONS + 1}; at most {MAX_REDUCTIONS} are allowed")
        words = "_".join(re.findall(r"[a-z0-9]+", text))
        name = self.fresh(words if len(words) <= 24 else fold)
        self.steps.append(Reduction(name, fold, value, text))
        return Reference(name, Kind.ROW)

    # ---- Lists for messages ---------------------------------------------------------------------------

    def known(self) -> str:
        return ", ".join(self.values)

    def functions(self) -> str:
        return ", ".join((*FUNCTIONS, *FOLDS))


def _needed(steps: list[Step], results: tuple[tuple[str, Reference], ...]) -> tuple[Step, ...]:
    """The steps that the results depend on, in order."""
    wanted = {reference.name for _, reference in results}
    kept: list[Step] = []
    for step in reversed(steps):
        if step.name in wanted:
            kept.append(step)
            wanted.update(node.name for node in nodes_of(step.value) if isinstance(node, Reference))
    return tuple(reversed(kept))


def _operation(operator: str, *operands: Node) -> Operation:
    return Operation(operator, operands, max(operand.kind for operand in operands))


def _choice(relation: str, left: Node, right: Node, yes: Node, no: Node) -> Choice:
    return Choice(relation, left, right, yes, no, max(left.kind, right.kind, yes.kind, no.kind))


def _sign(value: Node) -> Choice:
    """1, -1, or the value itself: a zero keeps its sign and NaN stays NaN."""
    negative = _choice("<", value, Number(0.0), Number(-1.0), value)
    return _choice(">", value, Number(0.0), Number(1.0), negative)
