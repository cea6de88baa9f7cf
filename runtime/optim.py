"""`ef.optim`: optimizers that are fused into the backward pass, such as `ef.optim.Adam(lr=1e-3)`, and `custom`, which
makes new ones.

An optimizer is a value: a rule and its numbers. It has no state and belongs to no module, and changing a number never
compiles anything. If torch.optim has a rule, its names and defaults are used.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, cast, get_args

from embforge.codegen.errors import RuleError
from embforge.codegen.reading.suggestions import did_you_mean, listed
from embforge.codegen.rules import builtin
from embforge.codegen.rules.language import program_of
from embforge.codegen.rules.rule import Extent, Rounding, Rule, State, Update

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "Adagrad",
    "Adam",
    "Custom",
    "CustomRule",
    "Ftrl",
    "Momentum",
    "Nesterov",
    "Optimizer",
    "RMSProp",
    "RowwiseAdagrad",
    "RowwiseAdam",
    "custom",
]

TORCH_NAMES = {"AdamW": "Adam(decoupled=True, weight_decay=...)", "SparseAdam": "Adam", "RMSprop": "RMSProp"}
"""For optimizers of torch.optim that have another name here: how to write them."""


def __getattr__(name: str) -> Any:
    """Raises AttributeError. Python calls it for names that this module does not have."""
    if name in TORCH_NAMES:
        raise AttributeError(f"embforge.optim has no {name}; write ef.optim.{TORCH_NAMES[name]}")
    known = [each for each in __all__ if each[0].isupper()]
    raise AttributeError(f"embforge.optim has no {name!r}{did_you_mean(name, known)}; it has: {listed(known)}")


OPTIONS = ("lr", "weight_decay", "decoupled", "max_row_norm", "rounding")
"""The arguments that every optimizer has."""


@dataclass(frozen=True)
class Optimizer(ABC):
    """The base class of all optimizers, with the arguments that all of them have.

    `lr` may be a tensor of one element. `weight_decay` times the row is added to the gradient, or with `decoupled`
    subtracted from the row as in AdamW. `max_row_norm` limits the norm of each row's gradient. `rounding` says how new
    rows are rounded to number formats of less than 32 bits.
    """

    lr: float | Tensor = 1e-3
    _: KW_ONLY
    weight_decay: float = 0.0
    decoupled: bool = False
    max_row_norm: float | None = None
    rounding: Rounding = "stochastic"

    def __post_init__(self) -> None:
        self.check("lr", self.lr)
        self.check("weight_decay", self.weight_decay)
        if self.max_row_norm is not None:
            self.check("max_row_norm", self.max_row_norm)
        if self.rounding not in get_args(Rounding):
            allowed = ", ".join(map(repr, get_args(Rounding)))
            raise RuleError(f"{self._name}: rounding={self.rounding!r} is not allowed; allowed: {allowed}")
        for name, value in self._numbers().items():
            self.check(name, value)

    def check(self, name: str, value: Any) -> None:
        """Raises RuleError if a number of this optimizer cannot have this value, now or during training."""
        if name == "lr" and not isinstance(value, Real):
            if not hasattr(value, "numel") or value.numel() != 1 or not value.is_floating_point():
                raise RuleError(
                    f"{self._name}: lr={value!r} is not allowed; a number, or a floating point tensor of one element"
                )
            if value.device.type != "cpu":  # reading it would wait for the device
                return
            value = float(value.detach())
        below = 1.0 if name in _FRACTIONS else math.inf
        self._check(name, value, below=below, above=name == "max_row_norm")

    @property
    def update(self) -> Update:
        """What a backward does with gradients: the rule with the options that are in use, and the rounding."""
        decay: builtin.Decay = "none" if not self.weight_decay else "decoupled" if self.decoupled else "l2"
        clipped = self.max_row_norm is not None
        return Update(builtin.with_options(self._rule(), decay=decay, clipped=clipped), self.rounding)

    @property
    def hyper_values(self) -> tuple[float, ...]:
        """The values of the rule's numbers, in the order of `update.rule.hyper`."""
        options = {"weight_decay": self.weight_decay, "max_row_norm": self.max_row_norm}
        numbers: dict[str, Any] = {**options, **self._numbers()}
        return tuple(float(numbers[name]) for name in self.update.rule.hyper)

    @property
    def initial_states(self) -> dict[str, float]:
        """The value of each state before the first update, by name."""
        return {state.name: 0.0 for state in self._rule().states} | self._initial()

    @abstractmethod
    def _rule(self) -> Rule:
        """The rule without the options."""

    def _numbers(self) -> dict[str, float]:
        """The values of the numbers that only this rule has, by name."""
        return {}

    def _initial(self) -> dict[str, float]:
        """The values of states that do not start at zero, by name."""
        return {}

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _check(self, name: str, value: float, *, below: float = math.inf, above: bool = False) -> None:
        fits = _is_number(value) and 0 <= value < below and not (above and value == 0)
        if not fits:
            limit = f" < {below:g}" if math.isfinite(below) else ", a finite number"
            raise RuleError(f"{self._name}: {name}={value!r} is not allowed; 0 <{'' if above else '='} {name}{limit}")


_FRACTIONS = ("beta1", "beta2", "alpha", "momentum")
"""Numbers that say which share of a running mean is kept. They must be smaller than 1."""


def _moments(optimizer: Optimizer, betas: Any, eps: float) -> dict[str, float]:
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        name = type(optimizer).__name__
        raise RuleError(f"{name}: betas={betas!r} is not allowed; two numbers, such as (0.9, 0.999)")
    return {"beta1": betas[0], "beta2": betas[1], "eps": eps}


@dataclass(frozen=True)
class SGD(Optimizer):
    """`w -= lr * g`."""

    def _rule(self) -> Rule:
        return builtin.sgd()


@dataclass(frozen=True)
class Momentum(Optimizer):
    """torch.optim.SGD with momentum, without dampening."""

    momentum: float = 0.9

    def _rule(self) -> Rule:
        return builtin.momentum()

    def _numbers(self) -> dict[str, float]:
        return {"momentum": self.momentum}


@dataclass(frozen=True)
class Nesterov(Momentum):
    """torch.optim.SGD with momentum and nesterov=True."""

    def _rule(self) -> Rule:
        return builtin.nesterov()


@dataclass(frozen=True)
class RowwiseAdagrad(Optimizer):
    """Adagrad with one accumulator per row: the mean of the squared gradient."""

    lr: float | Tensor = 1e-2
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("initial_accumulator_value", self.initial_accumulator_value)

    def _rule(self) -> Rule:
        return builtin.rowwise_adagrad()

    def _numbers(self) -> dict[str, float]:
        return {"eps": self.eps}

    def _initial(self) -> dict[str, float]:
        return {"s": float(self.initial_accumulator_value)}


@dataclass(frozen=True)
class Adagrad(RowwiseAdagrad):
    """torch.optim.Adagrad."""

    lr_decay: float = 0.0

    def _rule(self) -> Rule:
        return builtin.adagrad(lr_decay=self.lr_decay != 0)

    def _numbers(self) -> dict[str, float]:
        return {"eps": self.eps, "lr_decay": self.lr_decay}


@dataclass(frozen=True)
class Adam(Optimizer):
    """torch.optim.Adam for the rows that occur, as torch.optim.SparseAdam does; with `decoupled` decay it is AdamW."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def _rule(self) -> Rule:
        return builtin.adam()

    def _numbers(self) -> dict[str, float]:
        return _moments(self, self.betas, self.eps)


@dataclass(frozen=True)
class RowwiseAdam(Adam):
    """Adam with one second moment per row: that of the mean of the squared gradient."""

    def _rule(self) -> Rule:
        return builtin.rowwise_adam()


@dataclass(frozen=True)
class RMSProp(Optimizer):
    """torch.optim.RMSprop without centering and without momentum."""

    lr: float | Tensor = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8

    def _rule(self) -> Rule:
        return builtin.rmsprop()

    def _numbers(self) -> dict[str, float]:
        return {"alpha": self.alpha, "eps": self.eps}


@dataclass(frozen=True)
class Ftrl(Optimizer):
    """FTRL-Proximal (McMahan et al. 2013). It computes rows from its states, so that their first values soon lose their
    influence."""

    beta: float = 0.0
    l1: float = 0.0
    l2: float = 0.0
    initial_accumulator_value: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("initial_accumulator_value", self.initial_accumulator_value)
        if not hasattr(self.lr, "numel"):
            self._check("lr", self.lr, above=True)  # the rule divides by lr; a schedule may set it to 0: no row changes

    def _rule(self) -> Rule:
        return builtin.ftrl()

    def _numbers(self) -> dict[str, float]:
        return {"beta": self.beta, "l1": self.l1, "l2": self.l2}

    def _initial(self) -> dict[str, float]:
        return {"n": float(self.initial_accumulator_value)}


@dataclass(frozen=True)
class _WithOwnDecay(Optimizer):
    """The base class of optimizers whose formula contains weight decay."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decoupled:
            raise RuleError(f"{self._name}: decoupled=True is not allowed; its own formula has weight decay")

    @property
    def update(self) -> Update:
        return Update(builtin.with_options(self._rule(), clipped=self.max_row_norm is not None), self.rounding)


@dataclass(frozen=True)
class LAMB(_WithOwnDecay):
    """Adam with one trust ratio per row (You et al. 2020)."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6

    def _rule(self) -> Rule:
        return builtin.lamb(decay=self.weight_decay != 0)

    def _numbers(self) -> dict[str, float]:
        return _moments(self, self.betas, self.eps)


@dataclass(frozen=True)
class LARS(_WithOwnDecay):
    """Momentum with one trust ratio per row (You et al. 2017)."""

    momentum: float = 0.9
    trust_coefficient: float = 1e-3
    eps: float = 1e-8

    def _rule(self) -> Rule:
        return builtin.lars(decay=self.weight_decay != 0)

    def _numbers(self) -> dict[str, float]:
        return {"momentum": self.momentum, "trust": self.trust_coefficient, "eps": self.eps}


# ---- Rules of users -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CustomRule:
    """A user's rule, which `custom` returns. Call it with a learning rate, and with other numbers of the rule, to make
    an optimizer."""

    rule: Rule
    defaults: tuple[tuple[str, float], ...]
    initial: tuple[tuple[str, float], ...]

    def __call__(
        self,
        lr: float | Tensor = 1e-3,
        *,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        max_row_norm: float | None = None,
        rounding: Rounding = "stochastic",
        **hyper: float,
    ) -> Custom:
        known = dict(self.defaults)
        for name in hyper:
            if name not in known:
                allowed = ", ".join((*OPTIONS, *known))
                raise RuleError(f"rule {self.rule.name!r} has no number {name!r}; allowed: {allowed}")
        return Custom(
            lr,
            definition=self,
            numbers=tuple((known | hyper).items()),
            weight_decay=weight_decay,
            decoupled=decoupled,
            max_row_norm=max_row_norm,
            rounding=rounding,
        )


@dataclass(frozen=True)
class Custom(Optimizer):
    """An optimizer with a user's rule."""

    _: KW_ONLY
    definition: CustomRule
    numbers: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        program_of(self.update.rule)  # raises RuleError if an option cannot be combined with the rule

    @property
    def _name(self) -> str:
        return self.definition.rule.name

    def _rule(self) -> Rule:
        return self.definition.rule

    def _numbers(self) -> dict[str, float]:
        return dict(self.numbers)

    def _initial(self) -> dict[str, float]:
        return dict(self.definition.initial)

    def _check(self, name: str, value: float, *, below: float = math.inf, above: bool = False) -> None:
        if name in dict(self.numbers):  # only the author of a rule knows which of its numbers make sense
            _finite(self._name, name, value)
        else:
            super()._check(name, value, below=below, above=above)


def custom(
    name: str,
    state: Mapping[str, str],
    rule: str,
    hyper: Mapping[str, float] | None = None,
    initial: Mapping[str, float] | None = None,
) -> CustomRule:
    """Makes an optimizer from a few lines of the rule language (docs/custom_rules.md).

    `state`: for each state, whether there is one per "row" or per "element". `hyper`: the rule's numbers and their
    defaults. `initial`: the values of states that do not start at 0. The rule is checked here and never executed:
    `RuleError` names the line, what is wrong with it and what is allowed.

        Signum = ef.optim.custom(
            "signum",
            state={"m": "element"},
            rule="m = beta * m + (1 - beta) * g\\nw -= lr * sign(m)",
            hyper={"beta": 0.9},
        )
        module = ef.EmbeddingCollection(spec, optimizer=Signum(lr=0.01))
    """
    for argument, value, kind, allowed in (
        ("name", name, str, "a text"),
        ("state", state, Mapping, 'a dict, such as {"m": "element"}'),
        ("rule", rule, str, "a text of one or more lines"),
        ("hyper", hyper or {}, Mapping, 'a dict, such as {"beta": 0.9}'),
        ("initial", initial or {}, Mapping, 'a dict, such as {"m": 0.1}'),
    ):
        if not isinstance(value, kind):
            raise RuleError(f"rule {name!r}: {argument}={value!r} is not allowed; allowed: {allowed}")
    lines = tuple(line.strip() for line in rule.splitlines() if line.strip() and not line.strip().startswith("#"))
    states = tuple(State(key, cast(Extent, extent)) for key, extent in state.items())
    defaults, start = dict(hyper or {}), dict(initial or {})
    for key in start:
        if key not in state:
            raise RuleError(
                f"rule {name!r}: initial value of {key!r}, which is no state; its states: {', '.join(state) or 'none'}"
            )
    for key, number in (defaults | start).items():
        _finite(name, key, number)
    made = Rule(name, lines, states, tuple(defaults))
    for key in defaults:
        if key in _RESERVED or key.startswith(_OF_SCHEDULERS):
            raise RuleError(
                f"rule {name!r}: a number cannot be called {key!r}, which torch uses itself; choose another name"
            )
    for key in (*state, *defaults, *(step.name for step in program_of(made).steps)):
        if key in OPTIONS:
            raise RuleError(f"rule {name!r}: {key!r} is an option that every rule has; choose another name")
    return CustomRule(
        made,
        tuple((key, float(number)) for key, number in defaults.items()),
        tuple((key, float(number)) for key, number in start.items()),
    )


_RESERVED = (
    "self",
    "params",
    "name",
    "tables",
    "betas",
    "max_lr",
    "min_lr",
    "base_lr",
    "max_momentum",
    "base_momentum",
)
_OF_SCHEDULERS = ("initial_", "swa_")
"""Prefixes of the names of entries that schedulers add to `module.optimizer.param_groups[0]`."""


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)  # Real includes numbers of numpy


def _finite(rule: str, name: str, value: float) -> None:
    if not _is_number(value) or not math.isfinite(value):
        raise RuleError(f"rule {rule!r}: {name}={value!r} is not allowed; a finite number")
