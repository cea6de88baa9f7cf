"""The built-in rules against torch.optim, or against their papers' formulas if torch does not have them."""

from __future__ import annotations

import ast
import copy
import dataclasses
import math
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import embforge as ef
from embforge import optim
from embforge.codegen.errors import RuleError
from embforge.codegen.rules.language import program_of
from embforge.codegen.rules.rule import Update
from embforge.launch.reference.rules import apply_rule

STEPS = 6
ROWS, DIM = 5, 7

Signum = optim.custom(
    "signum",
    state={"m": "element"},
    rule="""
        m = beta * m + (1 - beta) * g  # a running mean
        w -= lr * sign(m)
    """,
    hyper={"beta": 0.9},
)


def gradients(dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    random = torch.Generator().manual_seed(4)
    w = torch.randn(ROWS, DIM, generator=random, dtype=torch.float64)
    return w.to(dtype), [torch.randn(ROWS, DIM, generator=random, dtype=torch.float64).to(dtype) for _ in range(STEPS)]


def trained(optimizer: optim.Optimizer, dtype: torch.dtype) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Rows and states after each step."""
    w, items = gradients(dtype)
    update = optimizer.update
    states = {
        state.name: torch.full((ROWS, DIM) if state.extent == "element" else (ROWS,), start, dtype=dtype)
        for state, start in zip(update.rule.states, optimizer.initial_states.values(), strict=True)
    }
    for step, g in enumerate(items):
        hyper = (float(optimizer.lr), 0.0, *optimizer.hyper_values)
        w, states = apply_rule(update, hyper, step + 1, g, w, states, dtype)
        yield w, states


Made = Callable[[list[Tensor]], torch.optim.Optimizer]
T = torch.optim


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (optim.SGD(), lambda p: T.SGD(p)),
        (optim.SGD(0.1, weight_decay=0.3), lambda p: T.SGD(p, 0.1, weight_decay=0.3)),
        (optim.Momentum(0.1), lambda p: T.SGD(p, 0.1, momentum=0.9)),
        (optim.Momentum(0.1, 0.5, weight_decay=0.1), lambda p: T.SGD(p, 0.1, momentum=0.5, weight_decay=0.1)),
        (optim.Nesterov(0.1), lambda p: T.SGD(p, 0.1, momentum=0.9, nesterov=True)),
        (optim.Adagrad(), lambda p: T.Adagrad(p)),
        (
            optim.Adagrad(0.1, lr_decay=0.2, initial_accumulator_value=0.5, weight_decay=0.1),
            lambda p: T.Adagrad(p, 0.1, lr_decay=0.2, initial_accumulator_value=0.5, weight_decay=0.1),
        ),
        (optim.Adam(), lambda p: T.Adam(p)),
        (
            optim.Adam(0.1, (0.8, 0.95), 1e-3, weight_decay=0.2),
            lambda p: T.Adam(p, 0.1, (0.8, 0.95), 1e-3, weight_decay=0.2),
        ),
        (optim.Adam(0.01, weight_decay=0.2, decoupled=True), lambda p: T.AdamW(p, 0.01, weight_decay=0.2)),
        (optim.RMSProp(), lambda p: T.RMSprop(p)),
        (optim.RMSProp(0.1, 0.9, 1e-4, weight_decay=0.1), lambda p: T.RMSprop(p, 0.1, 0.9, 1e-4, weight_decay=0.1)),
    ],
)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_rules_equal_torchs_optimizers(ours: optim.Optimizer, theirs: Made, dtype: torch.dtype, rtol: float) -> None:
    w, items = gradients(dtype)
    parameter = torch.nn.Parameter(w.clone())
    optimizer = theirs([parameter])
    for g, (rows, _) in zip(items, trained(ours, dtype), strict=True):
        parameter.grad = g.clone()
        optimizer.step()
        torch.testing.assert_close(rows, parameter.data, rtol=rtol, atol=rtol)


def test_adam_equals_sparse_adam_to_its_eps() -> None:
    """SparseAdam scales eps with the bias correction; Adam does not."""
    w, items = gradients(torch.float64)
    parameter = torch.nn.Parameter(w.clone())
    optimizer = torch.optim.SparseAdam([parameter], lr=1e-3)
    for g, (rows, _) in zip(items, trained(optim.Adam(), torch.float64), strict=True):
        parameter.grad = g.to_sparse(1)
        optimizer.step()
        torch.testing.assert_close(rows, parameter.data, rtol=1e-6, atol=1e-6)


# ---- Rules that torch does not have: the formula on one number at a time -----------------------------


def length(row: list[float]) -> float:
    return math.sqrt(sum(x * x for x in row))


def rowwise_adagrad(w: list[float], g: list[float], state: dict[str, Any], t: int) -> list[float]:
    state["s"] = state.get("s", 0.0) + sum(x * x for x in g) / len(g)
    return [a - 0.1 * b / (math.sqrt(state["s"]) + 1e-10) for a, b in zip(w, g, strict=True)]


def rowwise_adam(w: list[float], g: list[float], state: dict[str, Any], t: int) -> list[float]:
    state["m"] = [0.9 * m + 0.1 * b for m, b in zip(state.get("m", [0.0] * DIM), g, strict=True)]
    state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * sum(x * x for x in g) / len(g)
    root = math.sqrt(state["v"] / (1 - 0.999**t)) + 1e-8
    return [a - 0.1 * m / (1 - 0.9**t) / root for a, m in zip(w, state["m"], strict=True)]


def ftrl(w: list[float], g: list[float], state: dict[str, Any], t: int) -> list[float]:
    z, n = state.get("z", [0.0] * DIM), state.get("n", [0.1] * DIM)
    new = []
    for i in range(DIM):
        sigma = (math.sqrt(n[i] + g[i] ** 2) - math.sqrt(n[i])) / 0.1
        z = [*z[:i], z[i] + g[i] - sigma * w[i], *z[i + 1 :]]
        n = [*n[:i], n[i] + g[i] ** 2, *n[i + 1 :]]
        if abs(z[i]) <= 0.4:
            new.append(0.0)
        else:
            new.append(-(z[i] - math.copysign(0.4, z[i])) / ((1.0 + math.sqrt(n[i])) / 0.1 + 0.3))
    state.update(z=z, n=n)
    return new


def lamb(w: list[float], g: list[float], state: dict[str, Any], t: int) -> list[float]:
    state["m"] = [0.9 * m + 0.1 * b for m, b in zip(state.get("m", [0.0] * DIM), g, strict=True)]
    state["v"] = [0.999 * v + 0.001 * b * b for v, b in zip(state.get("v", [0.0] * DIM), g, strict=True)]
    step = [
        m / (1 - 0.9**t) / (math.sqrt(v / (1 - 0.999**t)) + 1e-6) + 0.2 * a
        for m, v, a in zip(state["m"], state["v"], w, strict=True)
    ]
    ratio = length(w) / length(step) if length(w) > 0 and length(step) > 0 else 1.0
    return [a - 0.1 * ratio * u for a, u in zip(w, step, strict=True)]


def lars(w: list[float], g: list[float], state: dict[str, Any], t: int) -> list[float]:
    ratio = 0.001 * length(w) / (length(g) + 0.2 * length(w) + 1e-8) if length(w) > 0 and length(g) > 0 else 1.0
    old = state.get("m", [0.0] * DIM)
    state["m"] = [0.9 * m + 0.5 * ratio * (b + 0.2 * a) for m, a, b in zip(old, w, g, strict=True)]
    return [a - m for a, m in zip(w, state["m"], strict=True)]


@pytest.mark.parametrize(
    ("ours", "formula"),
    [
        (optim.RowwiseAdagrad(0.1), rowwise_adagrad),
        (optim.RowwiseAdam(0.1), rowwise_adam),
        (optim.Ftrl(0.1, beta=1.0, l1=0.4, l2=0.3), ftrl),
        (optim.LAMB(0.1, weight_decay=0.2), lamb),
        (optim.LARS(0.5, weight_decay=0.2), lars),
    ],
)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_rules_equal_their_formulas(ours: optim.Optimizer, formula: Any, dtype: torch.dtype, rtol: float) -> None:
    w, items = gradients(torch.float64)
    rows, memory = w.tolist(), [{} for _ in range(ROWS)]  # type: list[list[float]], list[dict[str, Any]]
    for step, (g, (got, _)) in enumerate(zip(items, trained(ours, dtype), strict=True)):
        rows = [formula(rows[i], g[i].tolist(), memory[i], step + 1) for i in range(ROWS)]
        torch.testing.assert_close(got.double(), torch.tensor(rows, dtype=torch.float64), rtol=rtol, atol=rtol)


def test_a_trust_ratio_without_norms_is_one() -> None:
    zeros = torch.zeros(1, 3)
    g = torch.tensor([[3.0, 0.0, 4.0]])
    hyper = (1.0, 0.0, *optim.LARS().hyper_values)
    assert apply_rule(optim.LARS(1.0).update, hyper, 1, g, zeros, {"m": zeros})[0].tolist() == [[-3.0, 0.0, -4.0]]
    for optimizer in (optim.LARS(1.0), optim.LAMB(1.0)):
        states = dict.fromkeys(optimizer.initial_states, zeros)
        hyper = (1.0, 0.0, *optimizer.hyper_values)
        assert apply_rule(optimizer.update, hyper, 1, zeros, g, states)[0].tolist() == g.tolist()


def test_ftrl_waits_while_lr_is_zero() -> None:
    w, g = torch.tensor([[0.5, -0.0, 2.0]]), torch.tensor([[1.0, 0.0, -3.0]])
    states = {"z": torch.tensor([[-0.0, 1.0, 2.0]]), "n": torch.full((1, 3), 0.1)}
    new, found = apply_rule(optim.Ftrl().update, (0.0, 0.0, *optim.Ftrl().hyper_values), 1, g, w, states)
    for have, want in ((new, w), (found["z"], states["z"]), (found["n"], states["n"])):
        assert torch.equal(have.view(torch.int32), want.view(torch.int32))


def test_row_norms_are_clipped_before_weights_decay() -> None:
    g, w = torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.ones(2, 2)
    optimizer = optim.SGD(1.0, weight_decay=0.5, max_row_norm=1.0)
    hyper = (1.0, 0.0, *optimizer.hyper_values)
    new = apply_rule(optimizer.update, hyper, 1, g, w, {})[0]
    torch.testing.assert_close(new, torch.tensor([[1 - 0.6 - 0.5, 1 - 0.8 - 0.5], [1 - 0.3 - 0.5, 1 - 0.4 - 0.5]]))


# ---- Optimizers as values -----------------------------------------------------------------------------

ALL = [
    optim.SGD(),
    optim.Momentum(),
    optim.Nesterov(),
    optim.Adagrad(),
    optim.RowwiseAdagrad(),
    optim.Adam(),
    optim.RowwiseAdam(),
    optim.RMSProp(),
    optim.Ftrl(),
    optim.LAMB(),
    optim.LARS(),
]


@pytest.mark.parametrize("optimizer", [*ALL, Signum(lr=0.01, beta=0.95)], ids=lambda o: o.update.rule.name)
def test_optimizers_are_values(optimizer: optim.Optimizer) -> None:
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert copied == optimizer
        assert copied.update == optimizer.update
        assert copied.hyper_values == optimizer.hyper_values
    assert Update.from_dict(optimizer.update.to_dict()) == optimizer.update
    assert len(optimizer.hyper_values) == len(optimizer.update.rule.hyper)
    assert list(optimizer.initial_states) == [state.name for state in optimizer.update.rule.states]
    program_of(optimizer.update.rule)
    with pytest.raises(AttributeError):
        optimizer.lr = 2.0  # type: ignore[misc]


@pytest.mark.parametrize("optimizer", ALL, ids=lambda o: o.update.rule.name)
def test_options_are_in_the_rule_only_when_used(optimizer: optim.Optimizer) -> None:
    kind = type(optimizer)
    used = kind(weight_decay=0.125, max_row_norm=0.5)
    assert "weight_decay" not in optimizer.update.rule.hyper
    assert "max_row_norm" not in optimizer.update.rule.hyper
    numbers = dict(zip(used.update.rule.hyper, used.hyper_values, strict=True))
    assert (numbers["weight_decay"], numbers["max_row_norm"]) == (0.125, 0.5)
    assert used.update == kind(lr=7.0, weight_decay=0.25, max_row_norm=2.0).update  # numbers never change the code
    if kind not in (optim.LAMB, optim.LARS):
        assert kind(weight_decay=0.125, decoupled=True).update.rule.lines[0] == "w *= 1 - lr * weight_decay"


def test_a_users_rule_trains() -> None:
    signum = Signum(lr=0.01, beta=0.95, weight_decay=0.1, rounding="nearest")
    assert signum.hyper_values == (0.95, 0.1)
    assert signum.update.rounding == "nearest"
    assert Signum().hyper_values == (0.9,)
    started = ef.optim.custom("a", {"s": "row"}, "s += mean(g * g)\nw -= lr * g / sqrt(s)", initial={"s": 0.5})
    assert started().initial_states == {"s": 0.5}
    rate = torch.tensor([0.25])
    assert Signum(lr=rate).lr is rate


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: optim.SGD(-0.1), ["SGD: lr=-0.1 is not allowed", "0 <= lr"]),
        (lambda: optim.SGD(float("nan")), ["lr=nan"]),
        (lambda: optim.SGD("fast"), ["lr='fast' is not allowed", "tensor of one element"]),
        (lambda: optim.SGD(torch.ones(2)), ["tensor of one element"]),
        (lambda: optim.SGD(weight_decay=-1), ["weight_decay=-1 is not allowed"]),
        (lambda: optim.SGD(max_row_norm=0.0), ["max_row_norm=0.0 is not allowed; 0 < max_row_norm"]),
        (lambda: optim.SGD(rounding="up"), ["rounding='up'", "'stochastic', 'nearest'"]),
        (lambda: optim.Momentum(momentum=1.0), ["Momentum: momentum=1.0", "0 <= momentum < 1"]),
        (lambda: optim.Adam(betas=(0.9, 1.5)), ["Adam: beta2=1.5", "0 <= beta2 < 1"]),
        (lambda: optim.Adam(betas=0.9), ["betas=0.9", "two numbers"]),
        (lambda: optim.Adam(eps=-1.0), ["eps=-1.0"]),
        (lambda: optim.Ftrl(lr=0.0), ["Ftrl: lr=0.0", "0 < lr"]),
        (lambda: optim.Adagrad(initial_accumulator_value=-1.0), ["initial_accumulator_value=-1.0"]),
        (lambda: optim.LAMB(decoupled=True), ["LAMB: decoupled=True"]),
        (lambda: Signum(betta=1.0), ["rule 'signum' has no number 'betta'", "rounding, beta"]),
        (lambda: Signum(beta=math.inf), ["beta=inf", "finite"]),
        (lambda: Signum(lr=-1.0), ["signum: lr=-1.0"]),
        (lambda: optim.custom("a", {}, "w -= exp(g)"), ["rule 'a', line 1 'w -= exp(g)'", "same bits"]),
        (lambda: optim.custom("a", {}, "w -= lr * eps", hyper={"lr": 1.0}), ["'lr' is declared twice"]),
        (lambda: optim.custom("a", {}, "w -= weight_decay", hyper={"weight_decay": 1.0}), ["every rule has"]),
        (lambda: optim.custom("a", {}, "max_row_norm = 1\nw -= max_row_norm"), ["every rule has"]),
        (lambda: optim.custom("a", {}, "w -= lr * g", initial={"s": 1.0}), ["'s', which is no state"]),
        (lambda: optim.custom("a", {}, "w -= b * g", hyper={"b": "x"}), ["b='x'", "finite number"]),
        (lambda: optim.custom("a", ["m"], "w -= lr * g"), ["state=['m'] is not allowed", "a dict"]),  # type: ignore[arg-type]
        (lambda: optim.custom("a", {"m": 3}, "m = g\nw -= m"), ["state 'm' is per 3"]),  # type: ignore[dict-item]
        (lambda: optim.custom("a", {3: "row"}, "w -= g"), ["state 3 is not a name"]),  # type: ignore[dict-item]
        (lambda: optim.custom("a", {}, ["w -= lr * g"]), ["rule=['w -= lr * g'] is not allowed", "a text"]),  # type: ignore[arg-type]
        (lambda: optim.custom("a", {}, "w -= lr * g", hyper=["b"]), ["hyper=['b'] is not allowed"]),  # type: ignore[arg-type]
        *(
            (lambda name=name: optim.custom("a", {}, f"w -= {name} * g", hyper={name: 1.0}), [repr(name)])
            for name in ("params", "self", "betas", "initial_lr", "grad_scale", "lr")
        ),
        (lambda: optim.custom("a", {}, "w = lr")(max_row_norm=1.0), ["'max_row_norm' changes neither"]),
    ],
)
def test_wrong_numbers_of_optimizers_are_refused(make: Callable[[], object], parts: list[str]) -> None:
    with pytest.raises(RuleError) as raised:
        make()
    for part in parts:
        assert part in str(raised.value)


def test_optim_is_lazy_and_needs_no_torch() -> None:
    code = "import sys, embforge as ef; ef.optim.Adam(); assert 'optim' in dir(ef); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- The page about it --------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "custom_rules.md"


def test_the_page_is_right() -> None:
    """The page's Python runs, up to the block that fails on purpose, whose message the page quotes."""
    text = PAGE.read_text()
    *good, bad = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec("".join(good), names)
    assert names["optimizer"].hyper_values == (0.95, 1e-4)
    with pytest.raises(RuleError) as raised:
        exec(bad, names)
    quoted = text.split("```text\n")[1].split("```")[0]
    assert " ".join(quoted.split()) == f"embforge.codegen.errors.RuleError: {raised.value}"


def test_the_page_has_every_rule() -> None:
    """The page has each line of each built-in rule, with weight decay if it is in the formula, and each default."""
    text = PAGE.read_text()
    for optimizer in ALL:
        name = type(optimizer).__name__
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        has_decay = isinstance(optimizer, optim.LAMB | optim.LARS)
        lines = type(optimizer)(weight_decay=1.0).update.rule.lines if has_decay else optimizer.update.rule.lines
        as_adam = () if name == "Adam" else optim.Adam().update.rule.lines
        for line in lines:
            assert f"`{line}`" in row or line in as_adam, (name, line)
        for field in dataclasses.fields(optimizer):
            if field.name not in ("weight_decay", "decoupled", "max_row_norm", "rounding") and name != "RowwiseAdam":
                value = re.search(rf"{field.name}=(\([^)]*\)|[^ ,|]+)", row)
                assert value is not None, (name, field.name)
                assert ast.literal_eval(value[1]) == field.default, (name, field.name)


def test_names_of_torch_optim_are_translated() -> None:
    with pytest.raises(AttributeError, match=r"no AdamW; write ef.optim.Adam\(decoupled=True"):
        optim.AdamW  # noqa: B018
    with pytest.raises(AttributeError, match=r"no 'Adagrd' \(did you mean 'Adagrad'\?\); it has: LAMB, LARS, SGD"):
        optim.Adagrd  # noqa: B018
