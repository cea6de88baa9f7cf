"""What a backward reads in addition to the batch: the gradients of the results, and what the forward kept for it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

TrainResult = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""What a training forward returns: pooled, sequence, divisors and winners, as `Gradients` describes them."""


def readable(gradient: Tensor) -> Tensor:
    """Returns the gradient in a form that a kernel can read by pointer: contiguous, without torch's lazy negation
    (`Tensor.is_neg`)."""
    gradient = gradient.contiguous()
    return gradient.resolve_neg() if gradient.is_neg() else gradient


class Gradients(NamedTuple):
    """The input of one backward. All tensors are contiguous and on the device of the tables."""

    pooled: Tensor
    """`[batch, output_width]` in the spec's output dtype."""
    sequence: Tensor | None
    """Flat, with the shape of the forward's result; None if no feature has pooling `none`."""
    divisors: Tensor | None
    """fp32 `[batch, features whose pooling divides]`, as the forward stored them; None if there is no such feature."""
    winners: Tensor | None
    """`[batch, columns of features whose pooling selects]`: positions in `values`, in the dtype of ids; None if there
    is no such feature."""
