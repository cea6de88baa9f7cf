"""Gradients that wait for `module.step()`: rows and their gradients, a pass after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embforge.inputs import Batch
from embforge.launch.gradients import Gradients
from embforge.launch.reference import canonical_reduce, ieee_sqrt
from embforge.launch.rules import row_sum

Reduced = Sequence[tuple[Tensor, Tensor]]
"""Of every table: the rows that occur, and their gradients."""

TINY = 1e-6
"""What torch.nn.utils.clip_grad_norm_ adds to the norm."""


def as_batch(passes: Sequence[Reduced], device: torch.device) -> tuple[Batch, Gradients]:
    """All passes as one batch of the rowwise spec: of each table the rows of the first pass, then of the second, ..."""
    tables = range(len(passes[0]))
    rows = [torch.cat([reduced[t][0] for reduced in passes]) for t in tables]
    gradients = [torch.cat([reduced[t][1] for reduced in passes]).flatten() for t in tables]
    sizes = [part.numel() for part in rows]
    offsets = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int64).to(device)
    batch = Batch(torch.cat(rows), offsets, None, 1, tuple(sizes))
    pooled = torch.empty((1, 0), dtype=torch.float32, device=device)
    return batch, Gradients(pooled, torch.cat(gradients), None, None)


def norm_of(reduced: Reduced) -> Tensor:
    """The norm over all gradients, by the canonical sum: the same bits whatever the threads."""
    squares = torch.cat([row_sum(gradient * gradient) for _, gradient in reduced])[:, None]
    start = torch.zeros(1, dtype=torch.int64, device=squares.device)
    length = torch.full_like(start, squares.shape[0])
    return ieee_sqrt(canonical_reduce(squares.__getitem__, start, length, 1, squares.dtype)).reshape(())


def clipped(reduced: Reduced, norm: Tensor, max_norm: float) -> Reduced:
    """Gradients scaled down so that their norm is at most `max_norm`, as torch.nn.utils.clip_grad_norm_ does."""
    factor = (max_norm / (norm + TINY)).clamp(max=1.0)
    return [(rows, gradient * factor) for rows, gradient in reduced]
