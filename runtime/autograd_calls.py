"""Types for autograd functions, which torch leaves untyped: their context, and their results."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from torch.autograd import Function


class Context(Protocol):
    """The `ctx` in which the forward of an autograd function keeps what its backward needs.

    A protocol that derives from it lists the attributes that one function adds, with their types.
    """

    needs_input_grad: tuple[Any, ...]
    """For each input, whether its gradient is wanted; for an input that is a list of tensors, a list."""

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """The arguments of `save_for_backward`. RuntimeError if one of the tensors has changed since."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keeps tensors, which must not change until the backward."""

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Marks inputs that the forward has changed in place."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Marks results that have no gradient."""


def applied(function: type[Function], *inputs: object) -> Tensor:
    """Applies an autograd function that returns one tensor."""
    result: Tensor = function.apply(*inputs)
    return result


def all_applied(function: type[Function], *inputs: object) -> tuple[Tensor, ...]:
    """Applies an autograd function that returns one or more tensors. The result is a tuple in both cases."""
    results: Tensor | tuple[Tensor, ...] = function.apply(*inputs)
    return results if isinstance(results, tuple) else (results,)
