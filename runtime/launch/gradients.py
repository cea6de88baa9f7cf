"""What a backward gets beside the batch: the gradients of the results, and what the forward kept for it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

TrainResult = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""What a forward returns whose backward will come: pooled, sequence, divisors, winners, as below."""


def readable(gradient: Tensor) -> Tensor:
    """A gradient as a kernel may read it by pointer: contiguous, and not negated lazily (`Tensor.is_neg`)."""
    gradient = gradient.contiguous()
    return gradient.resolve_neg() if gradient.is_neg() else gradient


class Gradients(NamedTuple):
    """One backward's input, contiguous, on the tables' device."""

    pooled: Tensor
    """`[batch, output_width]` in the spec's output dtype."""
    sequence: Tensor | None
    """Flat, as the forward's; None if no feature is `none`."""
    divisors: Tensor | None
    """fp32 `[batch, features that divide]`, as the forward stored them; None if there is no such feature."""
    winners: Tensor | None
    """`[batch, columns of features that select]` positions in the dtype of ids; None if there is no such feature."""
