"""The rule language: what it means, what it refuses with which message, and that its C++ has the bits of its torch."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from embforge import optim
from embforge.codegen.errors import RuleError
from embforge.codegen.machine import find_compiler
from embforge.codegen.render import render
from embforge.codegen.rules import builtin
from embforge.codegen.rules.emit import rule_facts
from embforge.codegen.rules.language import MAX_LINES, program_of
from embforge.codegen.rules.rule import Rule, State, Update
from embforge.launch.reference.rules import apply_rule, row_sum

KITCHEN_SINK = optim.custom(
    "kitchen_sink",
    state={"s": "row", "double": "element", "value": "element", "row": "row"},
    rule="""
        # names that mean something in C++, every operator and every function
        int = clip(g, -limit, limit) * 0.1
        s = max(s, mean(abs(int))) / 3 + 1e-3
        g += -int ** 2 - (-w) / 4
        double = double - (int - g) + 2 * sign(g)
        warm = max(0.01, lr) / max(lr, 0.01) * where(t > 3, 1, 1 / (1 + min(t, 3) ** 3 + abs(limit - 2) + sqrt(limit)))
        root = sqrt(abs(double) / (7 / s - s * limit) + 1.5)
        value *= -(limit - 1) / (root - sum(double))
        w -= lr * warm * where(root <= norm(w - g), root / (value + 3), -0.0) - (s - (row - s))
        row = -(row + norm(w))
        w = min(w, max(row, limit)) * (1 - limit) / warm
        s += 1
    """,
    hyper={"limit": 0.37},
    initial={"s": 0.5, "double": -1.0, "value": 2.0},
)
SPREAD = optim.custom(
    "spread_only", state={"s": "row", "m": "element"}, rule="s = lr\nm = -0.0\nw = s * 2\ng = 1\ns += sum(g)"
)

OPTIMIZERS = {
    "sgd": optim.SGD(0.1),
    "sgd_l2": optim.SGD(0.1, weight_decay=0.01),
    "sgd_all": optim.SGD(0.1, weight_decay=0.01, decoupled=True, max_row_norm=0.7),
    "momentum": optim.Momentum(0.1),
    "nesterov": optim.Nesterov(0.1, weight_decay=0.1, max_row_norm=1.5),
    "adagrad": optim.Adagrad(0.1, initial_accumulator_value=0.25),
    "adagrad_decay": optim.Adagrad(0.1, lr_decay=0.05),
    "rowwise_adagrad": optim.RowwiseAdagrad(0.1),
    "adam": optim.Adam(0.01),
    "adamw": optim.Adam(0.01, weight_decay=0.1, decoupled=True),
    "rowwise_adam": optim.RowwiseAdam(0.01, max_row_norm=0.5),
    "rmsprop": optim.RMSProp(0.01),
    "ftrl": optim.Ftrl(0.1, beta=1.0, l1=0.05, l2=0.1),
    "lamb": optim.LAMB(0.01),
    "lamb_decay": optim.LAMB(0.01, weight_decay=0.1, max_row_norm=0.9),
    "lars": optim.LARS(0.5),
    "lars_decay": optim.LARS(0.5, weight_decay=0.1),
    "kitchen_sink": KITCHEN_SINK(lr=0.3),
    "kitchen_sink_all": KITCHEN_SINK(lr=0.3, limit=1.25, weight_decay=0.1, max_row_norm=1.0),
    "spread_only": SPREAD(lr=0.1),
    "still": optim.custom(
        "still",
        {state.name: state.extent for state in builtin.ftrl().states},
        "\n".join(builtin.ftrl().lines),
        dict.fromkeys(builtin.ftrl().hyper, 0.1),
        initial={"z": -0.0},
    )(lr=0.0),
}


def rule(*lines: str, states: dict[str, str] | None = None, hyper: tuple[str, ...] = (), name: str = "mine") -> Rule:
    return Rule(name, lines, tuple(State(key, extent) for key, extent in (states or {}).items()), hyper)  # type: ignore[arg-type]


# ---- The generated code -------------------------------------------------------------------------------


def compiled(directory: Path) -> ctypes.CDLL:
    """All rules in one library: one run of the compiler."""
    text = ""
    for name, optimizer in OPTIMIZERS.items():
        text += f"namespace {name} {{\n{render('shared/rule.h.j2', rule_facts(optimizer.update))}}}\n"
        given = "int64_t wide, const double* h, int64_t t, const float* g, float* w, float* m, float* s, int64_t dim"
        body = f"update_row<{name}::Rule>(wide, h, t, g, w, m, s, dim);"
        text += f'extern "C" void run_{name}({given}) {{ {body} }}\n\n'
    (directory / "harness_rules.h").write_text(text)
    flags = "-std=c++17 -O2 -ffp-contract=off -fno-math-errno -fPIC -shared -Wall -Wextra -Wno-unused-parameter -Werror"
    driver = str(Path(__file__).parents[1] / "support" / "rule_driver.cpp")
    output = directory / "rules.so"
    command = [*find_compiler().command, *flags.split(), f"-I{directory}", driver, "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(output))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """NaN equals NaN; its payload means nothing."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.nan_to_num(0.0).contiguous().view(torch.int32), b.nan_to_num(0.0).contiguous().view(torch.int32)
    )


def rows_of(dim: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rows that reach all branches: random ones of all sizes, zeros of both signs, an infinity."""
    random = torch.Generator().manual_seed(seed)
    g = torch.randn(6, dim, generator=random) * torch.tensor([1.0, 1e-3, 30.0, 0.0, 1e-30, 1.0])[:, None]
    w = torch.randn(6, dim, generator=random)
    g[3] = -0.0
    w[4] = 0.0
    g[5, dim // 2] = torch.inf
    return g, w


def run_row(
    library: ctypes.CDLL,
    name: str,
    wide: int,
    hyper: tuple[float, ...],
    t: int,
    g: Tensor,
    w: Tensor,
    states: list[Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """The generated code on one row. A state is [D] or, per row, has no dimension."""
    new_w = w.clone()
    elements = torch.cat([torch.empty(0), *(state for state in states if state.dim())])
    numbers = torch.tensor([float(state) for state in states if not state.dim()])
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (g, new_w, elements, numbers)]
    c_hyper = (ctypes.c_double * len(hyper))(*hyper)
    getattr(library, f"run_{name}")(
        ctypes.c_int64(wide), c_hyper, ctypes.c_int64(t), *pointers, ctypes.c_int64(g.numel())
    )
    found = {True: iter(elements.view(-1, g.numel())), False: iter(numbers)}
    return new_w, [next(found[state.dim() == 1]) for state in states]


def test_generated_code_has_the_bits_of_torch(tmp_path: Path) -> None:
    library = compiled(tmp_path)
    for (name, optimizer), dim in itertools.product(OPTIMIZERS.items(), (1, 5, 16, 33, 130)):
        update = optimizer.update
        hyper = (float(optimizer.lr), 0.0, *optimizer.hyper_values)
        g, w = rows_of(dim, seed=dim)
        states = {
            state.name: torch.full(
                (6, dim) if state.extent == "element" else (6,), optimizer.initial_states[state.name]
            )
            for state in update.rule.states
        }
        for t in (1, 2, 7, -1):  # the last must not run for ever
            new_w, new_states = apply_rule(update, hyper, t, g, w, states)
            for wide, row in itertools.product((0, 1), range(6)):
                old = [state[row] for state in states.values()]
                got_w, got = run_row(library, name, wide, hyper, t, g[row], w[row], old)
                where = f"{name} dim={dim} t={t} wide={wide} row={row}"
                assert same_bits(got_w, new_w[row]), where
                for key, state in zip(states, got, strict=True):
                    assert same_bits(state, new_states[key][row]), f"{where} state={key}"
            w, states = new_w, new_states
            assert t < 1 or bool(w[:3].isfinite().all()), name  # or the bits would say little


def test_generated_code_reads_like_the_rule() -> None:
    text = render("shared/rule.h.j2", rule_facts(optim.Adam().update))
    assert "const V m_new = s.beta1 * m + s.one_minus_beta1 * g;" in text
    assert "//     w -= lr * (m / bias1) / (sqrt(v / bias2) + eps)" in text
    text = render("shared/rule.h.j2", rule_facts(optim.RowwiseAdagrad().update))
    assert "const V w_new = w - s.lr * g / row.root_s_new_plus_eps;" in text


def test_the_text_of_a_rule_grows_with_the_rule() -> None:
    """Neither nested calls nor chains of lines are spelled, or walked, more than once."""
    nested = "lr"
    for turn in range(30):
        nested = f"{('min', 'max')[turn % 2]}({nested}, {turn})"
    text = render("shared/rule.h.j2", rule_facts(Update(rule(f"w -= {nested} * g"))))
    assert text.count("smaller_number(") == text.count("larger_number(") == 15 + 1
    chain = ["a0 = norm(g)", *(f"a{n} = a{n - 1} * a{n - 1} + a{n - 1}" for n in range(1, MAX_LINES - 1))]
    text = render("shared/rule.h.j2", rule_facts(Update(rule(*chain, f"w -= a{MAX_LINES - 2}"))))
    assert text.count("row.a61 =") == 1


def test_a_step_below_one_ends() -> None:
    made = rule("w = beta ** t + 0 * g", hyper=("beta",))
    g = torch.ones(1, 1)
    for t, power in ((-5, 1.0), (0, 1.0), (2, 0.25)):
        assert apply_rule(Update(made), (0.1, 0.0, 0.5), t, g, g, {})[0].item() == power


def test_row_sum_is_sixteen_lanes() -> None:
    x = torch.randn(3, 37)
    lanes = torch.zeros(3, 16)
    for column in range(37):
        lanes[:, column % 16] = lanes[:, column % 16] + x[:, column]
    for half in (8, 4, 2, 1):
        lanes = lanes[:, :half] + lanes[:, half : 2 * half]
    assert torch.equal(row_sum(x), lanes[:, 0])
    assert torch.equal(row_sum(torch.full((1, 1), -0.0)).view(torch.int32), torch.zeros(1, dtype=torch.int32))


# ---- What a rule means --------------------------------------------------------------------------------


def run_once(made: Rule, hyper: tuple[float, ...], g: list[float], w: list[float], **states: list[float]) -> Tensor:
    given = {name: torch.tensor([value]) for name, value in states.items()}
    return apply_rule(Update(made), hyper, 1, torch.tensor([g]), torch.tensor([w]), given)[0][0]


def test_a_line_sees_what_the_lines_before_it_assigned() -> None:
    made = rule("m = m + g", "g = g * 2", "w = w + m + g", "w = w + norm(w)", states={"m": "element"})
    # m = 4, 5; g = 2, 2; w = 3 + 4 + 2, 5 + 5 + 2 = 9, 12, whose norm is 15
    assert run_once(made, (0.1, 0.0), [1.0, 1.0], [3.0, 5.0], m=[3.0, 4.0]).tolist() == [24.0, 27.0]


def test_scalars_are_fp64_and_rounded_once() -> None:
    tiny = 1e-9
    made = rule("share = 1 - beta", "w = share * 1e9 * g", hyper=("beta",))
    assert run_once(made, (0.1, 0.0, 1.0 - tiny), [1.0], [0.0]).item() == pytest.approx(1.0, rel=1e-6)


def test_equal_reductions_are_computed_once() -> None:
    program = program_of(rule("w -= lr * g / (norm(g) + norm(g))", "w *= norm(g)", "unused = sum(w)"))
    assert [step.text for step in program.reductions] == ["norm(g)"]


# ---- What is refused ----------------------------------------------------------------------------------

SGD = "w -= lr * g"


@pytest.mark.parametrize(
    ("made", "parts"),
    [
        (rule("w -= lr * h"), ["rule 'mine', line 1 'w -= lr * h'", "'h' is not known", "w, g, lr, t"]),
        (rule("w -= lr * tanh2(g)"), ["'tanh2' is not known", "sqrt, abs"]),
        (rule("w -= exp(g)"), ["'exp'", "same bits on every target", "sqrt"]),
        (rule("w -= log(g)"), ["'log'", "same bits"]),
        (rule("w -= pow(g, 2)"), ["'pow'", "same bits"]),
        (rule("w -= g ** 0.5"), ["exponent is t or an integer from 2 to 8", "sqrt(x)"]),
        (rule("w -= g ** t"), ["only scalars can be raised to t", "element"]),
        (rule("w -= 2 ** (t + 1)"), ["exponent is t or"]),
        (rule("w -= g.data"), ["'g.data' (Attribute) is not in the language"]),
        (rule("w -= g[0]"), ["'g[0]' (Subscript)"]),
        (rule("w -= torch.sqrt(g)"), ["'torch.sqrt' cannot be called"]),
        (rule("w -= (lambda: g)()"), ["cannot be called"]),
        (rule("w -= lambda: g"), ["(Lambda) is not in the language"]),
        (rule("w -= [g for g in w]"), ["(ListComp) is not in the language"]),
        (rule("w -= g if g else w"), ["(IfExp)"]),
        (rule("w -= sqrt(x=g)"), ["not name=value or *values"]),
        (rule("w -= sqrt(*g)"), ["not name=value or *values"]),
        (rule("w -= min(g)"), ["min() takes 2 arguments, not 1"]),
        (rule("w -= sqrt(g, g)"), ["sqrt() takes 1 argument, not 2"]),
        (rule("w -= g > 0"), ["the comparison 'g > 0' is not allowed here", "where(c, a, b)"]),
        (rule("w -= where(g, 1, 0)"), ["the condition is one comparison"]),
        (rule("w -= where(0 < g < 1, 1, 0)"), ["the condition is one comparison"]),
        (rule("w -= where(g is w, 1, 0)"), ["allowed comparisons: < <="]),
        (rule("w -= g % 2"), ["(BinOp) is not in the language"]),
        (rule("w //= 2"), ["allowed: = += -= *= /="]),
        (rule("w -= True"), ["True is not a number"]),
        (rule("w -= 'a'"), ["'a' is not a number"]),
        (rule("w -= 1e39 * g"), ["1e+39 is not a finite fp32 number"]),
        (rule("w -= 1e999"), ["not a finite"]),
        (rule(f"w -= 1{'0' * 400}"), ["not a finite"]),
        (rule("w -= 1j"), ["not a number"]),
        (rule("w -= sqrt"), ["'sqrt' is a function; call it"]),
        (rule("import os"), ["it is not an assignment"]),
        (rule("print(g)"), ["it is not an assignment"]),
        (rule("def f(): pass"), ["it is not an assignment"]),
        (rule("w = g = lr"), ["it is not an assignment"]),
        (rule("w: float = 1"), ["it is not an assignment"]),
        (rule("w, g = g, w"), ["it assigns to '(w, g)'"]),
        (rule("w.data = g"), ["it assigns to 'w.data'"]),
        (rule("w = 1; g = 2"), ["2 statements"]),
        (rule("w = "), ["cannot be read"]),
        (rule("w = \0"), ["cannot be read"]),
        (rule(f"w = {'-' * 900}g"), ["w = ---"]),
        (rule(f"w = {'(' * 300}g{')' * 300}"), ["cannot be read"]),
        (rule("w = " + "g + " * 400 + "g"), ["characters; at most 1000"]),
        (rule("w = " + "g+" * 200 + "g"), ["operands; at most 100"]),
        (rule(*[SGD] * (MAX_LINES + 1)), [f"it has 65 lines; 1 to {MAX_LINES}"]),
        (rule(), ["it has 0 lines"]),
        (rule("lr = 2", SGD), ["it assigns to 'lr', which is read-only"]),
        (rule("t += 1", SGD), ["it assigns to 't', which is read-only"]),
        (rule("beta = 2", "w -= beta * g", hyper=("beta",)), ["it assigns to 'beta', which is read-only"]),
        (rule("x += 1", SGD), ["'x' has no value yet"]),
        (rule("sqrt = 1", SGD), ["the local 'sqrt' has the name of a function"]),
        (rule("Norm = 1", SGD), ["the local 'Norm' is not a name", "lower case"]),
        (rule("a__b = 1", SGD), ["'a__b' is not a name"]),
        (rule("_a = 1", SGD), ["'_a' is not a name"]),
        (rule("g -= lr"), ["no line assigns to w"]),
        (rule(SGD, states={"m": "element"}), ["no line assigns to state 'm'"]),
        (rule(SGD, hyper=("beta",)), ["hyper number 'beta' changes neither w nor a state"]),
        (rule("x = beta", SGD, hyper=("beta",)), ["hyper number 'beta' changes neither"]),
        (rule("s = g * g", SGD, states={"s": "row"}), ["state 's' is per row", "sum, mean or norm"]),
        (rule("w -= norm(lr)"), ["'norm(lr)' reduces a value of a scalar", "only values of an element"]),
        (rule("w -= mean(norm(g))"), ["reduces a value of a row"]),
        (rule(*[f"w -= sum(g * {k})" for k in range(9)]), ["reduction 9; at most 8"]),
        (rule("s = 1", SGD, states={"s": "table"}), ["state 's' is per 'table'", "'element', 'row'"]),
        (rule(SGD, states={"w": "row"}), ["state 'w' is declared twice"]),
        (rule(SGD, states={"m": "row"}, hyper=("m",)), ["hyper number 'm' is declared twice"]),
        (rule(SGD, hyper=("grad_scale",)), ["'grad_scale' is declared twice, or one of"]),
        (rule(SGD, name="my rule"), ["rule name 'my rule' is not allowed"]),
        (rule(SGD, name="a\n#error"), ["rule name"]),
    ],
    ids=lambda value: (value.lines[0][:24] if value.lines else "empty") if isinstance(value, Rule) else "",
)
def test_a_wrong_rule_is_refused_with_its_line_and_reason(made: Rule, parts: list[str]) -> None:
    with pytest.raises(RuleError) as raised:
        program_of(made)
    for part in parts:
        assert part in str(raised.value)


def test_a_rule_may_use_names_that_are_words_of_cpp() -> None:
    made = rule("float = 2 * g", "s = float", "state = s + float", "w -= state")
    text = render("shared/rule.h.j2", rule_facts(Update(made)))
    assert "const V float_ = 2.0f * g;" in text
    assert "const V state_ = s_ + float_;" in text


def test_only_parsed_parts_of_a_rule_reach_the_source() -> None:
    made = rule("w -= lr * g  # */ #error \\")
    assert "error" not in render("shared/rule.h.j2", rule_facts(Update(made)))
