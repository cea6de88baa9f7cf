"""One call of a plan's CUDA kernels, whoever launches them: results, work space, and the arguments in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from embforge.codegen.dtypes import DTYPES
from embforge.codegen.kernel import KERNELS
from embforge.codegen.plan import Plan
from embforge.codegen.targets.cuda.launch import QUEUE_COUNTERS, ForwardLaunch, LaunchShape, launch_of
from embforge.inputs import Batch
from embforge.launch.metadata import Metadata

MOST_BLOCKS = 2**31 - 1
"""Of a grid; samples are counted in 32 bits by the kernels too."""

Value = Tensor | int | None
"""A tensor stands for its address, None for a null pointer."""


class ForwardCall(NamedTuple):
    """What a call launches, and on what."""

    op: str
    work: ForwardLaunch
    pooled: Tensor
    sequence: Tensor | None
    divisors: Tensor | None
    winners: Tensor | None
    given: dict[str, Value]
    """Every argument by name, but `status`, which outlives calls."""

    def arguments(self, status: Tensor) -> list[Value]:
        """The kernels' arguments, in call order."""
        given = self.given | {"status": status}
        return [given[name] for name in KERNELS[self.op].in_blocks]


def _empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def forward_call(
    plan: Plan,
    shape: LaunchShape,
    metadata: Metadata,
    batch: Batch,
    sequence_elements: int,
    empty: Callable[[Sequence[int], torch.dtype, torch.device], Tensor] = _empty,
) -> ForwardCall:
    """The call of a batch on its device, results not initialised. ValueError for a batch that no launch can hold.

    `empty` makes a tensor of that shape, dtype and device for results and work space.
    """
    values, offsets, weights, size, _ = batch
    device, dtype = values.device, getattr(torch, DTYPES[plan.spec.output_dtype].torch_name)
    if size == 0 and values.numel():
        raise ValueError(f"offsets: values has {values.numel()} ids, offsets has no bag for them; both must agree")
    work = _launch_of(shape, size, values.numel())
    pooled = empty((size, plan.layout.output_width), dtype, device)
    has_sequence = bool(plan.layout.sequence_features)
    sequence = empty((sequence_elements,), dtype, device) if has_sequence else None
    keeps, layout = plan.op == "forward_train", plan.layout
    divisors = empty((size, layout.divisor_width), torch.float32, device) if keeps and layout.divisor_width else None
    winners = empty((size, layout.winner_width), values.dtype, device) if keeps and layout.winner_width else None
    queue = empty((work.queue_words,), torch.int64, device)
    queue[:QUEUE_COUNTERS].zero_()
    scratch = empty((work.scratch_floats,), torch.float32, device)
    given: dict[str, Value] = {
        "metadata": metadata.words,
        "values": values,
        "offsets": offsets,
        "weights": weights,
        "pooled": pooled,
        "sequence": sequence,
        "divisors": divisors,
        "winners": winners,
        "batch": size,
        "num_values": values.numel(),
        "sequence_size": sequence_elements,
        "scratch": scratch,
        "queue": queue,
    }
    return ForwardCall(plan.op, work, pooled, sequence, divisors, winners, given)


def _launch_of(shape: LaunchShape, batch: int, num_values: int) -> ForwardLaunch:
    work = launch_of(shape, batch, num_values)
    blocks = max((kernel.grid for kernel in work.kernels), default=0)
    if batch > MOST_BLOCKS or blocks > MOST_BLOCKS:
        raise ValueError(
            f"offsets, values: {batch} samples with {num_values} ids need {blocks} blocks; allowed: {MOST_BLOCKS} "
            "samples and blocks; split the batch"
        )
    return work
