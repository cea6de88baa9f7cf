"""The schemas of the torch operators, and their registration as soon as torch is imported.

A graph that torch.export or AOTInductor has saved needs its operators before it is loaded, so `import embforge`
registers them. That must be cheap: schemas are texts, and the implementation of an operator is imported by its first
call. Importing this module does not import torch.
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
    """An operator whose implementation has not been imported yet."""

    schema: str
    home: str
    """The module whose `IMPLEMENTATIONS` have the operator."""
    has_backward: bool = False

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]


class Implementation(NamedTuple):
    """The functions of an operator."""

    run: Callable[..., Any]
    """Computes the results, on CPU and CUDA tensors."""
    fake: Callable[..., Any]
    """Makes results without numbers, only shapes and dtypes, for compilers."""
    backward: Callable[..., Any] | None = None
    """The backward that torch.library.register_autograd takes. Only an operator with `has_backward` has one."""
    keep: Callable[..., None] | None = None
    """Keeps what the backward needs: the `setup_context` that torch.library.register_autograd takes."""


LOOKUP = Operator(
    "lookup(Tensor values, Tensor offsets, Tensor? weights, Tensor[] tables, SymInt[]? sequence_rows, "
    "str program, str bounds_check) -> (Tensor pooled, Tensor sequence)",
    "embforge.operators.lookup",
    has_backward=True,
)
"""A lookup whose results are not differentiated: its backward raises an error. `tables`: `[rows, dim]`, in layout
order. `sequence_rows`: the number of ids of each `none` feature; None without such features, because AOTInductor turns
an empty list into None (torch 2.13, `OSSProxyExecutor::call_function`). `program`: see `Program`."""

LOOKUP_TRAIN = Operator(
    "lookup_train(Tensor values, Tensor offsets, Tensor? weights, Tensor[] tables, Tensor[] states, Tensor anchor, "
    "Tensor hyper, Tensor counters, SymInt[] sequence_rows, str forward, str backward, str weight_gradient, "
    "str bounds_check, bool[] trainable) -> (Tensor pooled, Tensor sequence, Tensor divisors, Tensor winners)",
    "embforge.operators.lookup",
    has_backward=True,
)
"""A lookup whose backward updates `tables` and `states`. `tables`: `[rows, stride]`, the whole memory of each, because
the padding may hold states, which a copy of only the rows would lose. `anchor` represents the tables in autograd.
`divisors` and `winners`: what the backward needs of the forward, see codegen/kernel.py; the program `forward` returns
them."""

UPDATE = Operator(
    "update_(Tensor grad_pooled, Tensor grad_sequence, Tensor values, Tensor offsets, Tensor? weights, "
    "Tensor divisors, Tensor winners, Tensor(a!)[] tables, Tensor(b!)[] states, Tensor hyper, Tensor(c!) counters, "
    "str program, str bounds_check, bool[] trainable) -> Tensor",
    "embforge.operators.lookup",
)
"""Updates rows and states from the gradients of a lookup. Returns 0, or infinity if `hyper` has a loss scale and
gradients are not finite: then nothing has changed."""

WEIGHT_GRADIENT = Operator(
    "weight_gradient(Tensor grad_pooled, Tensor grad_sequence, Tensor values, Tensor offsets, Tensor? weights, "
    "Tensor divisors, Tensor winners, Tensor[] tables, str program, str bounds_check) -> Tensor",
    "embforge.operators.lookup",
)
"""The gradient of a lookup's per-sample weights, `[ids]`. `tables`: `[rows, stride]`, or `[rows, dim]` with that
stride."""

LOOKUP_DENSE = Operator(
    "lookup_dense(Tensor values, Tensor offsets, Tensor? weights, Tensor[] tables, SymInt[]? sequence_rows, "
    "str forward, str reduce, str weight_gradient, str bounds_check) "
    "-> (Tensor pooled, Tensor sequence, Tensor divisors, Tensor winners)",
    "embforge.operators.dense",
    has_backward=True,
)
"""A lookup with dense gradients of `tables`, `[rows, dim]` in layout order, and gradients of `weights`. Results and
programs are those of `lookup_train`; `reduce` adds the gradients of each row. `sequence_rows`: see `lookup`."""

DENSE_GRADIENTS = Operator(
    "dense_gradients(Tensor grad_pooled, Tensor grad_sequence, Tensor values, Tensor offsets, Tensor? weights, "
    "Tensor divisors, Tensor winners, str program, str bounds_check, bool[] wanted) -> Tensor[]",
    "embforge.operators.dense",
)
"""The gradients of the tables of a lookup that `wanted` selects, `[rows, dim]` each. It reads no rows, so tables may
have changed since the forward."""

GATHER = Operator(
    "gather(Tensor ids, Tensor weight, int padding_idx) -> Tensor", "embforge.functional", has_backward=True
)
"""Rows of one weight, `[ids, dim]`, with zeros for ids that are not rows of it."""

RESOLVE = Operator(
    "resolve(Tensor values, Tensor offsets, Tensor[] remaps, str program) -> Tensor", "embforge.operators.resolve"
)
"""The resolve step: turns the ids of remapped tables into rows before a lookup. `remaps`: the row of each id, by
table."""

OPERATORS = (RESOLVE, LOOKUP, LOOKUP_TRAIN, UPDATE, WEIGHT_GRADIENT, LOOKUP_DENSE, DENSE_GRADIENTS, GATHER)

_LOCK = Lock()


def register() -> None:
    """Registers the operators with torch, unless they are registered already. Imports torch."""
    import torch  # before the lock: a thread that is importing torch calls this function last, and would wait for us

    with _LOCK:
        if not hasattr(getattr(torch.ops, NAMESPACE), LOOKUP.name):  # a copy of embforge imported earlier may have
            _library()


def register_or_warn() -> None:
    """Registers the operators at the end of an import of torch, which must not fail: errors become warnings."""
    try:
        register()
    except Exception as error:
        warn(
            f"embforge's operators are not registered with torch: {error!r}; torch works without them, but modules and "
            "saved programs of embforge do not; install a torch that this embforge supports",
            stacklevel=2,
        )


@cache
def _library() -> torch.library.Library:
    """The library with all operators. It is cached to keep it alive, because its operators are removed with it."""
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
    """A function of the operator's implementation (a field of `Implementation`), imported by its first call."""

    @cache
    def loaded() -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(import_module(operator.home).IMPLEMENTATIONS[operator.name], part)
        return function

    def call(*arguments: Any, **named: Any) -> Any:
        return loaded()(*arguments, **named)

    return call
