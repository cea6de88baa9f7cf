"""The torch operators: what they are called and take, known to torch as soon as torch is there.

A graph that torch.export or AOTInductor saved needs its operators before it is loaded, so `import embforge` registers
them. That must cost little: schemas are texts here, and what an operator does is imported by its first call.
Importing this module loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple
from warnings import warn

if TYPE_CHECKING:
    import torch

NAMESPACE = "embforge"


class Operator(NamedTuple):
    """An operator before it is loaded."""

    schema: str
    home: str
    """The module whose `IMPLEMENTATIONS` say what it does."""
    has_backward: bool = False

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]


class Implementation(NamedTuple):
    """What an operator does."""

    run: Callable[..., Any]
    """On CPU and CUDA tensors."""
    fake: Callable[..., Any]
    """Shapes and dtypes of its results, for compilers."""
    backward: Callable[..., Any] | None = None
    """As torch.library.register_autograd takes it; only for an operator that says it has one."""
    keep: Callable[..., None] | None = None
    """What a forward keeps for it: torch's `setup_context`."""


LOOKUP = Operator(
    "lookup(Tensor values, Tensor offsets, Tensor? weights, Tensor[] tables, SymInt[]? sequence_rows, "
    "str program, str bounds_check) -> (Tensor pooled, Tensor sequence)",
    "embforge.operators.lookup",
    has_backward=True,
)
"""For results that are not differentiated: its backward is an error. `tables`: `[rows, dim]` in layout order.
`sequence_rows`: ids of each `none` feature; None without such features, because AOTInductor makes None of an empty list
(torch 2.13, `OSSProxyExecutor::call_function`). `program`: see `Program`."""

LOOKUP_TRAIN = Operator(
    "lookup_train(Tensor values, Tensor offsets, Tensor? weights, Tensor[] tables, Tensor[] states, Tensor anchor, "
    "Tensor hyper, Tensor counters, SymInt[] sequence_rows, str forward, str backward, str weight_gradient, "
    "str bounds_check, bool[] trainable) -> (Tensor pooled, Tensor sequence, Tensor divisors, Tensor winners)",
    "embforge.operators.lookup",
    has_backward=True,
)
"""A lookup whose backward updates `tables` and `states`. `tables`: `[rows, stride]`, all memory of each, because
padding may hold states and a copy of rows alone would lose them. `anchor` is what autograd sees of them. `divisors` and
`winners`: what the backward needs of the forward, see codegen/kernel.py. Three programs: `forward` keeps these."""

UPDATE = Operator(
    "update_(Tensor grad_pooled, Tensor grad_sequence, Tensor values, Tensor offsets, Tensor? weights, "
    "Tensor divisors, Tensor winners, Tensor(a!)[] tables, Tensor(b!)[] states, Tensor hyper, Tensor(c!) counters, "
    "str program, str bounds_check, bool[] trainable) -> Tensor",
    "embforge.operators.lookup",
)
"""Rows and states updated from the gradients of a lookup. Returns 0, or infinity where `hyper` has a loss scale and
gradients are not finite: then nothing has changed."""

WEIGHT_GRADIENT = Operator(
    "weight_gradient(Tensor grad_pooled, Tensor grad_sequence, Tensor values, Tensor offsets, Tensor? weights, "
    "Tensor divisors, Tensor winners, Tensor[] tables, str program, str bounds_check) -> Tensor",
    "embforge.operators.lookup",
)
"""The gradient of a lookup's weights, `[ids]`. `tables`: `[rows, stride]`, or `[rows, dim]` as far apart."""

LOOKUP_DENSE = Operator(
    "lookup_dense(Tensor values, Tensor offsets, Tensor? weights, Tensor[] tables, SymInt[]? sequence_rows, "
    "str forward, str reduce, str weight_gradient, str bounds_check) "
    "-> (Tensor pooled, Tensor sequence, Tensor divisors, Tensor winners)",
    "embforge.operators.dense",
    has_backward=True,
)
"""A lookup with dense gradients of `tables`, `[rows, dim]` in layout order, and gradients of `weights`. Results and
programs are those of `lookup_train`; `reduce` adds up the gradients of rows. `sequence_rows`: as of `lookup`."""

DENSE_GRADIENTS = Operator(
    "dense_gradients(Tensor grad_pooled, Tensor grad_sequence, Tensor values, Tensor offsets, Tensor? weights, "
    "Tensor divisors, Tensor winners, str program, str bounds_check, bool[] wanted) -> Tensor[]",
    "embforge.operators.dense",
)
"""The gradients of those tables of a lookup that are wanted, `[rows, dim]` each. Rows are not read, so tables may have
changed since the forward."""

GATHER = Operator(
    "gather(Tensor ids, Tensor weight, int padding_idx) -> Tensor", "embforge.functional", has_backward=True
)
"""Rows of one weight, `[ids, dim]`; zeros for ids that are no row."""

RESOLVE = Operator(
    "resolve(Tensor values, Tensor offsets, Tensor[] remaps, str program) -> Tensor", "embforge.operators.resolve"
)
"""Turns the ids of remapped tables into rows, before a lookup. `remaps`: the row of each id, by table."""

OPERATORS = (RESOLVE, LOOKUP, LOOKUP_TRAIN, UPDATE, WEIGHT_GRADIENT, LOOKUP_DENSE, DENSE_GRADIENTS, GATHER)

_LOCK = Lock()


def register() -> None:
    """Makes torch know the operators, unless it does. Imports torch."""
    import torch  # before the lock: a thread that is importing torch comes here at its end, and would wait for us

    with _LOCK:
        if not hasattr(getattr(torch.ops, NAMESPACE), LOOKUP.name):  # a copy of embforge imported earlier may have
            _library()


def register_or_warn() -> None:
    """As `register`, for an import of torch, which must not fail because of embforge."""
    try:
        register()
    except Exception as error:
        warn(
            f"embforge's operators are not registered with torch: {error!r}; torch works without them, modules and "
            "saved programs of embforge do not; install a torch that this embforge supports",
            stacklevel=2,
        )


@cache
def _library() -> torch.library.Library:
    """Cached to keep it alive: torch drops a library's operators with it."""
    import torch

    library = torch.library.Library(NAMESPACE, "DEF")
    for operator in OPERATORS:
        library.define(operator.schema)
        for key in ("CPU", "CUDA"):
            library.impl(operator.name, _late(operator, "run"), key)
        name = f"{NAMESPACE}::{operator.name}"
        torch.library.register_fake(name, _late(operator, "fake"), lib=library)
        if operator.has_backward:
            backward, keep = _late(operator, "backward"), _late(operator, "keep")
            torch.library.register_autograd(name, backward, setup_context=keep, lib=library)
    return library


def _late(operator: Operator, part: str) -> Callable[..., Any]:
    """A part of the operator's implementation, imported when it is first called."""

    @cache
    def loaded() -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(import_module(operator.home).IMPLEMENTATIONS[operator.name], part)
        return found

    def call(*arguments: Any, **named: Any) -> Any:
        return loaded()(*arguments, **named)

    return call
