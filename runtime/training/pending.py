"""Accumulated gradients, which wait for `module.step()`: the rows and gradients of each backward pass, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from embforge.inputs import Batch
from embforge.launch.gradients import Gradients
from embforge.launch.reference.forward import canonical_reduce, ieee_sqrt
from embforge.launch.reference.rules import row_sum

Reduced = Sequence[tuple[Tensor, Tensor]]
"""For each table: the rows that occur, and the sum of each row's gradients."""

TINY = 1e-6
"""The number that torch.nn.utils.clip_grad_norm_ adds to the norm before it divides by it."""


@dataclass(frozen=True)
class Pass:
    """The gradients of one backward pass, or of several that were merged.

    `verdicts`: a loss scaler reads them; one is infinite if the gradients must not be used. Empty without a scaler.
    """

    reduced: Reduced
    verdicts: Sequence[Tensor]

    def to(self, device: torch.device) -> Pass:
        """A copy on another device."""
        moved = [(rows.to(device), gradient.to(device)) for rows, gradient in self.reduced]
        return Pass(moved, [verdict.to(device) for verdict in self.verdicts])


def nothing(tables: Sequence[Tensor]) -> Pass:
    """The gradients of a backward pass that reached no row of these tables."""
    rows = [torch.empty(0, dtype=torch.int64, device=table.device) for table in tables]
    gradients = [table.new_empty((0, table.shape[1]), dtype=torch.float32) for table in tables]
    return Pass(list(zip(rows, gradients, strict=True)), [])


def verdict_of(gradients: Gradients, reduced: Reduced) -> Tensor:
    """Infinity if an incoming gradient (also of a frozen table) or the sum of a row's gradients is not finite; or 0."""
    incoming = [gradients.pooled, *([] if gradients.sequence is None else [gradients.sequence])]
    finite = [numbers.isfinite().all() for numbers in (*incoming, *(gradient for _, gradient in reduced))]
    return gradients.pooled.new_zeros(1, dtype=torch.float32).masked_fill_(~torch.stack(finite).all(), torch.inf)


def any_not_finite(passes: Sequence[Pass]) -> bool:
    """Whether a verdict is infinite, so that no pass may be used.

    Waits for the device, as a GradScaler does before a step of torch's own optimizers.
    """
    verdicts = [verdict for each in passes for verdict in each.verdicts]
    return bool(verdicts) and not bool(torch.cat(verdicts).isfinite().all())


def as_batch(passes: Sequence[Pass], device: torch.device) -> tuple[Batch, Gradients]:
    """All passes as one batch of `rowwise_spec` and its gradients: for each table, the rows of the passes in order."""
    tables = range(len(passes[0].reduced))
    rows = [torch.cat([each.reduced[t][0] for each in passes]) for t in tables]
    gradients = [torch.cat([each.reduced[t][1] for each in passes]).flatten() for t in tables]
    sizes = [ids.numel() for ids in rows]
    offsets = torch.tensor([0, *accumulate(sizes)], dtype=torch.int64, device="cpu").to(device)
    batch = Batch(torch.cat(rows), offsets, None, 1, tuple(sizes))
    pooled = torch.empty((1, 0), dtype=torch.float32, device=device)
    return batch, Gradients(pooled, torch.cat(gradients), None, None)


def norm_of(reduced: Reduced) -> Tensor:
    """The norm over all gradients, by the canonical sum, so that no number of threads changes a bit."""
    squares = torch.cat([row_sum(gradient * gradient) for _, gradient in reduced])[:, None]
    start = torch.zeros(1, dtype=torch.int64, device=squares.device)
    length = torch.full_like(start, squares.shape[0])
    return ieee_sqrt(canonical_reduce(squares.__getitem__, start, length, 1, squares.dtype)).reshape(())


def clipped(reduced: Reduced, norm: Tensor, max_norm: float) -> Reduced:
    """Gradients scaled down so that their norm is at most `max_norm`, as torch.nn.utils.clip_grad_norm_ does."""
    factor = (max_norm / (norm + TINY)).clamp(max=1.0)
    return [(rows, gradient * factor) for rows, gradient in reduced]
