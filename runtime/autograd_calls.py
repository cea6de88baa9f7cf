"""Calls of autograd functions and what they keep, with the types that torch does not give them."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from torch.autograd import Function


class Context(Protocol):
    """Where the forward of a function keeps what its backward needs.

    A protocol that derives from it lists, with their types, the attributes that one function adds.
    """

    needs_input_grad: tuple[Any, ...]
    """Whether the gradient of each input is wanted; a list for a list of tensors."""

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """What was saved: tensors, and None where there was none. RuntimeError if one has changed since."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keeps tensors, which may not change until the backward."""

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Says which inputs the forward has changed."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Says which results have no gradient."""


def applied(function: type[Function], *inputs: object) -> Tensor:
    """The result of a function that has one."""
    result: Tensor = function.apply(*inputs)
    return result


def all_applied(function: type[Function], *inputs: object) -> tuple[Tensor, ...]:
    """The results of a function that has several, or one."""
    results: Tensor | tuple[Tensor, ...] = function.apply(*inputs)
    return results if isinstance(results, tuple) else (results,)
