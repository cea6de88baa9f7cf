"""The rules that come with the package. Their numbers are run-time values; the text has only the options in use.

If torch.optim has the rule, the formula is torch's. docs/custom_rules.md lists them with their defaults.
"""

from __future__ import annotations

from typing import Literal

from embforge.codegen.rules.rule import Rule, State

Decay = Literal["none", "l2", "decoupled"]
"""Weight decay: none, added to the gradient ("l2"), or subtracted from the row independently of the rule
("decoupled")."""

CLIP = "g *= where(norm(g) > max_row_norm, max_row_norm / norm(g), 1)"
L2_DECAY = "g += weight_decay * w"
DECOUPLED_DECAY = "w *= 1 - lr * weight_decay"


def with_options(rule: Rule, *, decay: Decay = "none", clipped: bool = False) -> Rule:
    """The rule with its options as lines before it: first the row's gradient is clipped, then weights decay."""
    lines: tuple[str, ...] = ()
    hyper = rule.hyper
    if clipped:
        lines += (CLIP,)
        hyper += ("max_row_norm",)
    if decay != "none":
        lines += (L2_DECAY if decay == "l2" else DECOUPLED_DECAY,)
        hyper += ("weight_decay",)
    return Rule(rule.name, (*lines, *rule.lines), rule.states, hyper)


def sgd() -> Rule:
    return Rule("sgd", ("w -= lr * g",))


def momentum() -> Rule:
    return Rule("momentum", ("m = momentum * m + g", "w -= lr * m"), (State("m"),), ("momentum",))


def nesterov() -> Rule:
    return Rule("nesterov", ("m = momentum * m + g", "w -= lr * (g + momentum * m)"), (State("m"),), ("momentum",))


def adagrad(lr_decay: bool = False) -> Rule:
    lines = ("s += g * g", "w -= lr * g / (sqrt(s) + eps)")
    if not lr_decay:
        return Rule("adagrad", lines, (State("s"),), ("eps",))
    decayed = ("rate = lr / (1 + (t - 1) * lr_decay)", lines[0], lines[1].replace("lr", "rate"))
    return Rule("adagrad", decayed, (State("s"),), ("eps", "lr_decay"))


def rowwise_adagrad() -> Rule:
    lines = ("s += mean(g * g)", "w -= lr * g / (sqrt(s) + eps)")
    return Rule("rowwise_adagrad", lines, (State("s", "row"),), ("eps",))


def adam() -> Rule:
    lines = (
        "m = beta1 * m + (1 - beta1) * g",
        "v = beta2 * v + (1 - beta2) * (g * g)",
        "bias1 = 1 - beta1 ** t",
        "bias2 = 1 - beta2 ** t",
        "w -= lr * (m / bias1) / (sqrt(v / bias2) + eps)",
    )
    return Rule("adam", lines, (State("m"), State("v")), ("beta1", "beta2", "eps"))


def rowwise_adam() -> Rule:
    plain = adam()
    lines = tuple(line.replace("(g * g)", "mean(g * g)") for line in plain.lines)
    return Rule("rowwise_adam", lines, (State("m"), State("v", "row")), plain.hyper)


def rmsprop() -> Rule:
    lines = ("v = alpha * v + (1 - alpha) * (g * g)", "w -= lr * g / (sqrt(v) + eps)")
    return Rule("rmsprop", lines, (State("v"),), ("alpha", "eps"))


def ftrl() -> Rule:
    """McMahan et al. 2013, with its learning rate `lr / (beta + sqrt(n))`. With lr = 0 nothing changes."""
    lines = (
        "squares = n + g * g",
        "z = where(lr > 0, z + (g - (sqrt(squares) - sqrt(n)) / lr * w), z)",
        "n = where(lr > 0, squares, n)",
        "solved = where(abs(z) > l1, (l1 * sign(z) - z) / ((beta + sqrt(n)) / lr + l2), 0)",
        "w = where(lr > 0, solved, w)",
    )
    return Rule("ftrl", lines, (State("z"), State("n")), ("beta", "l1", "l2"))


def lamb(decay: bool = False) -> Rule:
    """You et al. 2020 with the trust ratio of a row. Weight decay is a part of the update whose norm is taken."""
    plain = adam()
    lines = (
        *plain.lines[:4],
        "step = m / bias1 / (sqrt(v / bias2) + eps)" + (" + weight_decay * w" if decay else ""),
        "trust = where(min(norm(w), norm(step)) > 0, norm(w) / norm(step), 1)",
        "w -= lr * trust * step",
    )
    return Rule("lamb", lines, plain.states, (*plain.hyper, *(("weight_decay",) if decay else ())))


def lars(decay: bool = False) -> Rule:
    """You et al. 2017 with the trust ratio of a row."""
    lines = (
        "length = norm(w)",
        "slope = norm(g)",
        f"scale = trust * length / (slope {'+ weight_decay * length ' if decay else ''}+ eps)",
        *((L2_DECAY,) if decay else ()),
        "m = momentum * m + lr * where(min(length, slope) > 0, scale, 1) * g",
        "w -= m",
    )
    hyper = ("momentum", "trust", "eps", *(("weight_decay",) if decay else ()))
    return Rule("lars", lines, (State("m"),), hyper)
